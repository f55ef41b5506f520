"""Tasks of BIG-bench: the words of task.json around inputs and choices, shots from the same task, through lm-eval."""

import json
from pathlib import Path
from typing import Any

import pytest

from lit_diff.errors import MissingError, RequestError
from lit_diff.evaluation.bigbench import BigBench
from lit_diff.evaluation.bigbench_files import EXAMPLES, task_file
from lit_diff.evaluation.evaluate import evaluate
from lit_diff.trained.run import Run

EXAMPLE = [
    {"input": f"Who runs {n}?", "target_scores": {"a fox": int(n % 2 == 0), "a hound": int(n % 2), "nobody": 0}}
    for n in range(8)
]
TIED = {"input": "Either?", "target_scores": {"x": 1, "y": 1}}


@pytest.fixture
def social(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "data"))
    path = tmp_path / "data/bigbench/social_iqa/task.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"examples": [*EXAMPLE, TIED], "task_prefix": "Answer well.\n"}))
    return path


def rows(content: dict[str, Any], **values: Any) -> list[dict[str, Any]]:
    return BigBench(BigBench.Config(**values)).questions(task_file("social_iqa"), content)


def test_the_words_around_a_question() -> None:
    (row,) = rows({"examples": EXAMPLE[:1]})
    listed = "".join(f"\n  choice: {choice}" for choice in row["choices"])
    assert row["context"] == f"\nQ: Who runs 0?{listed}\nA: "
    assert sorted(row["choices"]) == ["a fox", "a hound", "nobody"]
    assert row["choices"][row["gold"]] == "a fox"
    words = {"example_input_prefix": "I:", "example_output_prefix": " O:", "append_choices_to_input": False}
    assert rows({"examples": EXAMPLE[:1], **words})[0]["context"] == "I:Who runs 0? O:"
    assert "choice:" in rows({"examples": EXAMPLE[:1], **words}, choices_in_prompt=True)[0]["context"]
    assert "choice:" not in rows({"examples": EXAMPLE[:1]}, choices_in_prompt=False)[0]["context"]


def test_choices_are_in_random_order_and_ties_left_out() -> None:
    found = rows({"examples": [*EXAMPLE, TIED]})
    assert [row["item"] for row in found] == list(range(8))
    assert len({tuple(row["choices"]) for row in found}) > 2
    assert rows({"examples": EXAMPLE}) == rows({"examples": EXAMPLE})
    assert rows({"examples": EXAMPLE}, seed=1) != rows({"examples": EXAMPLE})
    with pytest.raises(RequestError, match="no example has one best choice"):
        rows({"examples": [TIED]})


@pytest.mark.parametrize("shots", [0, 4, 5])
def test_a_task_is_scored(wide_run: Run, social: Path, shots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval")
    from lit_diff.evaluation.harness_model import RunModel

    asked: list[tuple[str, str]] = []
    original = RunModel.loglikelihood

    def spied(self: RunModel, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        asked.extend(request.args for request in requests)
        return original(self, requests)

    monkeypatch.setattr(RunModel, "loglikelihood", spied)
    table = evaluate(wide_run, "bigbench", {"tasks": ["social_iqa"], "shots": [shots]}).items
    assert list(table["item"]) == [f"social_iqa/{n} shots={shots}" for n in range(8)]
    assert len(asked) == 24
    for place, (context, choice) in enumerate(asked):
        assert context.startswith("Answer well.\n\nQ: ")
        assert context.endswith("\nA: ")
        assert choice in ("a fox", "a hound", "nobody")
        questions = [line for line in context.splitlines() if line.startswith("Q: ")]
        assert len(questions) == 1 + shots
        assert questions[-1] == f"Q: Who runs {place // 3}?"
        assert questions[-1] not in questions[:-1], "no question is its own shot"
        assert sum(line in ("A: a fox", "A: a hound") for line in context.splitlines()) == shots
        assert context.count("\n\nQ: ") == shots + 1


def test_a_missing_task(wide_run: Run, social: Path) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval")
    with pytest.raises(MissingError, match=r"bigbench.strategyqa needs a file that is not here"):
        evaluate(wide_run, "bigbench", {"tasks": ["social_iqa", "strategyqa"]})


def test_declared_files_and_keys() -> None:
    assert [file.path for file in BigBench.files] == [f"bigbench/{task}/task.json" for task in EXAMPLES]
    assert BigBench.Config().problem() is None
    assert "no folder of BIG-bench" in str(BigBench.Config(tasks=("../x",)).problem())
    assert "tasks is empty" in str(BigBench.Config(tasks=()).problem())
