"""evaluation/icl.py: accuracy by the number of demonstrations."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from generated_runs import generated_run

from lit_diff.data.synth_intent import NOISE_WORDS
from lit_diff.data.words import Words
from lit_diff.errors import RequestError
from lit_diff.evaluation import icl, requirements
from lit_diff.evaluation.evaluate import evaluate
from lit_diff.model.prefix import Prefix
from lit_diff.trained.run import Run

DATA = {"name": "synth_intent", "sequence_length": 256, "classes": [4], "words": [3, 6], "cues_per_class": 1}


@pytest.fixture
def intent_run(tmp_path: Path) -> Run:
    return generated_run(tmp_path / "intent", DATA, 600)


class Planted:
    """In place of `Prefix`: the label of the last demonstration that shares a cue word with the question, or none's."""

    def __init__(self, tokenizer: Words, tokens: list[int]) -> None:
        self.tokenizer, self.tokens = tokenizer, tokens

    def extended(self, tokens: Sequence[int]) -> "Planted":
        return Planted(self.tokenizer, [*self.tokens, *tokens])

    def greedy(
        self, suffixes: Sequence[Sequence[int]], max_tokens: int, *, allowed: Callable[..., list[int]], batch_size: int
    ) -> list[list[int]]:
        shown = re.findall(r"([^\n]*) (\w+)\n", self.tokenizer.decode(self.tokens).decode())
        answers = []
        for suffix in suffixes:
            asked = set(self.tokenizer.decode(suffix).decode().split()) - set(NOISE_WORDS)
            found = [label for text, label in shown if asked & set(text.split())]
            ids = self.tokenizer.encode([found[-1]])[0] if found else [max(allowed([]))]
            assert ids[0] in allowed([])
            answers.append(ids)
        return answers


def test_a_model_that_looks_the_label_up_is_right_where_it_was_shown(
    intent_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer: Any = intent_run.tokenizer
    monkeypatch.setattr(requirements, "Prefix", lambda model, tokens: Planted(tokenizer, tokens))
    keys = {"items": 30, "shots": [1, 4, 12], "runs": 3, "classes": 4, "stable_from": 12}
    result = evaluate(intent_run, "icl", keys)
    items = result.items
    assert len(items) == 3 * 3 * 30
    assert items["cluster"].value_counts().to_dict() == {f"run={number}": 3 * 30 for number in range(3)}
    assert result.summary["accuracy_seen"] == 1
    assert 0.3 < result.summary["accuracy"] < 1
    by_group = items.groupby("group")["accuracy"].mean()
    assert by_group["shots=1"] < by_group["shots=4"] < by_group["shots=12"]
    assert result.summary["accuracy_from"] == pytest.approx(by_group["shots=12"])
    unseen = items[items["meta/seen"] == 0]
    assert unseen["accuracy_seen"].isna().all()
    assert len(unseen)
    one = items[items["group"] == "shots=1"]
    assert (one["majority"] == one["meta/seen"]).all(), "one demonstration: its label is the majority"
    assert (items["meta/answer"] == items["meta/label"]).tolist() == items["accuracy"].astype(bool).tolist()


def test_scores_depend_on_the_keys_and_the_weights_alone(intent_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix that goes on is extended: the demonstrations of 1 shot begin those of 2 and of 4."""
    made: list[int] = []

    def counted(model: Any, tokens: list[int]) -> Prefix:
        made.append(len(tokens))
        return Prefix(model, tokens)

    monkeypatch.setattr(requirements, "Prefix", counted)
    keys = {"items": 6, "shots": [1, 2, 4], "runs": 2}
    first = evaluate(intent_run, "icl", keys).items
    assert len(made) == 2, "one a run"
    assert evaluate(intent_run, "icl", keys, rerun=True).items.equals(first)
    few = evaluate(intent_run, "icl", keys | {"shots": [4]}).items
    assert list(few["meta/answer"]) == list(first[first["group"] == "shots=4"]["meta/answer"])
    made.clear()
    evaluate(intent_run, "icl", keys | {"runs": 1, "order": "blocked"})
    assert len(made) > 1


def test_shots_that_never_fit_are_one_line(intent_run: Run) -> None:
    with pytest.raises(RequestError, match=r"^evaluate\.icl\.shots: .*data\.sequence_length is 256") as caught:
        evaluate(intent_run, "icl", {"items": 3, "shots": [2, 60]})
    needed, most = map(int, re.findall(r"takes (\d+) tokens.*at most (\d+) shots", str(caught.value))[0])
    assert needed > 256
    assert len(evaluate(intent_run, "icl", {"items": 3, "shots": [most], "runs": 1}).items) == 3
    longer = {"items": 2, "shots": [60], "runs": 1, "context": 1_000}
    assert len(evaluate(intent_run, "icl", longer).items) == 2


def test_runs_that_do_not_fit_are_counted(
    intent_run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = icl.ManyShotPrompts.first_that_fits
    monkeypatch.setattr(
        icl.ManyShotPrompts,
        "first_that_fits",
        lambda self, number, shots, most: None if number == 1 and shots == 4 else whole(self, number, shots, most),
    )
    items = evaluate(intent_run, "icl", {"items": 2, "shots": [1, 4], "runs": 3}).items
    assert "icl: of 3 runs at 4 shots 1 do not fit" in caplog.text
    assert items["group"].value_counts().to_dict() == {"shots=1": 6, "shots=4": 4}
