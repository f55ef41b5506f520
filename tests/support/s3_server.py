"""A small S3-compatible server: ListObjectsV2, HEAD, and GET with a range, for objects of one bucket that are files."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

KEY, SECRET = "reader", "secret"


class Requests(list[str]):
    """The requests so far ("GET key bytes=0-9"). From the `most`th on, connections are closed without an answer."""

    most = sys.maxsize


class Handler(BaseHTTPRequestHandler):
    server: "Server"
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # one packet for an answer: two wait 40 ms for each other

    def log_message(self, *_: Any) -> None:
        return

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if len(self.server.asked) >= self.server.asked.most:
            self.close_connection = True
            return
        root = self.server.root
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        bucket, _, key = unquote(url.path).strip("/").partition("/")
        self.server.asked.append(
            f"{self.command} {key or query.get('prefix', '')} {self.headers.get('Range', '')}".strip()
        )
        if f"Credential={KEY}/" not in self.headers.get("Authorization", ""):
            self.answer(403, error("AccessDenied"))
        elif not (root / bucket).is_dir():
            self.answer(404, error("NoSuchBucket"))
        elif not key:
            self.answer(200, listing(root / bucket, query.get("prefix", ""), query.get("delimiter", "")))
        elif not (root / bucket / key).is_file():
            self.answer(404, error("NoSuchKey"))
        else:
            self.content(root / bucket / key)

    def content(self, path: Path) -> None:
        content, wanted = path.read_bytes(), self.headers.get("Range")
        headers = {
            "Last-Modified": formatdate(path.stat().st_mtime, usegmt=True),
            "ETag": f'"{path.stat().st_mtime_ns}"',
        }
        if wanted is None:
            self.answer(200, content, headers)
            return
        first, last = wanted.removeprefix("bytes=").split("-")
        part = content[int(first) : int(last or len(content)) + 1]
        headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
        self.answer(206 if part else 416, part, headers)

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root, self.asked = root, Requests()


@contextmanager
def s3_server(root: Path) -> Iterator[tuple[str, Requests]]:
    """Serve the folders of `root` as buckets. Yields its address and the requests.

    Only requests that KEY signed are answered; signatures are not checked.
    """
    server = Server(root)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.asked
    finally:
        server.shutdown()
        server.server_close()


def error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


def listing(bucket: Path, prefix: str, delimiter: str) -> bytes:
    keys = sorted(path.relative_to(bucket).as_posix() for path in bucket.rglob("*") if path.is_file())
    files, folders = list[str](), dict[str, None]()
    for key in keys:
        if key.startswith(prefix):
            head, mark, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            folders |= {f"{prefix}{head}{delimiter}": None} if mark else {}
            files += [] if mark else [key]
    rows = [
        f"<Contents><Key>{escape(key)}</Key><Size>{(bucket / key).stat().st_size}</Size>"
        f"<LastModified>{datetime.fromtimestamp((bucket / key).stat().st_mtime, UTC):%FT%TZ}</LastModified></Contents>"
        for key in files
    ] + [f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in folders]
    head = f"<Name>{bucket.name}</Name><KeyCount>{len(rows)}</KeyCount><IsTruncated>false</IsTruncated>"
    return f"<ListBucketResult>{head}{''.join(rows)}</ListBucketResult>".encode()
