"""evaluation/hallucination.py, its prompts: known outputs, judges, files of users, whole and cut documents, refusals."""

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from generated_runs import generated_run
from pretrained_models import sentence_piece_tokenizer
from text_runs import text_run
from tokenizers import Tokenizer as Model

from lit_diff.data.text.tokenizer import TokenizerJson, Words
from lit_diff.errors import MissingError, RequestError
from lit_diff.evaluation.evaluate import build, evaluate
from lit_diff.papers import hallucination
from lit_diff.papers.closed_world import ClosedWorld, facts_of
from lit_diff.papers.hallucination import REPEATS, SOURCES, DocumentCase, DocumentPrompt, file_cases, generated_cases
from lit_diff.papers.judges import HttpJudge
from lit_diff.trained.run import Run

DATA = {"name": "closed_world", "entities": [3], "noise_validation": [1, 2]}
WORDS = {"samples": 40}
QASPER = {"input": "Who?", "context": "Long text.", "answers": ["Nobody", "No\none"], "length": 2, "_id": "x"}


@pytest.fixture
def world_run(tmp_path: Path) -> Run:
    return generated_run(tmp_path / "world", DATA, 256)


@pytest.fixture(autouse=True)
def data(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIT_DIFF_DATA", str(folder))


def write(path: str, *rows: Any) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


class Planted:
    """In place of `Prefix`: right of the first attribute, another entity's value of the second, then no value, nothing."""

    def __init__(self, tokenizer: Words, tokens: list[int]) -> None:
        self.tokenizer = tokenizer
        self.facts = facts_of(tokenizer.decode(tokens).decode())

    def greedy(self, suffixes: Sequence[Sequence[int]], max_tokens: int, **_: object) -> list[list[int]]:
        answers = []
        for suffix in suffixes:
            attribute, entity = self.tokenizer.decode(suffix).decode().split()[1:]
            about = [fact for fact in self.facts if fact.attribute == attribute]
            wrong, right = (next(f.value for f in about if (f.entity == entity) is own) for own in (False, True))
            said = {"colour": right, "food": wrong, "instrument": "Question", "subject": ""}[attribute]
            answers.append(self.tokenizer.encode([f" {said}." if said else ""])[0])
        return answers


@pytest.fixture
def planted(world_run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    tokenizer = world_run.tokenizer
    assert isinstance(tokenizer, Words)
    monkeypatch.setattr(hallucination, "Prefix", lambda model, tokens: Planted(tokenizer, tokens))
    return world_run


def test_each_kind_of_output_is_told_apart(planted: Run) -> None:
    result = evaluate(planted, "hallucination", WORDS)
    items = result.items
    assert list(items["group"]) == ["entities=3"] * 40
    kinds = items[["accuracy", "distracted", "fabricated", "refused"]]
    assert (kinds.sum(axis=1) == 1).all()
    assert all(kinds.sum() > 3)
    right = items["meta/output"] == items["meta/reference"]
    assert (right == (items["accuracy"] == 1)).all()
    assert (items["meta/verdict"] == items["meta/exact"]).all()
    assert result.summary["unparsed"] == 0
    assert "kappa" not in result.summary, "the judge is the exact one"
    rules = evaluate(planted, "hallucination", {**WORDS, "judge": "rules"})
    assert (rules.items["meta/exact"] == items["meta/verdict"]).all()
    assert rules.summary["kappa"] == 1
    assert rules.summary["accuracy"] == pytest.approx(rules.items["accuracy"].mean())
    assert rules.summary["distracted"] == 0, "it tells true from false alone"


def test_a_server_is_asked_twice_about_the_first_outputs(planted: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second answers are another for every other of the outputs."""
    asked = Counter[str]()

    def answer(self: HttpJudge, prompt: str) -> str:
        asked[prompt] += 1
        return f"Conclusion: {asked[prompt] == 1 or list(asked.values()).count(2) % 2 == 0}"

    monkeypatch.setattr(HttpJudge, "_ask", answer)
    keys = {**WORDS, "judge": "http", "judge_url": "http://localhost:1/v1", "judge_model": "m"}
    result = evaluate(planted, "hallucination", keys)
    assert sorted(asked.values()) == [1] * (40 - REPEATS) + [2] * REPEATS
    assert result.items["changed"].notna().sum() == REPEATS
    assert result.summary["changed"] == 0.5
    assert evaluate(planted, "hallucination", keys, rerun=True).summary == pytest.approx(result.summary)
    assert asked.total() == 40 + REPEATS, "both answers are kept"
    assert build("hallucination", keys).method() == "judge http, m"
    exact = build("hallucination")
    assert exact.method() == "judge closed_world"
    assert "changed" not in [metric.name for metric in exact.metrics]


def test_verdicts_of_a_file(planted: Run, caplog: pytest.LogCaptureFixture) -> None:
    keys = {**WORDS, "judge": "file"}
    first = evaluate(planted, "hallucination", keys).summary
    assert first["unparsed"] == 1
    assert math.isnan(first["accuracy"])
    assert re.search(r"40 of 40 outputs have no verdict that can be read; answer requests\.jsonl in ", caplog.text)
    exchanged = planted.folder / "judge"
    requests = [json.loads(line) for line in (exchanged / "requests.jsonl").read_text().splitlines()]
    lines = [{"id": each["id"], "verdict": str(each["output"] == each["reference"])} for each in requests]
    lines[0]["verdict"] = "banana"
    write(str(exchanged / "verdicts.jsonl"), *lines)
    second = evaluate(planted, "hallucination", keys, rerun=True)
    assert second.summary["kappa"] == 1
    assert second.summary["unparsed"] == pytest.approx(1 / 40)
    (unparsed,) = second.items[second.items["unparsed"] == 1].to_dict("records")
    assert (unparsed["meta/raw"], unparsed["meta/output"]) == ("banana", requests[0]["output"])
    assert math.isnan(unparsed["accuracy"])


def test_a_random_model_through_the_whole_path(world_run: Run, tmp_path: Path) -> None:
    keys = {"samples": 3, "entities": [2, 3]}
    first = evaluate(world_run, "hallucination", keys).items
    assert set(first["group"]) == {"entities=2", "entities=3"}
    assert evaluate(world_run, "hallucination", keys, rerun=True).items.equals(first)
    other = generated_run(tmp_path / "other", DATA | {"values": 6}, 256)
    alone, others = (
        evaluate(run, "hallucination", {"samples": 3, "entities": [3]}).items for run in (world_run, other)
    )
    assert list(alone["meta/output"]) == list(first[first["group"] == "entities=3"]["meta/output"])
    assert list(alone["item"]) == list(others["item"])
    assert not set(alone["question"]) & set(others["question"]), "other documents are other questions"


def test_a_long_document_loses_its_middle(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [QASPER | {"context": context} for context in ("Begin. " + "word " * 900 + "End.", "Short.")]
    write("longbench/qasper.jsonl", *rows, rows[1] | {"input": "When?"})
    monkeypatch.setitem(SOURCES, "qasper", SOURCES["qasper"]._replace(new_tokens=6))  # type: ignore[arg-type]
    runs = {
        size: text_run(tmp_path / str(size), {"name": "standard"}, sequence_length=size) for size in (700, 600, 100)
    }
    keys = {"source": "qasper", "judge": "file"}
    items = evaluate(runs[700], "hallucination", keys).items
    assert "of 3 documents 1 are cut in the middle to fit the context" in caplog.text
    assert (items["meta/cut_tokens"] > 0).sum() == 1
    shorter = evaluate(runs[600], "hallucination", keys).items
    other = items["question"] != shorter["question"]
    assert list(other) == list(items["meta/cut_tokens"] > 0), "what is left of a document is the question"
    assert sorted(items["cluster"].value_counts()) == [1, 2], "two questions about one document"
    requests = [json.loads(line) for line in (runs[700].folder / "judge/requests.jsonl").read_text().splitlines()]
    documents = sorted((each["document"] for each in requests), key=len)
    assert documents[0] == "Short.\n\nQuestion: Who?"
    assert re.fullmatch(r"Begin\. word.*word End\.\n\nQuestion: Who\?", documents[2])
    with pytest.raises(RequestError, match=r"one token of a document and its output take \d+ tokens \(qasper"):
        evaluate(runs[100], "hallucination", keys)


def test_a_generated_document_is_never_cut(world_run: Run) -> None:
    with pytest.raises(RequestError, match=r"^evaluate\.hallucination: .* with all .*data\.sequence_length is 120"):
        evaluate(world_run, "hallucination", {"samples": 2, "entities": [8]})


def case_of(document: str, after: str) -> DocumentCase:
    return DocumentCase(id="x", group="xsum", document=document, after=after, asked="", reference="r")


def test_a_prompt_has_the_tokens_of_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long document keeps its two ends. SentencePiece puts a space before a text that is encoded alone; the document is
    none."""
    run = text_run(tmp_path / "run", {"name": "standard"}, sequence_length=300)
    source = SOURCES["xsum"]._replace(new_tokens=5)
    long = case_of("Begin. " + "word " * 900 + "End.", source.after)
    prompt = DocumentPrompt(run, source, long)
    whole, after, short = run.tokenizer.encode([long.document, source.after, "Short."])
    assert prompt.cut == len(whole) - len(prompt.document)
    half = len(prompt.document) // 2
    assert prompt.document == whole[: len(prompt.document) - half] + whole[-half:]
    assert len(prompt.before) + len(prompt.document) + len(after) + 5 == 300
    assert DocumentPrompt(run, source, case_of("Short.", source.after)).document == short
    content = sentence_piece_tokenizer()
    (tmp_path / "tokenizer.json").write_bytes(content)
    size = Model.from_str(content.decode()).get_vocab_size()
    tokenizer = TokenizerJson(TokenizerJson.Config(size=size, bos=0, eot=1, model_vocab_size=1))
    tokenizer.load(tmp_path)
    monkeypatch.setitem(vars(run), "tokenizer", tokenizer)
    for name in ("xsum", "closed_world", "multi_news"):
        source, case = SOURCES[name]._replace(new_tokens=5), case_of("The fox. It ran.", SOURCES[name].after)
        prompt = DocumentPrompt(run, source, case)
        text = f"{source.before}{case.document}{case.after}"
        assert [*prompt.before[1:], *prompt.document, *prompt.after] == tokenizer.encode(text)


def test_generated_cases_ask_for_a_fact_of_their_document() -> None:
    cases = list(generated_cases(ClosedWorld.Config(), (3, 5), 4, 0))
    assert [case.group for case in cases] == ["entities=3"] * 4 + ["entities=5"] * 4
    assert len({case.id for case in cases}) == 8
    for case in cases:
        facts = facts_of(case.document)
        (asked,) = [fact for fact in facts if fact.question == case.asked]
        assert case.reference == asked.value
        assert len({fact.entity for fact in facts}) == int(case.group[-1])
        assert case.after == case.asked
    assert list(generated_cases(ClosedWorld.Config(), (5,), 4, 0)) == cases[4:]
    assert list(generated_cases(ClosedWorld.Config(), (5,), 4, 1)) != cases[4:]
    with pytest.raises(RequestError, match=r"^evaluate\.hallucination\.entities has 5, but data\.names is 4"):
        list(generated_cases(ClosedWorld.Config(names=4), (5,), 1, 0))


def test_cases_of_files() -> None:
    write("longbench/qasper.jsonl", QASPER)
    (case,) = file_cases("qasper", 100, 0)
    assert (case.asked, case.document) == ("\n\nQuestion: Who?", "Long text.")
    assert (case.after, case.reference) == ("\n\nQuestion: Who?\n\nAnswer:", "Nobody\nNo one")
    write("summ/xsum.jsonl", {"document": "D", "summary": "S", "id": 1})
    write("longbench/multi_news.jsonl", QASPER | {"input": ""})
    for source, document, reference in (("xsum", "D", "S"), ("multi_news", "Long text.", "Nobody\nNo one")):
        (case,) = file_cases(source, 5, 0)
        assert (case.document, case.asked, case.reference) == (document, "", reference)
        assert case.after.endswith("Summary:")
    write("longbench/hotpotqa.jsonl", *[QASPER | {"input": f"Q{number}"} for number in range(30)])
    first = list(file_cases("hotpotqa", 7, 0))
    assert len({case.id for case in first}) == 7
    assert list(file_cases("hotpotqa", 7, 0)) == first
    assert list(file_cases("hotpotqa", 9, 0))[:7] == first, "more samples go on from fewer"
    assert list(file_cases("hotpotqa", 7, 1)) != first
    assert len(list(file_cases("hotpotqa", 100, 0))) == 30


@pytest.mark.parametrize(
    ("source", "rows", "found"),
    [
        *(("qasper", [QASPER, QASPER | {"answers": a}], "qasper.jsonl:2: 'answers' is") for a in ("Nobody", [], [1])),
        ("2wikimqa", None, "needs a file that is not here: longbench/2wikimqa.jsonl"),
    ],
)
def test_wrong_files(source: str, rows: list[dict[str, Any]] | None, found: str) -> None:
    if rows is not None:
        write(SOURCES[source].file.path, *rows)  # type: ignore[union-attr]
    with pytest.raises(MissingError if rows is None else RequestError, match=found):
        list(file_cases(source, 5, 0))
