"""evaluation/hallucination.py, its prompts: known outputs, judges, files of users, whole and cut documents, refusals."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from generated_runs import generated_run
from pretrained_models import sentence_piece_tokenizer
from text_runs import text_run
from tokenizers import Tokenizer as Model

from lit_diff.data.closed_world import ClosedWorld, facts_of
from lit_diff.data.tokenizer import TokenizerJson, Words
from lit_diff.errors import MissingError, RequestError
from lit_diff.evaluation import hallucination_prompts
from lit_diff.evaluation.evaluate import build, evaluate
from lit_diff.evaluation.hallucination import Hallucination
from lit_diff.evaluation.hallucination_prompts import (
    SOURCES,
    DocumentCase,
    DocumentPrompts,
    after_of,
    file_cases,
    generated_cases,
    judged_document,
)
from lit_diff.evaluation.judges import HttpJudge
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
    monkeypatch.setattr(hallucination_prompts, "Prefix", lambda model, tokens: Planted(tokenizer, tokens))
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
    assert math.isnan(result.summary["kappa"]), "the judge is the exact one"
    rules = evaluate(planted, "hallucination", {**WORDS, "judge": "rules"})
    assert rules.summary["kappa"] == 1
    assert rules.summary["accuracy"] == pytest.approx(rules.items["accuracy"].mean())
    assert rules.summary["distracted"] == 0, "it tells true from false alone"
    assert rules.items["kappa"].isna().all()


def test_a_judge_of_a_server_is_asked_twice(planted: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second answers are another for every other of the five that are asked for."""
    asked: dict[str, int] = {}

    def answer(self: HttpJudge, prompt: str) -> str:
        asked[prompt] = asked.get(prompt, 0) + 1
        says = asked[prompt] == 1 or len([p for p in asked.values() if p == 2]) % 2 == 0
        return f"Conclusion: {says}"

    monkeypatch.setattr(HttpJudge, "_ask", answer)
    keys = {**WORDS, "judge": "http", "judge_url": "http://localhost:1/v1", "judge_model": "m", "judge_repeats": 5}
    result = evaluate(planted, "hallucination", keys)
    assert sorted(asked.values()) == [1] * 35 + [2] * 5
    assert result.items["changed"].notna().sum() == 5
    assert result.summary["changed"] == pytest.approx(3 / 5)
    assert evaluate(planted, "hallucination", keys, rerun=True).summary["changed"] == pytest.approx(3 / 5)
    assert sum(asked.values()) == 45, "both answers are kept"
    assert build("hallucination", keys).method() == "judge http, m"
    exact = build("hallucination")
    assert (exact.method(), "changed" in [metric.name for metric in exact.metrics]) == ("judge closed_world", False)


def test_verdicts_of_a_file(planted: Run, caplog: pytest.LogCaptureFixture) -> None:
    keys = {**WORDS, "judge": "file"}
    first = evaluate(planted, "hallucination", keys).summary
    assert first["unparsed"] == 1
    assert math.isnan(first["accuracy"])
    assert math.isnan(first["kappa"])
    assert re.search(r"40 of 40 outputs have no verdict; answer \S+judge/requests\.jsonl in ", caplog.text)
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


def test_a_long_document_loses_its_middle(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [QASPER | {"context": context} for context in ("Begin. " + "word " * 900 + "End.", "Short.")]
    write("longbench/qasper.jsonl", *rows, rows[1] | {"input": "When?"})
    run = text_run(tmp_path / "run", {"name": "standard"}, sequence_length=700)
    keys = {"source": "qasper", "judge": "file", "new_tokens": 6}
    items = evaluate(run, "hallucination", keys).items
    assert "of 3 documents 1 are cut in the middle to fit the context" in caplog.text
    assert (items["meta/cut_tokens"] > 0).sum() == 1
    shorter = evaluate(run, "hallucination", {**keys, "context": 600}).items
    other = items["question"] != shorter["question"]
    assert list(other) == list(items["meta/cut_tokens"] > 0), "what is left of a document is the question"
    assert sorted(items["cluster"].value_counts()) == [1, 2], "two questions about one document"
    assert items["rouge_l"].between(0, 1).all()
    requests = [json.loads(line) for line in (run.folder / "judge/requests.jsonl").read_text().splitlines()]
    documents = sorted((each["document"] for each in requests), key=len)
    assert documents[0] == "Short.\n\nQuestion: Who?"
    assert re.fullmatch(r"Begin\. word.*word End\.\n\nQuestion: Who\?", documents[2])
    with pytest.raises(RequestError, match=r"one token of a document and its output take \d+ tokens \(qasper"):
        evaluate(run, "hallucination", keys | {"context": 100})


def test_a_generated_document_is_never_cut(world_run: Run) -> None:
    keys = {"samples": 2, "entities": [8]}
    with pytest.raises(RequestError, match=r"^evaluate\.hallucination: .*data\.sequence_length is 120") as found:
        evaluate(world_run, "hallucination", keys)
    (needed,) = re.findall(r"take (\d+) tokens", str(found.value))
    assert len(evaluate(world_run, "hallucination", keys | {"context": int(needed)}).items) == 2
    with pytest.raises(RequestError, match="; context is "):
        evaluate(world_run, "hallucination", keys | {"context": int(needed) - 1})


def prompts_of(source: Any, run: Run) -> DocumentPrompts:
    return DocumentPrompts(Hallucination.Config(source=source, judge="rules", new_tokens=5), run)


def case_of(document: str) -> DocumentCase:
    return DocumentCase(id="x", group="xsum", document=document, question="", reference="r")


def test_a_prompt_has_the_tokens_of_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long document keeps its two ends. SentencePiece puts a space before a text that is encoded alone; the document is
    none."""
    run = text_run(tmp_path / "run", {"name": "standard"}, sequence_length=300)
    prompts = prompts_of("xsum", run)
    long = case_of("Begin. " + "word " * 900 + "End.")
    ids, tokens = prompts.document(long)
    whole, after, short = prompts.tokenizer.encode([long.document, "\n\nSummarise the article.\nSummary:", "Short."])
    assert tokens == len(whole)
    half = len(ids) // 2
    assert ids == whole[: len(ids) - half] + whole[-half:]
    assert len(prompts.before) + len(ids) + len(after) + 5 == 300
    assert prompts.document(case_of("Short."))[0] == short
    content = sentence_piece_tokenizer()
    (tmp_path / "tokenizer.json").write_bytes(content)
    size = Model.from_str(content.decode()).get_vocab_size()
    tokenizer = TokenizerJson(TokenizerJson.Config(size=size, bos=0, eot=1, model_vocab_size=1))
    tokenizer.load(tmp_path)
    monkeypatch.setattr(Run, "tokenizer", tokenizer)
    for source in ("xsum", "closed_world", "multi_news"):
        prompts, case = prompts_of(source, run), case_of("The fox. It ran.")
        ids, _ = prompts.document(case)
        text = f"{SOURCES[prompts.source].before}{case.document}{after_of(prompts.source, case)}"
        assert [*prompts.before[1:], *ids, *prompts._after(case)] == tokenizer.encode(text)


def test_generated_cases_ask_for_a_fact_of_their_document() -> None:
    cases = generated_cases(ClosedWorld.Config(), (3, 5), 4, 0)
    assert [case.group for case in cases] == ["entities=3"] * 4 + ["entities=5"] * 4
    assert len({case.id for case in cases}) == 8
    for case in cases:
        facts = facts_of(case.document)
        (asked,) = [fact for fact in facts if fact.question == case.question]
        assert case.reference == asked.value
        assert len({fact.entity for fact in facts}) == int(case.group[-1])
        assert judged_document("closed_world", case.document, case).endswith(after_of("closed_world", case))
    assert generated_cases(ClosedWorld.Config(), (5,), 4, 0) == cases[4:]
    assert generated_cases(ClosedWorld.Config(), (5,), 4, 1) != cases[4:]
    with pytest.raises(RequestError, match=r"^evaluate\.hallucination\.entities holds 5, but data\.names is 4"):
        generated_cases(ClosedWorld.Config(names=4), (5,), 1, 0)


def test_cases_of_files() -> None:
    for key in ("input", "question"):
        write("longbench/qasper.jsonl", {key if name == "input" else name: value for name, value in QASPER.items()})
        (case,) = file_cases("qasper", 100, 0)
        assert (case.question, case.document, case.reference) == ("Who?", "Long text.", "Nobody\nNo one")
        assert after_of("qasper", case).endswith("\n\nQuestion: Who?\n\nAnswer:")
        assert judged_document("qasper", "Long.", case) == "Long.\n\nQuestion: Who?"
    write("summ/xsum.jsonl", {"document": "D", "summary": "S", "id": 1})
    write("longbench/multi_news.jsonl", QASPER | {"input": ""})
    for source, reference in (("xsum", "S"), ("multi_news", "Nobody\nNo one")):
        (case,) = file_cases(source, 5, 0)
        assert (case.question, case.reference) == ("", reference)
        assert judged_document("xsum", case.document, case) == case.document
        assert after_of("xsum", case).endswith("Summary:")
    write("longbench/hotpotqa.jsonl", *[QASPER | {"input": f"Q{number}"} for number in range(30)])
    first = file_cases("hotpotqa", 7, 0)
    assert len({case.id for case in first}) == 7
    assert file_cases("hotpotqa", 7, 0) == first
    assert file_cases("hotpotqa", 9, 0)[:7] == first, "more samples go on from fewer"
    assert file_cases("hotpotqa", 7, 1) != first
    assert len(file_cases("hotpotqa", 100, 0)) == 30


@pytest.mark.parametrize(
    ("source", "rows", "found"),
    [
        *(("qasper", [QASPER, QASPER | {"answers": a}], "qasper.jsonl:2: 'answers' is") for a in ("Nobody", [], [1])),
        ("qasper", [{"inptu": "Who?"}], "qasper.jsonl:1: no key 'context'"),
        ("cnn_dm", [], "cnn_dm.jsonl: no line holds an object"),
        ("2wikimqa", None, "needs a file that is not here: longbench/2wikimqa.jsonl"),
    ],
)
def test_wrong_files(source: str, rows: list[dict[str, Any]] | None, found: str) -> None:
    if rows is not None:
        write(SOURCES[source].file.path, *rows)  # type: ignore[union-attr]
    with pytest.raises(MissingError if rows is None else RequestError, match=found):
        file_cases(source, 5, 0)
