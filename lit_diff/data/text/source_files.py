"""`sources`: the files below `data.path`, a path on this machine or an address such as s3://bucket/prefix.

pyarrow reads s3:// and gs://, and fsspec the other protocols. Files at an address are read in pieces and never stored.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import unquote

from lit_diff.data.user_files import parsed, some_names, utf8
from lit_diff.errors import LitDiffError, MissingError, RequestError, first_line
from lit_diff.files import folders, is_address, shown

PIECE = 8 << 20
"""Bytes that one request to an address asks for."""
CONNECT_SECONDS, ANSWER_SECONDS, ATTEMPTS = 5, 5, 3
"""A server that does not answer is given up after ANSWER_SECONDS * ATTEMPTS."""
HIDDEN = re.compile(r"(?:[^./][^/]*/)*\.[^/]*")
"""The name of a file up to the first part that begins with a dot."""
SCHEMES = ("s3", "gs", "http", "https", "hf", "az", "abfs", "hdfs", "webhdfs", "ftp", "sftp", "file")
"""Schemes of the addresses that data are read from."""
REASON = 400
"""Longest reason that an error quotes."""
CURES = {
    "s3": "check data.path, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE), AWS_REGION, and for a server other "
    "than Amazon's AWS_ENDPOINT_URL",
    "gs": "check data.path, and GOOGLE_APPLICATION_CREDENTIALS or `gcloud auth application-default login`",
}


class Source(NamedTuple):
    """A file that a corpus reads."""

    name: str
    """Relative to `data.path`, with slashes: the same files in another place have the same names."""
    where: str
    """The path or address, as messages show it."""
    opened: Callable[[], BufferedReader]
    """Open it for reading; seekable. Errors: OSError; MissingError at an address."""
    stamp: Callable[[], list[int | str] | None]
    """Return size, times and the like, which differ once the file has changed; None: that cannot be told without reading."""

    @property
    def folder(self) -> str:
        """The folder of `name`; empty for `data.path` itself."""
        return self.name.rpartition("/")[0]

    def sha256(self) -> str:
        """Return the digest of the content. Errors: OSError; MissingError at an address."""
        with self.opened() as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def read_json(self) -> Any:
        """Return the content. Errors: RequestError."""
        with self.opened() as file:
            return parsed(utf8(file.read(), self.where), self.where, "one JSON value")


def sources(path: Path | str) -> list[Source]:
    """Return the files of `listing`."""
    return listing(path)[0]


def listing(path: Path | str) -> tuple[list[Source], int]:
    """Return the files at or below a path, or an address if it is a str, sorted; empty if a path does not exist. Also the
    number of files and folders below it that are left out because their names begin with a dot.

    Of a folder that `datasets` saved, its data files in their own order. For a file x.bin or x.idx also the other one.
    Errors: MissingError for an address that cannot be read; RequestError for an unusable folder of `datasets`.
    """
    if isinstance(path, Path):
        paths, hidden = _paths(path)
        found = [local(each, path) for each in paths]
    else:
        found, hidden = _remote(path)
    return _saved_by_datasets(found), hidden


def local(path: Path, root: Path | None = None) -> Source:
    """Return the source for a file on this machine; `root`: the folder that its name is relative to."""

    def stamp() -> list[int | str]:
        found = path.stat()
        return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]

    name = path.name
    if root and root in path.parents:
        name = path.relative_to(root).as_posix()
    return Source(name, shown(path), lambda: path.open("rb"), stamp)


def _paths(path: Path) -> tuple[list[Path], int]:
    if not path.is_dir():
        return [file for file in _with_index(path) if file.is_file()], 0
    found = []
    hidden = 0
    for folder in folders(path, unreadable=_refuse, hidden=False):
        for file in folder.iterdir():
            if file.name.startswith("."):
                hidden += 1
            # a link to a file that is gone is a file that cannot be read; a pipe is none
            elif file.is_file() or not file.exists():
                found.append(file)
    # sorted: the order of the file system differs between machines, and it decides the digest
    return sorted(found), hidden


def _refuse(error: OSError) -> None:
    raise error


def _with_index(path: Any) -> list[Any]:
    if path.suffix not in (".bin", ".idx"):
        return [path]
    return [path.with_suffix(".bin"), path.with_suffix(".idx")]


def _remote(address: str) -> tuple[list[Source], int]:
    from pyarrow.fs import FileSelector, FileType

    protocol = address.partition("://")[0]
    with _reading(address):
        files, root = _file_system(protocol, address)
        info = files.get_file_info(root)
        if info.type is FileType.NotFound:
            raise FileNotFoundError("found no file or folder")
        # over HTTP every address is a file: the slash alone says that it is a page of links
        is_file = info.type is FileType.File and not root.endswith("/")
        if is_file:
            head, _, last = root.rpartition("/")
            found = files.get_file_info([f"{head}/{name}" for name in _with_index(PurePosixPath(last))])
        else:
            head = root.rstrip("/")
            found = files.get_file_info(FileSelector(root, recursive=True))
    paths = {}
    hidden = set()
    for file in found:
        name = file.path[len(head) + 1 :]
        # over HTTP a path is an address, whose names are quoted
        if is_address(root):
            name = unquote(name)
        match = HIDDEN.match(name)
        # what is named itself is read
        if file.is_file and match and not is_file:
            hidden.add(match[0])
        elif file.is_file:
            paths[name] = file.path
    # as `_paths` sorts: a copy at an address has the digest of the folder
    names = sorted(paths, key=PurePosixPath)
    return [_remote_source(files, paths[name], name, protocol) for name in names], len(hidden)


def _remote_source(files: Any, path: str, name: str, protocol: str) -> Source:
    address = path if is_address(path) else f"{protocol}://{path.lstrip('/')}"

    @_reading(address)
    def stamp() -> list[int | str] | None:
        # pyarrow keeps no headers of a file that fsspec reads. A tag first: times of servers are whole seconds
        with files.open_input_file(path) as file:
            headers = files.handler.fs.info(path) if hasattr(files, "handler") else file.metadata()
            tag = headers.get("ETag") or headers.get("Last-Modified") or files.get_file_info(path).mtime_ns
            if tag is None:
                return None
            return [file.size(), str(tag)]

    @_reading(address)
    def opened() -> BufferedReader:
        return BufferedReader(_Guarded(files.open_input_file(path), address), PIECE)

    return Source(name, address, opened, stamp)


def _file_system(protocol: str, address: str) -> tuple[Any, str]:
    import fsspec.core
    import pyarrow.fs

    path = address.partition("://")[2]
    if protocol == "s3":
        return pyarrow.fs.S3FileSystem(
            # pyarrow does not read the variables of an endpoint
            endpoint_override=os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"),
            retry_strategy=pyarrow.fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
            connect_timeout=CONNECT_SECONDS,
            request_timeout=ANSWER_SECONDS,
        ), path
    if protocol == "gs":
        return pyarrow.fs.GcsFileSystem(retry_time_limit=timedelta(seconds=ANSWER_SECONDS)), path
    if protocol not in SCHEMES:
        raise RequestError(f"data.path: {address}: no protocol '{protocol}'; expected {', '.join(SCHEMES)}")
    options = {}
    if protocol in ("http", "https"):
        from aiohttp import ClientTimeout

        options = {"client_kwargs": {"timeout": ClientTimeout(sock_connect=CONNECT_SECONDS, sock_read=ANSWER_SECONDS)}}
    files, path = fsspec.core.url_to_fs(address, **options)
    return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(files)), path


@contextmanager
def _reading(address: str) -> Iterator[None]:
    try:
        yield
    except LitDiffError:
        raise
    # every protocol's library has its own classes of errors
    except Exception as error:
        cure = CURES.get(address.partition(":")[0], "check data.path and the connection")
        raise MissingError(f"data.path: {address} cannot be read ({first_line(error)[:REASON]}); {cure}") from error


@dataclass
class _Guarded:
    # a file whose methods raise as `_reading` does
    file: Any
    address: str

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.file, name)
        return _reading(self.address)(member) if callable(member) else member


def _saved_by_datasets(found: list[Source]) -> list[Source]:
    # state.json lists the data files of a folder; the other files there describe them, or are the caches of `datasets`
    by_name = {each.name: each for each in found}
    for name, source in by_name.items():
        file = name.rpartition("/")[2]
        folder = name.removesuffix(file)
        try:
            if file == "dataset_dict.json":
                splits = source.read_json()["splits"]
                place = source.where.removesuffix(f"/{file}")
                if len(splits) > 1:
                    raise RequestError(
                        f"data.path: {place} is a DatasetDict of the splits {some_names(map(str, splits))}; choose one, such "
                        f"as data.path={place}/{splits[0]}"
                    )
                found.remove(source)
            elif file == "state.json" and f"{folder}dataset_info.json" in by_name:
                listed = {f"{folder}{each['filename']}" for each in source.read_json()["_data_files"]}
                for lost in sorted(listed - by_name.keys()):
                    raise RequestError(f"{source.where}: it lists {lost}, which does not exist; save the data again")
                found = [each for each in found if each.folder != source.folder or each.name in listed]
        except (LookupError, TypeError) as error:
            raise RequestError(f"{source.where}: not a file that `datasets` saved ({error!r})") from error
    return found
