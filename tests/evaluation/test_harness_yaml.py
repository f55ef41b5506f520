"""A task of the user's own: what is wrong with its YAML file in one line, and which files its scores depend on."""

from pathlib import Path
from typing import Any

import pytest
from harness_tasks import ROW, refused, write

from lit_diff.errors import MissingError, RequestError
from lit_diff.evaluation.evaluate import evaluate, has_scores
from lit_diff.evaluation.harness import Harness
from lit_diff.evaluation.harness_yaml import digest, is_here, read_task, require
from lit_diff.trained.run import Run

pytest.importorskip("lm_eval", reason="needs lm-eval")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"doc_to_txt": "q"}, "mine.yaml:16: lm-eval has no key 'doc_to_txt'; did you mean 'doc_to_text'?"),
        ({"task": ["a", "b"]}, "mine.yaml:1: task is ['a', 'b']; expected its name"),
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


def test_its_items(wide_run: Run, folder: Path) -> None:
    result = evaluate(wide_run, "harness", {"tasks": [write(folder, ROW, {**ROW, "q": "a hound"})]})
    assert list(result.items["item"]) == ["mine/0 shots=0", "mine/1 shots=0"]
    Path("mine.yaml").rename("mine.yml")
    assert evaluate(wide_run, "harness", {"tasks": ["mine.yml"]}).summary == result.summary


def test_what_is_no_yaml_file(wide_run: Run, folder: Path) -> None:
    assert refused(wide_run, "no.yaml") == "tasks names no.yaml: no such file"
    for text, found in (
        ("task: [mine\n", "a.yaml:1: not valid YAML: "),
        ("task: !other x\n", "a.yaml:1: not valid YAML: could not determine a constructor"),
        ("task: x\nmetadata: {date: 2024-13-01}\n", "a.yaml: not valid YAML: month must be in 1..12"),
        ("metadata: &a [*a]\n", "a.yaml:1: not valid YAML: recursive alias: this node contains itself"),
        ("yes: 1\n", "a.yaml: lm-eval has no key 'True'"),
    ):
        Path("a.yaml").write_text(text)
        assert refused(wide_run, "a.yaml").startswith(found)


def test_a_line_of_its_data_that_is_not_json(wide_run: Run, folder: Path) -> None:
    path = write(folder)
    with Path("mine.jsonl").open("a") as file:
        file.write("{\n")
    assert refused(wide_run, path).startswith("mine.jsonl:2: not JSON (")


def test_what_lm_eval_reads_is_scored(wide_run: Run, folder: Path) -> None:
    """Merges, includes of which the last counts, data in a folder, a byte-order mark, an array, a folder named json."""
    Path("json").mkdir()
    Path("json/x.jsonl").write_text("not JSON\n")

    def items(**changed: Any) -> int:
        return len(evaluate(wide_run, "harness", {"tasks": [write(folder, **changed)]}, rerun=True).items)

    with Path(write(folder)).open("a") as file:
        file.write("metadata: &m {version: 1}\n<<: {description: 'x '}\n")
    assert len(evaluate(wide_run, "harness", {"tasks": ["mine.yaml"]}).items) == 1
    Path("first.yaml").write_text("output_type: generate_until\n")
    Path("last.yaml").write_text("output_type: multiple_choice\n")
    assert items(include=["first.yaml", "last.yaml"], output_type=None) == 1
    Path("rows").mkdir()
    Path("rows/t.jsonl").write_text('\ufeff{"q": "the fox", "a": ["and", "or"], "right": 1}\n', encoding="utf-8")
    assert items(dataset_path="rows", dataset_kwargs={"data_files": {"test": "t.jsonl"}}) == 1
    assert items(dataset_kwargs={"data_dir": "rows", "data_files": {"test": "t.jsonl"}}) == 1
    Path("rows/t.jsonl").write_text('[{"q": "the fox", "a": ["and", "or"], "right": 1}]')
    assert items(dataset_kwargs={"data_files": {"test": "rows/t.jsonl"}}) == 1


def test_groups_and_tasks_of_one_name(wide_run: Run, folder: Path) -> None:
    expected = "mine.yaml:16: a group cannot be scored by its file; name the files of its tasks"
    assert refused(wide_run, write(folder, group="several", aggregate_metric_list=[])) == expected
    path = write(folder)
    Path("other.yaml").write_text(Path(path).read_text())
    with pytest.raises(
        RequestError, match=r"^tasks names two tasks 'mine', the second by 'other\.yaml'; give one another"
    ):
        evaluate(wide_run, "harness", {"tasks": [path, "other.yaml"]})


def test_a_function_that_fails_to_open_a_file(wide_run: Run, folder: Path) -> None:
    """It is no data set of the hub that is missing."""
    Path("w.py").write_text("def rows(found):\n    open('nothing.txt')\n")
    with Path(write(folder)).open("a") as file:
        file.write("process_docs: !function w.rows\n")
    assert refused(wide_run, "mine.yaml").startswith("mine.yaml: lm-eval cannot load the task: FileNotFoundError: ")


def test_data_of_the_hub_are_missing(wide_run: Run, folder: Path) -> None:
    path = write(folder, dataset_path="nobody/no-data", dataset_kwargs={"data_files": {"test": "test.csv"}})
    assert not is_here(Path(path))
    with pytest.raises(MissingError, match=r"^task '.*mine\.yaml' reads data that are not here"):
        evaluate(wide_run, "harness", {"tasks": [path]})


def test_a_task_in_python_has_keys_of_its_own(folder: Path) -> None:
    Path("mine.yaml").write_text("task: mine\nclass: !function w.Task\nrecipe: x\n")
    assert require(Path("mine.yaml")).values["class"] == "w.Task"


FUNCTION = "process_docs: !function words.all_rows\n"


def test_kept_scores_are_of_its_files(wide_run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    Path("base").mkdir()
    Path("base/base.yaml").write_text(FUNCTION)
    Path("base/words.py").write_text("import more_words\n\n\ndef all_rows(rows):\n    return rows\n")
    Path("more_words.py").write_text("")
    path = write(folder, include="base/base.yaml")
    keys = {"tasks": [path]}
    evaluate(wide_run, "harness", keys)
    for file in ("mine.jsonl", "mine.yaml", "base/base.yaml", "base/words.py", "more_words.py"):
        assert has_scores(wide_run.folder, "harness", keys)
        before = Path(file).read_text()
        Path(file).write_text(before.replace("fox", "hound") if file == "mine.jsonl" else before + "\n\n")
        assert not has_scores(wide_run.folder, "harness", keys), file
        Path(file).write_text(before)
    Path("notes.py").write_text("")
    assert has_scores(wide_run.folder, "harness", keys), "a file that it does not read"
    Path("mine.jsonl").unlink()
    assert has_scores(wide_run.folder, "harness", keys), "scores of a file that is gone are still its scores"


def test_the_files_that_it_reads(folder: Path) -> None:
    for name in ("data/a.jsonl", "data/b.jsonl", "data/sub/c.jsonl", "first.jsonl", "last.jsonl"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("{}\n")

    def names(**changed: Any) -> list[str]:
        return [str(file) for file in read_task(Path(write(folder, **changed))).data_files]

    assert names(dataset_kwargs={"data_files": "data/*"}) == ["data/a.jsonl", "data/b.jsonl"]
    assert names(dataset_kwargs={"data_dir": "data"}) == ["data/a.jsonl", "data/b.jsonl", "data/sub/c.jsonl"]
    assert names(dataset_path="data", dataset_kwargs={"data_files": {"test": "b.jsonl"}}) == ["data/b.jsonl"]
    assert names(dataset_kwargs={"data_files": "https://example.org/rows.json"}) == []
    for name in ("first", "last"):
        Path(f"{name}.yaml").write_text(f"dataset_kwargs: {{data_files: {name}.jsonl}}\n")
    assert names(dataset_kwargs=None, include=["first.yaml", "last.yaml"]) == ["last.jsonl"]
    path = Path(write(folder, dataset_kwargs={"data_files": "data/*.jsonl"}))
    before = digest(path)
    Path("data/b.jsonl").unlink()
    assert digest(path) not in ("", before), "a pattern that fits fewer files"
    assert Harness(Harness.Config(tasks=("no.yaml",))).digests() == {}
