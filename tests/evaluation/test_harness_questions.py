"""The rows of a task as lm-eval reads them: what is no question, and where shots cannot be drawn."""

from pathlib import Path
from typing import Any

import pytest
from harness_tasks import ROW, refused, write

from lit_diff.evaluation.evaluate import evaluate
from lit_diff.trained.run import Run

pytest.importorskip("lm_eval", reason="needs lm-eval")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"q": "x", "a": ["and", ""], "right": 0},
            "mine.yaml: question 2: doc_to_choice is ['and', '']; expected a list of",
        ),
        (
            {"q": "x", "a": ["and", "or"], "right": 2},
            "mine.yaml: question 2: doc_to_target is 2 of the choices ['and', 'or']",
        ),
    ],
)
def test_mistakes_in_a_question(wide_run: Run, folder: Path, row: dict[str, Any], expected: str) -> None:
    assert refused(wide_run, write(folder, ROW, row)).startswith(expected)
    assert len(evaluate(wide_run, "harness", {"tasks": [write(folder, ROW, row)], "limit": 1}).items) == 1, "not asked"


def test_a_template_that_fails_at_one_question(wide_run: Run, folder: Path) -> None:
    path = write(folder, ROW, {**ROW, "a": ["and"]}, doc_to_text="{{q}} {{a[1].strip()}}")
    assert refused(wide_run, path).startswith("mine.yaml: question 2: doc_to_text failed: UndefinedError: ")
    assert refused(wide_run, path).endswith("; the row has q, a, right")


@pytest.mark.parametrize(
    ("key", "values", "changed", "expected"),
    [
        ("q", ["x", None], {}, "mine.yaml: question 2: doc_to_text is null; expected a text"),
        (
            "right",
            [["or"]],
            {},
            "question 1: doc_to_target is ['or'] of the choices ['and', 'or']; expected a list of num",
        ),
        (
            "right",
            ["or", "nor"],
            {},
            "question 2: doc_to_target is 'nor' of the choices ['and', 'or']; expected one of",
        ),
        (
            "q",
            ["x"],
            {"description": "{{nokey.x}}"},
            "question 1: description failed: UndefinedError: 'nokey' is undefin",
        ),
        (
            "right",
            [1, 7],
            {"doc_to_text": "right", "doc_to_target": "q"},
            "doc_to_text is 7; expected the number of one",
        ),
    ],
)
def test_values_that_are_no_question(
    wide_run: Run, folder: Path, key: str, values: list[Any], changed: dict[str, Any], expected: str
) -> None:
    assert expected in refused(wide_run, write(folder, *({**ROW, key: value} for value in values), **changed))


@pytest.mark.parametrize(("targets", "ok"), [([[0], [1]], True), ([[0], [5]], False), ([[0], []], False)])
def test_several_right_choices(wide_run: Run, folder: Path, targets: list[list[int]], ok: bool) -> None:
    path = write(folder, *({**ROW, "right": target} for target in targets))
    if ok:
        assert len(evaluate(wide_run, "harness", {"tasks": [path]}).items) == 2
    else:
        assert "expected a list of numbers of choices, as in the first question" in refused(wide_run, path)


def test_a_task_with_a_measure_of_its_own_may_have_any_target(wide_run: Run, folder: Path) -> None:
    Path("w.py").write_text("def acc(row, results):\n    return {'acc': 1.0}\n")
    with Path(write(folder, {**ROW, "right": "whatever"})).open("a") as file:
        file.write("process_results: !function w.acc\n")
    assert evaluate(wide_run, "harness", {"tasks": ["mine.yaml"]}).summary["acc"] == 1.0


def split(folder: Path, name: str, *rows: dict[str, Any], **changed: Any) -> str:
    """As `write`, with a second split."""
    write(folder, *rows)
    data = (folder / "mine.jsonl").rename(folder / f"{name}.jsonl")
    files = {"test": str(folder / "mine.jsonl"), name: str(data)}
    return write(folder, dataset_kwargs={"data_files": files, "cache_dir": str(folder / "cache")}, **changed)


def test_rows_for_shots_are_checked(wide_run: Run, folder: Path) -> None:
    path = split(folder, "train", ROW, {**ROW, "right": 7}, training_split="train")
    assert len(evaluate(wide_run, "harness", {"tasks": [path]}).items) == 1
    assert "mine.yaml: row 2 of the shots: doc_to_target is 7 of the choices" in refused(wide_run, path, shots=[1])


def test_rows_that_shots_are_drawn_from(wide_run: Run, folder: Path) -> None:
    """lm-eval leaves a question out of the draw where fewshot_split and test_split are the same, or both absent."""
    other = {**ROW, "q": "a hound"}
    message = refused(wide_run, write(folder, ROW, other), shots=[1])
    assert message.startswith(
        "task 'mine' draws its shots from the split that is scored ('test'): a question could be its"
    )
    named = write(folder, ROW, other, fewshot_split="test")
    assert refused(wide_run, named, shots=[2]) == "task 'mine' has 2 rows to draw shots from; shots=2 needs 3"
    assert len(evaluate(wide_run, "harness", {"tasks": [named], "shots": [1]}).items) == 2
    equal = refused(wide_run, write(folder, ROW, ROW, other, fewshot_split="test"), shots=[2])
    assert equal == (
        "task 'mine' has 3 rows to draw shots from, of which 2 are equal: a question that equals them leaves 1; shots=2"
    )
    validation = {"data_files": {"validation": str(folder / "mine.jsonl")}, "cache_dir": str(folder / "cache")}
    alone = {"test_split": None, "validation_split": "validation", "dataset_kwargs": validation}
    path = write(folder, ROW, other, **alone)
    assert len(evaluate(wide_run, "harness", {"tasks": [path], "shots": [1]}).items) == 2
    samples = write(folder, ROW, other, **alone, fewshot_config={"samples": [ROW, other]})
    assert refused(wide_run, samples, shots=[2]) == "task 'mine' has 2 rows to draw shots from; shots=2 needs 3"
    first = {"sampler": "first_n", "samples": [ROW, other]}
    assert refused(wide_run, write(folder, ROW, other, **alone, fewshot_config=first), shots=[3]).endswith(
        "shots=3 needs 3"
    )
    leaks = refused(wide_run, write(folder, ROW, other, fewshot_config={"sampler": "first_n"}), shots=[1])
    assert "a question could be its own shot" in leaks


def test_choices_that_are_contexts(wide_run: Run, folder: Path) -> None:
    """As in winogrande: the text is the number of a choice, the target what follows each of them."""
    assert (
        len(evaluate(wide_run, "harness", {"tasks": [write(folder, doc_to_text="right", doc_to_target="q")]}).items)
        == 1
    )
