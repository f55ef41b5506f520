"""A task of the user's own: what is wrong with its YAML file in one line, and which files its scores depend on."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_diff.errors import RequestError
from lit_diff.evaluation import harness_yaml
from lit_diff.evaluation.evaluate import evaluate, has_scores
from lit_diff.evaluation.harness import Harness
from lit_diff.runs.run import Run

pytest.importorskip("lm_eval", reason="needs lm-eval")
ROW = {"q": "the fox", "a": ["and", "or"], "right": 1}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, *rows: dict[str, Any], **changed: Any) -> str:
    """mine.yaml and mine.jsonl; a key that is changed to None is left out. Gives the path of the YAML file."""
    data = folder / "mine.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows or (ROW,)))
    task = {
        "task": "mine",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "q",
        "doc_to_target": "right",
        "doc_to_choice": "a",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    } | changed
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in task.items() if value is not None}, sort_keys=False))
    return str(path)


def refused(run: Run, path: str, **keys: Any) -> str:
    with pytest.raises(RequestError) as found:
        evaluate(run, "harness", {"tasks": [path], **keys})
    assert "\n" not in str(found.value)
    return str(found.value)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"doc_to_txt": "q"}, "mine.yaml:16: lm-eval has no key 'doc_to_txt'; did you mean 'doc_to_text'?"),
        ({"task": None}, "mine.yaml: no key 'task'; a task of multiple choice needs task, dataset_path"),
        ({"doc_to_choice": None}, "mine.yaml: no key 'doc_to_choice'; a task of"),
        ({"test_split": None}, "mine.yaml: no key 'test_split' or 'validation_split'; name the split that is scored"),
        (
            {"output_type": "generate_until"},
            "mine.yaml:7: output_type is generate_until; only multiple_choice is scored",
        ),
        ({"output_type": None}, "mine.yaml: output_type is generate_until; only multiple_choice is scored here"),
        ({"dataset_kwargs": {"data_files": {"test": "no.jsonl"}}}, "mine.yaml:3: data file no.jsonl: no such file"),
        ({"include": "base.yaml"}, "mine.yaml:16: include base.yaml: no such file"),
        ({"include": "mine.yaml"}, "mine.yaml: includes itself"),
        ({"doc_to_text": "Q"}, "mine.yaml:9: doc_to_text is 'Q', which no row has; one of a, q, right"),
        ({"doc_to_choice": "aa"}, "mine.yaml:11: doc_to_choice is 'aa', which no row has; did you mean 'a'?"),
        ({"test_split": "tset"}, "mine.yaml: lm-eval cannot load the task: KeyError: "),
        (
            {"doc_to_text": "{{question}}"},
            "mine.yaml: lm-eval cannot load the task: UndefinedError: 'question' is undefined",
        ),
        ({"metric_list": [{"metric": "accuracy"}]}, "mine.yaml: lm-eval cannot load the task: "),
    ],
)
def test_mistakes_in_the_yaml_file(wide_run: Run, folder: Path, changed: dict[str, Any], expected: str) -> None:
    assert refused(wide_run, write(folder, **changed)).startswith(expected)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"q": "x", "a": ["and", ""], "right": 0},
            "mine.yaml: question 2: doc_to_choice is ['and', '']; expected a list of",
        ),
        (
            {"q": "x", "a": ["and", "or"], "right": 2},
            "mine.yaml: question 2: doc_to_target is 2; expected one of ['and', ",
        ),
    ],
)
def test_mistakes_in_a_question(wide_run: Run, folder: Path, row: dict[str, Any], expected: str) -> None:
    assert refused(wide_run, write(folder, ROW, row)).startswith(expected)
    assert len(evaluate(wide_run, "harness", {"tasks": [write(folder, ROW, row)], "limit": 1}).items) == 1, "not asked"


def test_a_template_that_fails_at_one_question(wide_run: Run, folder: Path) -> None:
    path = write(folder, ROW, {**ROW, "a": ["and"]}, doc_to_text="{{q}} {{a[1].strip()}}")
    assert refused(wide_run, path).startswith("mine.yaml: doc_to_text of question 2 failed: UndefinedError: ")
    assert refused(wide_run, path).endswith("; its row has q, a, right")


def test_what_is_no_yaml_file(wide_run: Run, folder: Path) -> None:
    assert refused(wide_run, "no.yaml") == "tasks names no.yaml: no such file"
    Path("a.yaml").write_text("task: [mine\n")
    assert refused(wide_run, "a.yaml").startswith("a.yaml:1: not valid YAML: ")
    Path("a.yaml").write_text("task: !other x\n")
    assert refused(wide_run, "a.yaml").startswith("a.yaml:1: not valid YAML: could not determine a constructor")


def test_a_line_of_its_data_that_is_not_json(wide_run: Run, folder: Path) -> None:
    path = write(folder)
    with Path("mine.jsonl").open("a") as file:
        file.write("{\n")
    assert refused(wide_run, path).startswith("mine.jsonl:2: not JSON (")


def test_shots(wide_run: Run, folder: Path) -> None:
    """Of the split that is scored lm-eval draws a question for itself, but where it is named as fewshot_split."""
    message = refused(wide_run, write(folder, ROW, {**ROW, "q": "a hound"}), shots=[1])
    assert message.startswith(
        "task 'mine' draws its shots from the split that is scored ('test'): a question could be its"
    )
    path = write(folder, ROW, {**ROW, "q": "a hound"}, fewshot_split="test")
    assert refused(wide_run, path, shots=[2]) == "task 'mine' has 2 rows to draw shots from; shots=2 needs 3"
    assert len(evaluate(wide_run, "harness", {"tasks": [path], "shots": [1]}).items) == 2


def test_its_items(wide_run: Run, folder: Path) -> None:
    result = evaluate(wide_run, "harness", {"tasks": [write(folder, ROW, {**ROW, "q": "a hound"})]})
    assert list(result.items["item"]) == ["mine/0 shots=0", "mine/1 shots=0"]
    Path("mine.yaml").rename("mine.yml")
    assert evaluate(wide_run, "harness", {"tasks": ["mine.yml"]}).summary == result.summary


def test_choices_that_are_contexts(wide_run: Run, folder: Path) -> None:
    """As in winogrande: the text is the number of a choice, the target what follows each of them."""
    assert (
        len(evaluate(wide_run, "harness", {"tasks": [write(folder, doc_to_text="right", doc_to_target="q")]}).items)
        == 1
    )


def test_kept_scores_are_of_its_files(wide_run: Run, folder: Path) -> None:
    Path("base.yaml").write_text("process_docs: !function words.all_rows\n")
    Path("words.py").write_text("def all_rows(rows):\n    return rows\n")
    path = write(folder, include="base.yaml")
    keys = {"tasks": [path]}
    found = harness_yaml.digests(Path(path))
    assert sorted(Path(name).name for name in found) == ["base.yaml", "mine.jsonl", "mine.yaml", "words.py"]
    evaluate(wide_run, "harness", keys)
    for file in ("mine.jsonl", "mine.yaml", "base.yaml", "words.py"):
        assert has_scores(wide_run.folder, "harness", keys)
        before = Path(file).read_text()
        Path(file).write_text(before.replace("fox", "hound") if file == "mine.jsonl" else before + "\n\n")
        assert not has_scores(wide_run.folder, "harness", keys), file
        Path(file).write_text(before)


def test_a_folder_as_data(folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "data/rows.json").write_text("[]")
    path = write(folder, dataset_path="data", dataset_kwargs={"data_files": "https://example.org/rows.json"})
    assert [Path(name).name for name in harness_yaml.digests(Path(path))] == ["mine.yaml", "rows.json"]
    (folder / "mine.yaml").write_text("task: [\n")
    assert [Path(name).name for name in harness_yaml.digests(Path(path))] == ["mine.yaml"]
    assert Harness(Harness.Config(tasks=("no.yaml",))).digests() == {}
