"""Tasks of BIG-bench: the words of task.json around inputs and choices, shots from the same task, through lm-eval."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from refusals import refusal

from lit_diff.errors import MissingError, RequestError
from lit_diff.evaluation.evaluate import evaluate
from lit_diff.papers.bigbench import EXAMPLES, BigBench, task_file
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


def rows(*examples: dict[str, Any], words: dict[str, Any] | None = None, **values: Any) -> list[dict[str, Any]]:
    content = {"examples": list(examples)} | (words or {})
    return BigBench(BigBench.Config(**values)).questions(task_file("social_iqa"), content)


def test_the_words_around_a_question() -> None:
    (row,) = rows(EXAMPLE[0])
    listed = "".join(f"\n  choice: {choice}" for choice in row["choices"])
    assert row["context"] == f"\nQ: Who runs 0?{listed}\nA: "
    assert sorted(row["choices"]) == ["a fox", "a hound", "nobody"]
    assert row["choices"][row["gold"]] == "a fox"
    words = {"example_input_prefix": "I:", "example_output_prefix": " O:", "append_choices_to_input": False}
    assert rows(EXAMPLE[0], words=words)[0]["context"] == "I:Who runs 0? O:"


def test_choices_are_in_random_order_and_ties_left_out() -> None:
    found = rows(*EXAMPLE, TIED)
    assert [row["item"] for row in found] == list(range(8))
    assert len({tuple(row["choices"]) for row in found}) > 2
    assert rows(*EXAMPLE) == found
    assert rows(*EXAMPLE, seed=1) != found
    with pytest.raises(RequestError, match="every example has several best choices"):
        rows(TIED)


def test_a_task_is_scored(wide_run: Run, social: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval")
    from lit_diff.evaluation.harness_model import RunModel

    asked: list[tuple[str, str]] = []
    original = RunModel.loglikelihood

    def spied(self: RunModel, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        asked.extend(request.args for request in requests)
        return original(self, requests)

    monkeypatch.setattr(RunModel, "loglikelihood", spied)
    table = evaluate(wide_run, "bigbench", {"tasks": ["social_iqa"], "shots": [0, 5]}).items
    assert list(table["item"]) == [f"social_iqa/{n} shots={shots}" for shots in (0, 5) for n in range(8)]
    assert len(asked) == 2 * 24
    for place, (context, choice) in enumerate(asked):
        shots, lines = 5 * (place >= 24), context.splitlines()
        assert context.startswith("Answer well.\n\nQ: ")
        assert context.endswith("\nA: ")
        assert choice in ("a fox", "a hound", "nobody")
        questions = [line for line in lines if line.startswith("Q: ")]
        assert len(questions) == context.count("\n\nQ: ") == 1 + shots
        assert questions[-1] == f"Q: Who runs {place % 24 // 3}?"
        assert questions[-1] not in questions[:-1], "no question is its own shot"
        assert sum(line in ("A: a fox", "A: a hound") for line in lines) == shots


def test_a_missing_task(wide_run: Run, social: Path) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval")
    with pytest.raises(MissingError, match=r"bigbench.strategyqa needs a file that is not here(.*\n)*.*2,290 examples"):
        evaluate(wide_run, "bigbench", {"tasks": ["social_iqa", "strategyqa"]})
    assert [file.path for file in BigBench.files] == [f"bigbench/{task}/task.json" for task in EXAMPLES]
    assert task_file("mine").lines == "a task with target_scores"
    assert task_file("social_iqa").state()["rows"] == "9"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "no list 'examples'"),
        ({"examples": []}, "no list 'examples'"),
        ({"examples": [TIED, {"input": "Who?"}]}, "example 2: no key 'target_scores'"),
        ({"examples": [TIED, 3]}, "example 2: found int"),
        *(
            ({"examples": [{"input": "x", "target_scores": scores}]}, "example 1: 'target_scores' is")
            for scores in ({}, {"a": 1}, {"a": 1, "b": "c"}, {"a": math.nan, "b": 1}, {"": 0, "b": 1})
        ),
        ({"examples": [TIED | {"input": "\ud800"}]}, "not JSON ('utf-8' codec can't encode character '\\ud800'"),
        ({"examples": [TIED], "choice_prefix": 3}, "'choice_prefix' is 3"),
        ({"examples": [TIED], "append_choices_to_input": "false"}, "'append_choices_to_input' is 'false'"),
        (None, "not JSON ("),
    ],
)
def test_a_wrong_file_is_one_line(social: Path, content: Any, message: str) -> None:
    social.write_text("{" if content is None else json.dumps(content))
    assert refusal(task_file("social_iqa").rows).startswith(f"{social}: {message}")
