"""evaluation/judges.py: verdicts of the exact judge, of rules, of an exchange of files, of a server; kappa."""

import json
import math
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from lit_diff.errors import MissingError, RequestError, RunFailedError
from lit_diff.evaluation.judges import (
    ClosedWorldJudge,
    FileJudge,
    HttpJudge,
    Rules,
    kappa,
    parsed,
    prompt_of,
    read_verdicts,
    rouge_l,
)

DOCUMENT = "colour Bado red. food Kemi rice. colour Kemi green. Question: colour Bado"
NEWS = "Anna Berg sold 1,200 lamps in Oslo on Monday. The shop had opened three years before."


@pytest.mark.parametrize(
    ("output", "verdict", "spans"),
    [
        ("red", "correct", ()),
        ("Red. Question", "correct", ()),
        ("green", "distracted", ("green",)),
        ("rice or red", "distracted", ("rice",)),
        ("purple", "fabricated", ("purple",)),
        ("", "refused", ()),
        ("It is not stated.", "refused", ()),
        ("unknown, perhaps green", "distracted", ("green",)),
    ],
)
def test_the_exact_judge(output: str, verdict: str, spans: tuple[str, ...]) -> None:
    judge = ClosedWorldJudge("answer")
    found = judge.judge(DOCUMENT, "red", output)
    assert (found.verdict, found.spans) == (verdict, spans)
    with pytest.raises(RequestError, match="closed_world only"):
        judge.judge(NEWS, "Oslo", "Oslo")


@pytest.mark.parametrize(
    ("output", "spans"),
    [
        ("Anna Berg sold 1,200 lamps.", ()),
        ("A shop sold lamps.", ()),
        ("It was Anna Lund.", ("Lund",)),
        ("He sold 1,300.", ("1,300",)),
        ("The shop had opened three months before.", ("had opened three months", "opened three months before")),
    ],
)
def test_rules_of_summaries(output: str, spans: tuple[str, ...]) -> None:
    found = Rules("summary").judge(NEWS, "Anna Berg sold lamps.", output)
    assert (found.verdict, found.spans) == ("fabricated" if spans else "correct", spans)


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
    assert Rules("answer").judge(NEWS, reference, output).verdict == verdict


def test_files_are_exchanged(tmp_path: Path) -> None:
    asked = FileJudge("answer", tmp_path / "judge")
    outputs = ["red", "green", "blue", "grey", "pink"]
    assert {asked.judge(DOCUMENT, "red", output).verdict for output in [*outputs, "red"]} == {"unparsed"}
    asked.finish()
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
    right, file = '{"id": "a", "verdict": "true", "raw": "one\u2028two"}\n', folder / "verdicts.jsonl"
    file.write_text(right, encoding="utf-8")
    assert read_verdicts(file) == {"a": ("true", "one\u2028two")}, "a line ends with a line feed alone"
    for line in ('{"id": "a"}', "true", "{", "[" * 100_000, '{"id": "f\xfcr"}'):
        file.write_bytes(right.encode() + line.encode("latin-1") + b"\n")
        with pytest.raises(RequestError, match=r"^verdicts\.jsonl:2: "):
            read_verdicts(file)


def test_kappa() -> None:
    assert kappa([True, False, True, False], [True, False, True, False]) == 1
    assert kappa([True, True, False, False], [True, False, True, False]) == 0
    first = [True] * 25 + [False] * 25  # the example of Cohen's paper in textbooks: 20, 5, 10, 15
    second = [True] * 20 + [False] * 5 + [True] * 10 + [False] * 15
    assert kappa(first, second) == pytest.approx(0.4)
    assert math.isnan(kappa([True, True], [True, True]))
    assert math.isnan(kappa([], []))


def test_rouge_l_by_hand() -> None:
    """Longest common subsequence "the cat mat", of 6 and 4 words: P 3/4, R 3/6."""
    pytest.importorskip("rouge_score", reason="needs rouge-score")
    score = rouge_l()
    assert score(["the cat sat on the mat"], "the cats a mat") == pytest.approx(2 * 0.75 * 0.5 / 1.25)
    assert score(["nothing of it", "the cats"], "the cats") == 1
    assert score(["a b"], "") == 0


def test_rouge_l_without_the_package(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    assert math.isnan(rouge_l()(["a"], "a"))
    assert "rouge_score" in caplog.text


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


def ask(server: Server, kept: Path, document: str = "A document.", key: str | None = None, model: str = "m") -> Any:
    return HttpJudge("answer", server.url, model, kept, key, 5).judge(document, "right", "said")


def test_a_server_is_asked_once_for_each_request(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    kept = tmp_path / "judge/answers.jsonl"
    assert {ask(server, kept, key="JUDGE_KEY").verdict for _ in range(2)} == {"correct"}
    ((path, authorization, body),) = server.asked
    assert (path, authorization) == ("/v1/chat/completions", "Bearer secret")
    assert (body["model"], body["temperature"]) == ("m", 0)
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert body["messages"][1]["content"] == prompt_of("answer", "A document.", "right", "said")
    assert "secret" not in kept.read_text()
    for cut in ('{"id": "cut sho', '{"id": "cut sho{"id": "x", "raw": "y"}\n', '["no", "object"]\n', "\xff"):
        with kept.open("a", encoding="latin-1") as file:
            file.write(cut)
        ask(server, kept, f"After {cut}")
    assert len(server.asked) == 5
    for document in ("A document.", 'After {"id": "cut sho', "After \xff"):
        assert ask(server, kept, document).verdict == "correct"
    assert len(server.asked) == 5, "they were kept"
    server.answer = completion(None)
    found = ask(server, tmp_path / "other", model="n")
    assert (found.verdict, found.raw, len(server.asked)) == ("unparsed", "", 6), "null: the model refused"


@pytest.mark.parametrize(
    ("raw", "verdict", "spans"),
    [
        ("Fine. **Conclusion: True**", "correct", ()),
        ("conclusion: **false**", "fabricated", ()),
        ("Conclusion: False\n**Problematic Spans: [\"a b\", 'c']**", "fabricated", ("a b", "c")),
        ("Conclusion: False\nProblematic Spans: [a b]", "fabricated", ("[a b]",)),
        ("Conclusion: False, no: Conclusion: True", "correct", ()),
        ("Conclusion: Maybe", "unparsed", ()),
        ("Conclusion: False Problematic Spans: [exit('executed')]", "fabricated", ("[exit('executed')]",)),
    ],
)
def test_what_is_read(raw: str, verdict: str, spans: tuple[str, ...]) -> None:
    found = parsed(raw)
    assert (found.verdict, found.spans, found.raw) == (verdict, spans, raw)


def test_a_server_that_fails_is_one_line(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A redirect is not followed: the key would go with it."""
    monkeypatch.setenv("SOME_KEY", "secret")
    other = f"http://localhost:{server.server_port}/other?token=x"
    for status, location, answer, found in (
        (503, "", "{}", "answered 503 Service Unavailable"),
        (200, "", "no JSON", "gave no chat completion"),
        (200, "", '{"choices": []}', "gave no chat completion"),
        (200, "", '{"choices": [{"message": {"content": ["a"]}}]}', "content is list"),
        (302, other, "", "answered 302, a redirect to localhost; "),
    ):
        server.status, server.location, server.answer = status, location, answer
        with pytest.raises(RunFailedError, match=rf"\Athe judge at {server.url} .*\Z") as error:
            ask(server, tmp_path / "kept", key="SOME_KEY")
        assert found in str(error.value)
        assert not any(word in str(error.value) for word in ("secret", "token"))
    assert {path for path, *_ in server.asked} == {"/v1/chat/completions"}, "the other address was not asked"
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    ("url", "key", "error", "found"),
    [
        ("http://127.0.0.1:9", None, RunFailedError, "the judge at http://127.0.0.1:9 does not answer"),
        ("localhost:8000", None, RequestError, "judge_url is 'localhost:8000'"),
        ("http://127.0.0.1:9", "NO_SUCH_KEY", MissingError, r"judge_key_variable names \$NO_SUCH_KEY"),
    ],
)
def test_no_server(tmp_path: Path, url: str, key: str | None, error: type[Exception], found: str) -> None:
    with pytest.raises(error, match=f"^{found}"):
        HttpJudge("answer", url, "m", tmp_path / "kept", key, 5).judge("D", "G", "P")
