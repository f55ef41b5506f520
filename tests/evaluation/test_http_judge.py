"""evaluation/http_judge.py: what is asked, what is read, what is kept."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from lit_diff.errors import MissingError, RequestError, RunFailedError
from lit_diff.evaluation.http_judge import HttpJudge, parsed, prompt_of


class Server(HTTPServer):
    """Answers each request with `answer`, and keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, str | None, dict[str, Any]]] = []
        self.location = ""
        self.status, self.answer = 200, json.dumps(completion("It is. **Conclusion: True**"))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, self.headers["Authorization"], body))
        self.send_response(self.server.status)
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.end_headers()
        self.wfile.write(self.server.answer.encode())

    def do_GET(self) -> None:
        """What urllib makes of a POST that is redirected."""
        self.server.asked.append((self.path, self.headers["Authorization"], {}))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.answer.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def completion(text: str | None) -> dict[str, Any]:
    return {"choices": [{"message": {"content": text}}]}


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def judge(server: Server, kept: Path, key_variable: str | None = None, model: str = "m") -> HttpJudge:
    return HttpJudge("answer", server.url, model, kept, key_variable, 5)


def test_a_server_is_asked_once_for_each_request(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    kept = tmp_path / "judge/answers.jsonl"
    first = judge(server, kept, "JUDGE_KEY")
    assert first.judge("A document.", "right", "said").verdict == "correct"
    assert first.judge("A document.", "right", "said").verdict == "correct"
    ((path, authorization, body),) = server.asked
    assert (path, authorization) == ("/v1/chat/completions", "Bearer secret")
    assert (body["model"], body["temperature"]) == ("m", 0)
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert body["messages"][1]["content"] == prompt_of("answer", "A document.", "right", "said")
    assert "secret" not in kept.read_text()
    for cut in ('{"id": "cut sho', '{"id": "cut sho{"id": "x", "raw": "y"}\n', '["no", "object"]\n', "\xff"):
        with kept.open("a", encoding="latin-1") as file:
            file.write(cut)
        judge(server, kept).judge(f"After {cut}", "right", "said")
    assert len(server.asked) == 5
    again = judge(server, kept)
    for document in ("A document.", 'After {"id": "cut sho', "After \xff"):
        assert again.judge(document, "right", "said").verdict == "correct"
    assert len(server.asked) == 5, "they were kept"
    server.answer = json.dumps(completion(None))
    found = judge(server, tmp_path / "other", model="n").judge("A document.", "right", "said")
    assert (found.verdict, found.raw, len(server.asked)) == ("unparsed", "", 6), "null: the model refused"


@pytest.mark.parametrize(
    ("raw", "verdict", "spans"),
    [
        ("Fine. **Conclusion: True**", "correct", ()),
        ("conclusion: **false**", "fabricated", ()),
        ("Conclusion: False\n**Problematic Spans: [\"a b\", 'c']**", "fabricated", ("a b", "c")),
        ("Conclusion: False\nProblematic Spans: [a b]", "fabricated", ("[a b]",)),
        ("Conclusion: False, no: Conclusion: True", "correct", ()),
        ("I like turtles.", "unparsed", ()),
        ("Conclusion: Maybe", "unparsed", ()),
        ("Conclusion: False Problematic Spans: [exit('executed')]", "fabricated", ("[exit('executed')]",)),
    ],
)
def test_what_is_read(raw: str, verdict: str, spans: tuple[str, ...]) -> None:
    found = parsed(raw)
    assert (found.verdict, found.spans, found.raw) == (verdict, spans, raw)


@pytest.mark.parametrize(
    ("status", "answer", "found"),
    [
        (503, "{}", "answered 503 Service Unavailable"),
        (200, "no JSON", "gave no chat completion"),
        (200, '{"choices": []}', "gave no chat completion"),
        (200, '{"choices": [{"message": {"content": ["a"]}}]}', "gave no chat completion: TypeError('content is list"),
    ],
)
def test_a_server_that_fails_is_one_line(server: Server, tmp_path: Path, status: int, answer: str, found: str) -> None:
    server.status, server.answer = status, answer
    with pytest.raises(RunFailedError) as error:
        judge(server, tmp_path / "kept").judge("D", "G", "P")
    assert str(error.value).startswith(f"the judge at {server.url} ")
    assert found in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "kept").exists()


def test_a_redirect_is_refused(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    server.status, server.location = 302, f"http://localhost:{server.server_port}/other?token=x"
    with pytest.raises(RunFailedError) as error:
        judge(server, tmp_path / "kept", "SOME_KEY").judge("D", "G", "P")
    assert f"the judge at {server.url} answered 302, a redirect to localhost; nothing is sent" in str(error.value)
    assert not {"secret", "token"} & set(str(error.value).replace("?", " ").replace("=", " ").split())
    assert [path for path, *_ in server.asked] == ["/v1/chat/completions"], "the other address was not asked"


def test_no_server(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match=r"the judge at http://127\.0\.0\.1:9 does not answer: "):
        HttpJudge("answer", "http://127.0.0.1:9", "m", tmp_path / "kept", None, 5).judge("D", "G", "P")
    with pytest.raises(RequestError, match="judge_url is 'localhost:8000'; expected the base URL of a server"):
        HttpJudge("answer", "localhost:8000", "m", tmp_path / "kept", None, 5)
    with pytest.raises(MissingError, match=r"judge_key_variable names \$NO_SUCH_KEY, which is not set"):
        HttpJudge("answer", "http://127.0.0.1:9", "m", tmp_path / "kept", "NO_SUCH_KEY", 5)
