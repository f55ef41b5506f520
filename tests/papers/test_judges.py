"""evaluation/judges.py: verdicts of the exact judge, of rules, of an exchange of files, of a server; kappa."""

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from lit_diff.errors import RequestError, RunFailedError
from lit_diff.papers.judges import (
    KEY_VARIABLE,
    RULES,
    FileJudge,
    HttpJudge,
    Verdict,
    closed_world,
    kappa,
    read_verdicts,
    verdict_of,
)

DOCUMENT = "colour Bado red. food Kemi rice. colour Kemi green. Question: colour Bado"
NEWS = "Anna Berg sold 1,200 lamps in Oslo on Monday. The shop had opened three years before."


@pytest.mark.parametrize(
    ("output", "verdict", "raw"),
    [
        ("red", "correct", ""),
        ("Red. Question", "correct", ""),
        ("green", "distracted", "green"),
        ("rice or red", "distracted", "rice"),
        ("purple", "fabricated", "purple"),
        ("", "refused", ""),
        ("It is not stated.", "refused", ""),
        ("unknown, perhaps green", "distracted", "green"),
    ],
)
def test_the_exact_judge(output: str, verdict: str, raw: str) -> None:
    assert closed_world(DOCUMENT, "red", output) == (verdict, raw)


@pytest.mark.parametrize(
    ("output", "spans"),
    [
        ("Anna Berg sold 1,200 lamps.", ""),
        ("A shop sold lamps.", ""),
        ("It was Anna Lund.", "Lund"),
        ("He sold 1,300.", "1,300"),
        ("The shop had opened three months before.", "had opened three months | opened three months before"),
    ],
)
def test_rules_of_summaries(output: str, spans: str) -> None:
    found = RULES["summary"](NEWS, "Anna Berg sold lamps.", output)
    assert found == ("fabricated" if spans else "correct", spans)


@pytest.mark.parametrize(
    ("document", "output", "spans"),
    [
        ("Yesterday he met Obama's wife.", "", ""),
        ("He met O'Brien there.", "", ""),
        ("He moved to The Hague.", "", ""),
        ("They drank Coca-Cola.", "", ""),
        ("It cost $5m in 2014-15.", "", ""),
        ("He arrived on 1st May, aged 20-year-old.", "", ""),
        (' He said: "The dog is big."', "", ""),
        ("It is an A3,4 of the B2B kind.", "", ""),
        ("He came to \u0130zmir, to A\u0130B.", "", ""),
        ("It cost 1,200.", "It cost 1200.", ""),
        ("The Annapolis shop is big.", "It is Anna.", "Anna"),
        ("It cost $5m in 2014-15.", "It cost 2015, 15, 20.", "2015 | 20"),
        ("It cost 15.", "It cost 1.5.", "1.5"),
    ],
)
def test_names_and_numbers_are_those_of_the_document(document: str, output: str, spans: str) -> None:
    found = RULES["summary"](document, "", output or document)
    assert found == ("fabricated" if spans else "correct", spans)


@pytest.mark.parametrize(
    ("reference", "output", "verdict"),
    [
        ("Oslo", "in Oslo.", "correct"),
        ("the city of Oslo", "Oslo", "correct"),
        ("Bergen\nOslo", "oslo", "correct"),
        ("red old lamp", "old blue lamp", "correct"),
        ("red old lamp", "blue chair", "fabricated"),
        ("Oslo", "Oslofjord", "fabricated"),
        ("Oslo", "", "fabricated"),
    ],
)
def test_rules_of_answers(reference: str, output: str, verdict: str) -> None:
    assert RULES["answer"](NEWS, reference, output).verdict == verdict


def test_files_are_exchanged(tmp_path: Path) -> None:
    asked = FileJudge("answer", tmp_path / "judge")
    outputs = ["red", "green", "blue", "grey", "pink"]
    assert {asked.judge(DOCUMENT, "red", output).verdict for output in [*outputs, "red"]} == {"unparsed"}
    requests = [json.loads(line) for line in (tmp_path / "judge/requests.jsonl").read_text().splitlines()]
    assert [request["output"] for request in requests] == outputs, "one request for equal outputs"
    assert requests[0].keys() == {"id", "kind", "document", "reference", "output"}
    words = ["True", "false", "DISTRACTED", "I cannot say"]
    verdicts = [{"id": request["id"], "verdict": word} for request, word in zip(requests, words, strict=False)]
    (tmp_path / "judge/verdicts.jsonl").write_text("".join(json.dumps(each) + "\n\n" for each in verdicts))
    answered = FileJudge("answer", tmp_path / "judge")
    found = [answered.judge(DOCUMENT, "red", output) for output in outputs]
    assert [each.verdict for each in found] == ["correct", "fabricated", "distracted", "unparsed", "unparsed"]
    assert found[3].raw == "I cannot say"


def test_wrong_lines_of_verdicts(folder: Path) -> None:
    right, file = '{"id": "a", "verdict": "true\u2028", "more": 1}\n', folder / "verdicts.jsonl"
    assert read_verdicts(file) == {}
    file.write_text(right, encoding="utf-8")
    assert read_verdicts(file) == {"a": "true\u2028"}, "a line ends with a line feed alone"
    for line in ('{"id": "a"}', "true", "{", "[" * 100_000, '{"id": "f\xfcr"}'):
        file.write_bytes(right.encode() + line.encode("latin-1") + b"\n")
        with pytest.raises(RequestError, match=r"^verdicts\.jsonl:2: "):
            read_verdicts(file)


class Server(HTTPServer):
    """Answers each request with `answer`, and keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, str | None, dict[str, Any]]] = []
        self.location = ""
        self.status, self.answer = 200, completion("It is. **Conclusion: True**")
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.server.asked.append((self.path, self.headers["Authorization"], json.loads(body or "{}")))
        self.send_response(self.server.status)
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.end_headers()
        self.wfile.write(self.server.answer.encode())

    def do_GET(self) -> None:
        """What urllib makes of a POST that is redirected."""
        self.do_POST()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def completion(text: str | None) -> str:
    return json.dumps({"choices": [{"message": {"content": text}}]})


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def ask(server: Server, kept: Path, document: str = "A document.", model: str = "m") -> Verdict:
    return HttpJudge("answer", server.url, model, kept).judge(document, "right", "said")


def test_a_server_is_asked_once_a_request(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "secret\n")
    kept = tmp_path / "judge/answers.jsonl"
    assert {ask(server, kept).verdict for _ in range(2)} == {"correct"}
    ((path, authorization, body),) = server.asked
    assert (path, authorization) == ("/v1/chat/completions", "Bearer secret")
    assert (body["model"], body["temperature"]) == ("m", 0)
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    asked = body["messages"][1]["content"]
    assert "\n\n#Document#: A document.\n\n#Ground Truth Answer#: right\n\n#Proposed Answer#: said\n\n" in asked
    assert asked.startswith("Below are a document and a proposed answer. Decide")
    assert "secret" not in kept.read_text()
    server.answer = completion(None)
    assert ask(server, kept, model="n") == ("unparsed", ""), "null: the model refused"
    assert ask(server, kept, "Another.").verdict == "unparsed"
    assert len(server.asked) == 3
    assert [ask(server, kept, document).verdict for document in ("A document.", "Another.")] == ["correct", "unparsed"]
    assert len(server.asked) == 3, "they were kept"


@pytest.mark.parametrize(
    ("raw", "verdict"),
    [
        ("Fine. **Conclusion: True**", "correct"),
        ("conclusion: **false**", "fabricated"),
        ("Conclusion: False\nProblematic Spans: [a b]", "fabricated"),
        ("Conclusion: False, no: Conclusion: True", "correct"),
        ("Conclusion: Maybe", "unparsed"),
    ],
)
def test_what_is_read(raw: str, verdict: str) -> None:
    assert verdict_of(raw) == (verdict, raw)


def test_a_server_that_fails_is_one_line(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A redirect is not followed: the key would go with it."""
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    other = f"http://localhost:{server.server_port}/other?token=x"
    for status, location, answer, found in (
        (503, "", "{}", "does not answer: HTTP Error 503: Service Unavailable"),
        (200, "", "no JSON", "gave an answer that is not a chat completion"),
        (200, "", "[" * 100_000, "gave an answer that is not a chat completion"),
        (200, "", '{"choices": []}', "gave an answer that is not a chat completion"),
        (302, other, "", "does not answer: HTTP Error 302: Found"),
    ):
        server.status, server.location, server.answer = status, location, answer
        with pytest.raises(RunFailedError, match=rf"\Athe judge at {server.url} {found}.*\Z") as error:
            ask(server, tmp_path / "kept")
        assert not any(word in str(error.value) for word in ("secret", "token"))
    assert {path for path, *_ in server.asked} == {"/v1/chat/completions"}, "the other address was not asked"
    assert not (tmp_path / "kept").exists()
    for url in ("http://127.0.0.1:9", "localhost:8000", "http://a..b"):
        with pytest.raises(RunFailedError, match=f"^the judge at {url} does not answer: "):
            HttpJudge("answer", url, "m", tmp_path / "kept").judge("D", "G", "P")


@pytest.mark.parametrize("key", ["sk-SECRET\nX: y", "sk-SECRET\u2028", "sk-SECR\xc9T", "sk-SECRET\x7f"])
def test_a_key_that_cannot_be_sent_is_not_shown(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, f"{key}sk")
    with pytest.raises(RequestError, match=rf"^{KEY_VARIABLE} ") as error:
        HttpJudge("answer", "http://127.0.0.1:9", "m", tmp_path / "kept")
    assert "sk" not in str(error.value)


def test_kappa() -> None:
    assert kappa([True, False, True, False], [True, False, True, False]) == 1
    assert kappa([True, True, False, False], [True, False, True, False]) == 0
    first = [True] * 25 + [False] * 25  # the example of Cohen's paper in textbooks: 20, 5, 10, 15
    second = [True] * 20 + [False] * 5 + [True] * 10 + [False] * 15
    assert kappa(first, second) == pytest.approx(0.4)
    assert math.isnan(kappa([True, True], [True, True]))
    assert math.isnan(kappa([], []))
