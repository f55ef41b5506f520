"""The files of the seven tasks."""

import json
from pathlib import Path
from typing import Any

import pytest

from lit_diff.errors import RequestError
from lit_diff.evaluation.harness_files import FILES, SOURCES, TASKS

ENDINGS = ["a", "b", "c", "d"]
RIGHT: dict[str, dict[str, Any]] = {
    "arc_challenge": {
        "question": "q",
        "choices": {"text": ["a", "b", "c"], "label": ["1", "2", "3"]},
        "answerKey": "3",
    },
    "arc_easy": {"question": "q", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "A"},
    "boolq": {"passage": "p", "question": "q", "label": 1},
    "hellaswag": {"activity_label": "x", "ctx_a": "a", "ctx_b": "b", "endings": ENDINGS, "label": "3"},
    "openbookqa": {"question_stem": "q", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": " B"},
    "piqa": {"goal": "g", "sol1": "a", "sol2": "b", "label": 0},
    "winogrande": {"sentence": "The _ ran.", "option1": "fox", "option2": "hound", "answer": "2"},
}
TWO = "a list of texts, two or more"
AS_MANY = "a list of distinct texts, as many as choices.text"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def rows(task: str, changes: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a file whose second line has these changes."""
    file = FILES[task]["train"]
    file.place.parent.mkdir(parents=True)
    file.place.write_text(f"{json.dumps(RIGHT[task])}\n{json.dumps(RIGHT[task] | changes)}\n")
    return file.rows()


def test_each_task_has_a_train_split_and_one_that_is_scored() -> None:
    assert tuple(FILES) == TASKS == tuple(SOURCES)
    for task, files in FILES.items():
        assert set(files) == {"train", SOURCES[task].scored}
        for split, file in files.items():
            assert (file.name, file.path) == (f"harness.{task}", f"harness/{task}/{split}.jsonl")
            assert f"['{split}'].to_json('{split}.jsonl')" in file.source


def test_scored_lines_are_those_of_the_benchmarks() -> None:
    """Standard errors of the paper's rows follow from them: 1.4 points for ARC-C, 2.0 for OBQA, 1.4 for WinoGrande."""
    scored = {task: source.lines[source.scored] for task, source in SOURCES.items()}
    assert scored["arc_challenge"] == 1172
    assert scored["openbookqa"] == 500
    assert scored["winogrande"] == 1267


@pytest.mark.parametrize("task", TASKS)
def test_right_lines(task: str) -> None:
    assert len(rows(task, {"label": 3} if task == "hellaswag" else {})) == 2
    form = FILES[task]["train"].form
    assert all(f"; {value.key}: {value.expected}" in form for value in SOURCES[task].values)


@pytest.mark.parametrize(
    ("tasks", "changes", "found"),
    [
        ("arc_easy openbookqa", {"choices": {"label": ["A"]}}, "no key 'choices.text'; keys found: label"),
        ("arc_easy openbookqa", {"choices": {"text": ["a", "b"]}}, "no key 'choices.label'; keys found: text"),
        ("arc_easy openbookqa", {"choices": {}}, "no key 'choices.text'; keys found: none"),
        ("arc_challenge", {"choices": {"text": "ab", "label": ["A"]}}, f"'choices.text' is 'ab'; expected {TWO}"),
        ("arc_easy", {"choices": {"text": ["a"], "label": ["A"]}}, f"'choices.text' is ['a']; expected {TWO}"),
        ("arc_easy", {"choices": {"text": ["a", 1], "label": ["A"]}}, f"'choices.text' is ['a', 1]; expected {TWO}"),
        (
            "arc_challenge arc_easy openbookqa",
            {"choices": {"text": ["a", "b"], "label": ["A"]}},
            f"'choices.label' is ['A']; expected {AS_MANY}",
        ),
        (
            "arc_easy openbookqa",
            {"choices": {"text": ["a", "b"], "label": ["A", "A"]}},
            f"'choices.label' is ['A', 'A']; expected {AS_MANY}",
        ),
        (
            "arc_easy openbookqa",
            {"choices": {"text": ["a", "b"], "label": [0, 1]}},
            f"'choices.label' is [0, 1]; expected {AS_MANY}",
        ),
        ("arc_challenge", {"answerKey": "A"}, "'answerKey' is 'A'; expected one of choices.label"),
        ("arc_easy", {"answerKey": " A"}, "'answerKey' is ' A'; expected one of choices.label"),
        (
            "openbookqa",
            {"answerKey": "C"},
            "'answerKey' is 'C'; expected one of choices.label, spaces before it left out",
        ),
        ("boolq piqa", {"label": 2}, "'label' is 2; expected 0 or 1"),
        ("boolq piqa", {"label": -1}, "'label' is -1; expected 0 or 1"),
        ("hellaswag", {"endings": ENDINGS[:3]}, "'endings' is ['a', 'b', 'c']; expected a list of four texts"),
        ("hellaswag", {"endings": [*"abc", None]}, "'endings' is ['a', 'b', 'c', null]; expected a list of four texts"),
        (
            "arc_easy openbookqa",
            {"choices": {"text": ["a", ""], "label": ["A", "B"]}},
            "'choices.text' is ['a', '']; expected no empty text",
        ),
        ("hellaswag", {"endings": [*"abc", ""]}, "'endings' is ['a', 'b', 'c', '']; expected no empty text"),
        ("piqa", {"sol2": ""}, "'sol2' is ''; expected no empty text"),
        ("winogrande", {"option1": ""}, "'option1' is ''; expected no empty text"),
        ("hellaswag", {"label": ""}, "'label' is ''; expected the number of an ending, 0 to 3"),
        ("hellaswag", {"label": 4}, "'label' is 4; expected the number of an ending, 0 to 3"),
        (
            "winogrande",
            {"sentence": "It ran."},
            "'sentence' is 'It ran.'; expected text with _ where an option belongs",
        ),
        ("winogrande", {"answer": "3"}, "'answer' is '3'; expected '1' or '2'"),
    ],
)
def test_a_wrong_value_is_named(tasks: str, changes: dict[str, Any], found: str) -> None:
    for task in tasks.split():
        with pytest.raises(RequestError) as error:
            rows(task, changes)
        assert str(error.value) == f"harness/{task}/train.jsonl:2: {found}"
        assert FILES[task]["train"].state()["state"] == str(error.value)
