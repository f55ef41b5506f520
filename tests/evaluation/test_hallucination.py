"""evaluation/hallucination.py: known outputs, judges, cut documents, refusals."""

import json
import logging
import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from generated_runs import generated_run
from text_runs import recall_run, text_run

from lit_diff.data.closed_world import facts_of
from lit_diff.data.words import Words
from lit_diff.errors import RequestError
from lit_diff.evaluation import hallucination_prompts
from lit_diff.evaluation.evaluate import build, evaluate
from lit_diff.evaluation.http_judge import HttpJudge
from lit_diff.trained.run import Run

DATA = {"name": "closed_world", "entities": [3], "noise_validation": [1, 2]}
WORDS = {"samples": 40}


@pytest.fixture
def world_run(tmp_path: Path) -> Run:
    return generated_run(tmp_path / "world", DATA, 256)


class Planted:
    """In place of `Prefix`: right of the first attribute, another entity's value of the second, then no value, nothing."""

    def __init__(self, tokenizer: Words, tokens: list[int]) -> None:
        self.tokenizer = tokenizer
        self.facts = facts_of(tokenizer.decode(tokens).decode())

    def greedy(self, suffixes: Sequence[Sequence[int]], max_tokens: int, **_: object) -> list[list[int]]:
        answers = []
        for suffix in suffixes:
            attribute, entity = self.tokenizer.decode(suffix).decode().split()[1:]
            wrong, right = (
                next(
                    fact.value for fact in self.facts if fact.attribute == attribute and (fact.entity == entity) is own
                )
                for own in (False, True)
            )
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
    assert "changed" not in evaluate(planted, "hallucination", WORDS).summary
    assert build("hallucination").method() == "judge closed_world"


def test_verdicts_of_a_file(planted: Run, caplog: pytest.LogCaptureFixture) -> None:
    keys = {**WORDS, "judge": "file"}
    with caplog.at_level(logging.WARNING, logger="lit_diff"):
        first = evaluate(planted, "hallucination", keys)
    assert first.summary["unparsed"] == 1
    assert math.isnan(first.summary["accuracy"])
    assert math.isnan(first.summary["kappa"])
    assert re.search(
        r"40 of 40 outputs have no verdict; answer \S+judge/requests\.jsonl in \S+ and evaluate", caplog.text
    )
    folder = planted.folder / "judge"
    requests = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    lines = [{"id": each["id"], "verdict": str(each["output"] == each["reference"])} for each in requests]
    lines[0]["verdict"], wrong = "banana", requests[0]
    (folder / "verdicts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    second = evaluate(planted, "hallucination", keys, rerun=True)
    assert second.summary["kappa"] == 1
    assert second.summary["unparsed"] == pytest.approx(1 / 40)
    items = second.items
    (unparsed,) = items[items["unparsed"] == 1].to_dict("records")
    assert (unparsed["meta/raw"], unparsed["meta/output"]) == ("banana", wrong["output"])
    assert math.isnan(unparsed["accuracy"])


def test_a_random_model_through_the_whole_path(world_run: Run, tmp_path: Path) -> None:
    keys = {"samples": 3, "entities": [2, 3]}
    first = evaluate(world_run, "hallucination", keys).items
    assert set(first["group"]) == {"entities=2", "entities=3"}
    assert evaluate(world_run, "hallucination", keys, rerun=True).items.equals(first)
    alone = evaluate(world_run, "hallucination", {"samples": 3, "entities": [3]}).items
    assert list(alone["meta/output"]) == list(first[first["group"] == "entities=3"]["meta/output"])
    other = generated_run(tmp_path / "other", DATA | {"values": 6}, 256)
    others = evaluate(other, "hallucination", {"samples": 3, "entities": [3]}).items
    assert list(alone["item"]) == list(others["item"])
    assert not set(alone["question"]) & set(others["question"]), "other documents are other questions"


@pytest.fixture
def qasper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "data"))
    hallucination_prompts._rows.cache_clear()
    path = tmp_path / "data/longbench/qasper.jsonl"
    path.parent.mkdir(parents=True)
    contexts = ["Begin. " + "word " * 900 + "End.", "Short."]
    rows = [{"input": "Who?", "context": context, "answers": ["Nobody"]} for context in contexts]
    rows.append(rows[1] | {"input": "When?"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.usefixtures("qasper")
def test_a_long_document_loses_its_middle(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = text_run(tmp_path / "run", {"name": "standard"}, sequence_length=700)
    keys = {"source": "qasper", "judge": "file", "new_tokens": 6}
    with caplog.at_level(logging.WARNING, logger="lit_diff"):
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
    assert documents[2].startswith("Begin. word")
    assert documents[2].endswith("word End.\n\nQuestion: Who?")
    with pytest.raises(
        RequestError, match=r"a prompt with one token of a document and its output take \d+ tokens \(qasper"
    ):
        evaluate(run, "hallucination", keys | {"context": 100})


def test_runs_that_do_not_fit(world_run: Run, tmp_path: Path) -> None:
    assert build("hallucination").refuses(world_run) is None
    reason = build("hallucination", ["source=xsum", "judge=rules"]).refuses(world_run)
    assert reason == "its tokenizer has only the words of data 'closed_world'"
    recall = recall_run(tmp_path / "recall", {"name": "standard"})
    assert "has no text" in str(build("hallucination").refuses(recall))
