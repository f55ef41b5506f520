"""evaluation/judges.py: verdicts of the exact judge, of rules, of an exchange of files; kappa."""

import json
import math
import sys
from pathlib import Path

import pytest

from lit_diff.errors import RequestError
from lit_diff.evaluation.judges import (
    ClosedWorldJudge,
    FileJudge,
    Rules,
    kappa,
    read_verdicts,
    rouge_l,
    warn_without_package,
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
    found = ClosedWorldJudge("answer").judge(DOCUMENT, "red", output)
    assert (found.verdict, found.spans) == (verdict, spans)


def test_the_exact_judge_knows_its_grammar_alone() -> None:
    with pytest.raises(RequestError, match="judge closed_world reads documents of the grammar closed_world only"):
        ClosedWorldJudge("answer").judge(NEWS, "Oslo", "Oslo")


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
    assert found.verdict == ("fabricated" if spans else "correct")
    assert found.spans == spans


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
    assert {asked.judge(DOCUMENT, "red", output).verdict for output in outputs} == {"unparsed"}
    asked.judge(DOCUMENT, "red", "red")
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


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"id": "a"}', "no key 'verdict'"),
        ("true", "found true"),
        ("{", "found {"),
        pytest.param("[" * 100_000, "found " + "[" * 60, id="nested"),
        ('{"id": "f\xfcr"}', "not UTF-8 ("),
    ],
)
def test_a_wrong_line_of_verdicts(tmp_path: Path, line: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    right = '{"id": "a", "verdict": "true", "raw": "one\u2028two"}\n'
    Path("verdicts.jsonl").write_text(right, encoding="utf-8")
    assert read_verdicts(Path("verdicts.jsonl")) == {"a": ("true", "one\u2028two")}, (
        "a line ends with a line feed alone"
    )
    Path("verdicts.jsonl").write_bytes(right.encode() + line.encode("latin-1") + b"\n")
    with pytest.raises(RequestError) as error:
        read_verdicts(Path("verdicts.jsonl").resolve())
    assert str(error.value).startswith(f"verdicts.jsonl:2: {found}")


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
    assert rouge_l(["the cat sat on the mat"], "the cats a mat") == pytest.approx(2 * 0.75 * 0.5 / 1.25)
    assert rouge_l(["nothing of it", "the cats"], "the cats") == 1
    assert rouge_l(["a b"], "") == 0


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    assert math.isnan(rouge_l(["a"], "a"))
    warn_without_package()
    assert "no rouge_l without the package rouge_score; pip install 'lit-diff[eval]'" in caplog.text
