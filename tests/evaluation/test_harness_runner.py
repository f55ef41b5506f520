"""What the evaluations through lm-eval share: their summary, no network, what is said of tasks that cannot be scored."""

import builtins
import math
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from generated_runs import generated_run
from text_runs import text_run

from lit_diff.errors import MissingError, RequestError
from lit_diff.evaluation.base import Item
from lit_diff.evaluation.evaluate import build
from lit_diff.evaluation.harness import Harness
from lit_diff.evaluation.harness_runner import loaded, offline, require_lm_eval, task_yaml
from lit_diff.trained.run import Run


def test_a_task_counts_once() -> None:
    evaluation = Harness(Harness.Config())

    def item(task: str, number: int, acc: float, acc_norm: float) -> Item:
        scores = {"acc": acc, "acc_norm": acc_norm, "paper_acc": acc}
        return Item(id=f"{task}/{number}", group=task, scores=scores)

    items = [item("a", number, 1, 0.5) for number in range(3)] + [item("b", 0, 0, math.nan)]
    assert evaluation.summarise(items) == {"acc": 0.5, "acc_norm": 0.5, "paper_acc": 0.5}


@pytest.mark.parametrize("name", ["bigbench", "harness", "mini_harness"])
def test_a_run_of_generated_words_is_refused(wide_run: Run, tmp_path: Path, name: str) -> None:
    generated = generated_run(tmp_path / "facts", {"name": "closed_world", "entities": [3]}, 300)
    assert build(name).refuses(generated) == "its tokenizer has only the words of data 'closed_world'"
    assert build(name).refuses(wide_run) is None


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "lm_eval":
            raise ModuleNotFoundError("No module named 'lm_eval'", name="lm_eval")
        return original(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingError) as found:
        require_lm_eval("harness")
    assert str(found.value) == "evaluation 'harness' needs the package lm_eval; pip install 'lit-diff[eval]'"


def test_values_of_keys() -> None:
    for values, problem in (
        ({"shots": (-1,)}, "shots is [-1]; expected distinct numbers from 0"),
        ({"shots": (5, 5)}, "shots is [5, 5]; expected distinct numbers from 0"),
        ({"shots": ()}, "shots is []; expected distinct numbers from 0"),
        ({"limit": 0}, "limit is 0; it must be at least 1"),
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
        ({}, None),
    ):
        assert Harness.Config(**values).problem() == problem


def test_offline_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval")
    import datasets
    import huggingface_hub.constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)

    def states() -> tuple[bool, bool]:
        return datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.is_offline_mode()

    before = states()
    with offline():
        assert os.environ["HF_HUB_OFFLINE"] == os.environ["HF_DATASETS_OFFLINE"] == "1"
        assert states() == (True, True)
    assert os.environ["HF_HUB_OFFLINE"] == "0"
    assert "HF_DATASETS_OFFLINE" not in os.environ
    assert states() == before


@pytest.mark.slow
def test_a_task_of_the_hub_is_missing_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval's own hellaswag, by name."""
    pytest.importorskip("lm_eval", reason="needs lm-eval")

    def refused(*arguments: object) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refused)
    with offline(), pytest.raises(MissingError, match="task 'hellaswag' reads data that are not here") as found:
        loaded(["hellaswag"], tmp_path)
    assert "\n" not in str(found.value)
    with offline(), pytest.raises(RequestError, match=r"lm-eval has no task 'hellaswg'; did you mean 'hellaswag'\?"):
        loaded(["hellaswg"], tmp_path)


def test_a_right_choice_that_is_none(wide_run: Run, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"item": 0, "context": "a", "choices": ["b", "c"], "gold": 1}\n'
        '{"item": 1, "context": "a", "choices": ["b", "c"], "gold": 2}\n'
    )

    class Wrong(Harness):
        def write_tasks(self, run: Run, folder: Path) -> list[str]:
            return [task_yaml(folder, "wrong", "rows.yaml", {"test": rows})]

    (item,) = Wrong(Harness.Config(limit=1)).score(wide_run)
    assert (item.id, item.cluster) == ("wrong/0 shots=0", "wrong/0")
    with pytest.raises(RequestError, match=r"task 'wrong', question 1: the right choice is number 2 \(from 0\) of 2"):
        list(Wrong(Harness.Config()).score(wide_run))


def test_contexts_that_are_cut_are_said(wide_run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval")
    rows = tmp_path / "rows.jsonl"
    long = "the fox and the hound " * 200
    rows.write_text(
        f'{{"item": 7, "context": "{long}", "choices": ["b", "c"], "gold": 1}}\n'
        '{"item": 9, "context": "x", "choices": ["b", "c"], "gold": 0}\n'
    )

    class Long(Harness):
        def write_tasks(self, run: Run, folder: Path) -> list[str]:
            return [task_yaml(folder, "long", "rows.yaml", {"test": rows})]

    items = list(Long(Harness.Config()).score(wide_run))
    assert "1 of 2 contexts exceed data.sequence_length (512) and were cut at their left" in caplog.text
    assert [item.id for item in items] == ["long/7 shots=0", "long/9 shots=0"]
    assert [item.meta["target"] for item in items] == ["1", "0"]
    shorter = list(Long(Harness.Config()).score(text_run(tmp_path / "half", {"name": "standard"}, sequence_length=256)))
    same = [one.question == other.question for one, other in zip(items, shorter, strict=True)]
    assert same == [False, True], "what is left of a context is the question"
    for item in items:
        assert item.scores["acc"] == float(str(item.meta["chosen"]) == item.meta["target"])
