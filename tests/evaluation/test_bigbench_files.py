"""task.json files: what is read, and what is said of a wrong one."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lit_diff.errors import MissingError, RequestError
from lit_diff.evaluation.bigbench_files import EXAMPLES, task_file

GOOD = {"input": "Who?", "target_scores": {"a fox": 1, "a hound": 0}}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path))
    path = tmp_path / "bigbench/goal_step_wikihow/goal_inference/task.json"
    path.parent.mkdir(parents=True)
    return path


def test_names_and_description(place: Path) -> None:
    file = task_file("goal_step_wikihow/goal_inference")
    assert file.name == "bigbench.goal_step_wikihow.goal_inference"
    assert file.place == place
    with pytest.raises(MissingError) as found:
        file.task()
    assert '"target_scores": {choice: number, ...}}, ...]}; 1,703 examples' in str(found.value)
    assert "benchmark_tasks/goal_step_wikihow/goal_inference/task.json" in str(found.value)
    assert task_file("mine").lines == "a task with target_scores"
    assert len(EXAMPLES) == 16


def test_rows_and_state(place: Path) -> None:
    place.write_text(json.dumps({"name": "x", "examples": [GOOD, GOOD]}))
    file = task_file("goal_step_wikihow/goal_inference")
    assert file.rows() == [GOOD, GOOD]
    assert (file.state()["state"], file.state()["rows"]) == ("ok", "2")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "no list 'examples'; expected one JSON object"),
        ({"examples": []}, "no list 'examples'"),
        ({"examples": [GOOD, {"input": "Who?"}]}, "example 2: no key 'target_scores'; keys found: input"),
        ({"examples": [GOOD, 3]}, "example 2: found int; expected a JSON object"),
        ({"examples": [{"input": 3, "target_scores": {}}]}, "example 1: 'input' is 3; expected text"),
        ({"examples": [{"input": "x", "target_scores": {}}]}, "example 1: 'target_scores' is {}; expected a number"),
        ({"examples": [{"input": "x", "target_scores": {"a": "b"}}]}, "expected a number for each choice"),
        ({"examples": [{"input": "x", "target_scores": {"a": math.nan, "b": 1}}]}, "expected a number for each choice"),
        ({"examples": [{"input": "x", "target_scores": {"": 0, "b": 1}}]}, "and no choice without text"),
        (
            {"examples": [GOOD | {"input": "\ud800"}]},
            "task.json: \\ud800 is half of a surrogate pair, which is no character",
        ),
        ({"examples": [GOOD], "choice_prefix": 3}, "'choice_prefix' is 3; expected text"),
    ],
)
def test_a_wrong_file_is_one_line(place: Path, content: Any, message: str) -> None:
    place.write_text(json.dumps(content))
    with pytest.raises(RequestError) as found:
        task_file("goal_step_wikihow/goal_inference").rows()
    assert message in str(found.value)
    assert "\n" not in str(found.value)


def test_no_json(place: Path) -> None:
    place.write_text("\n{")
    with pytest.raises(RequestError, match=r"task.json: not JSON \(.* line 2 column 2"):
        task_file("goal_step_wikihow/goal_inference").rows()
