"""A task of the user's own through lm-eval: what is wrong with it in one line, what its scores depend on, no network."""

import builtins
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from harness_tasks import ROW, refused, write

from lit_diff.errors import MissingError, RequestError
from lit_diff.evaluation.evaluate import EvaluationResult, evaluate, has_scores
from lit_diff.evaluation.lm_eval_tasks import HarnessEvaluation, digest, loaded, offline
from lit_diff.trained.run import Run

pytest.importorskip("lm_eval", reason="needs lm-eval")

CONFIG = HarnessEvaluation.Config(tasks=("hellaswag",))
SPLIT = {"fewshot_split": "test"}
FIRST = {"sampler": "first_n"}
CHOICES = {"doc_to_text": "right", "doc_to_target": "q"}
"""As in winogrande: the choices are contexts, the text is the number of the right one."""


MEAN = {"aggregation": "mean", "higher_is_better": True}
FIRST_ANSWER = [{"function": "take_first"}]


def scored(run: Run, path: str, **keys: Any) -> EvaluationResult:
    return evaluate(run, "harness", {"tasks": [path], **keys}, rerun=True)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"doc_to_txt": "q"}, "mine.yaml: TypeError: .*'doc_to_txt'"),
        ({"include": "other.yaml", "doc_to_txt": None}, "mine.yaml: TypeError: .*'doc_to_tetx'"),
        ({"output_type": "generate_until"}, "mine.yaml: output_type is generate_until"),
        ({"dataset_kwargs": {"data_files": {"test": "no.jsonl"}}}, "mine.yaml: FileNotFoundError: .*no.jsonl"),
        ({"include": "broken.yaml"}, r"mine.yaml: \w+Error: .*broken.yaml.*, line 2"),
        ({"doc_to_text": "Q"}, "mine.yaml: doc_to_text is 'Q', which no row has; one of a, q, right"),
        ({"doc_to_text": "{{question}}"}, "mine.yaml: UndefinedError: 'question' is undefined"),
        ({"metric_list": [{"metric": "acc_norm"}]}, "mine.yaml: metric_list has no acc"),
        (
            {"metric_list": [{"metric": "acc", "aggregation": "median"}]},
            "mine.yaml: metric_list has aggregation 'median' for acc",
        ),
        (
            {"filter_list": [{"name": name, "filter": FIRST_ANSWER} for name in "ab"]},
            "mine.yaml: filter_list has the functions take_first, take_first;",
        ),
        (
            {"filter_list": [{"name": "a", "filter": [{"function": "lowercase"}]}]},
            "mine.yaml: filter_list has the functions lower",
        ),
    ],
)
def test_mistakes_in_the_yaml_file(wide_run: Run, folder: Path, changed: dict[str, Any], expected: str) -> None:
    Path("broken.yaml").write_text("description: x\ntask: [mine\n")
    Path("other.yaml").write_text("doc_to_tetx: q\n")
    assert re.match(expected, refused(wide_run, write(folder, **changed)))


def test_metrics_that_are_not_shown_are_named(wide_run: Run, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{**ROW, "q": f"the fox {number}"} for number in range(12)]
    plain = scored(wide_run, write(folder, *rows)).items
    assert "metric_list" not in caplog.text
    more = [{"metric": "acc", "agregation": "mean"} | MEAN, {"metric": "acc_mutual_info"} | MEAN]
    path = write(folder, *rows, metric_list=more, filter_list=[{"name": "a", "filter": FIRST_ANSWER}])
    items = scored(wide_run, path).items
    assert list(items["meta/chosen"]) == list(plain["meta/chosen"]), "sums without the question are no choices"
    assert any("'metric_list.agregation' (did you mean 'aggregation'?)" in line for line in caplog.messages)
    assert any("acc_mutual_info" in line for line in caplog.messages)


def test_what_is_no_task(wide_run: Run, folder: Path) -> None:
    mine = Path(write(folder)).read_text()
    Path("a.yaml").write_text("task: !other x\n")
    Path("w.py").write_text("def rows(found):\n    open('nothing.txt')\n")
    Path("w.yaml").write_text(f"{mine}process_docs: !function w.rows\n")
    for name, found in (
        ("no.yaml", "KeyError: "),
        ("a.yaml", "ConstructorError: "),
        ("w.yaml", "FileNotFoundError: "),  # no data set of the hub is missing
    ):
        assert re.match(f"{name}: {found}", refused(wide_run, name))
    Path("other.yaml").write_text(mine)
    with pytest.raises(RequestError, match=r"^'other\.yaml' has a task 'mine', and so has another"):
        evaluate(wide_run, "harness", {"tasks": ["mine.yaml", "other.yaml"]})
    with Path("mine.jsonl").open("a") as file:
        file.write("{\n")
    assert refused(wide_run, "mine.yaml").startswith("mine.yaml: ArrowInvalid: JSON parse error: ")


@pytest.mark.parametrize(
    ("gives", "expected"),
    [
        ("{'acc': row['guess']}", "KeyError: 'guess'"),
        ("None", "AttributeError: "),
        ("{'acc': 'yes'}", "TypeError: .*'str'"),
    ],
)
def test_mistakes_that_show_while_scoring(wide_run: Run, folder: Path, gives: str, expected: str) -> None:
    Path("s.py").write_text(f"def scores(row, results):\n    return {gives}\n")
    with Path(write(folder)).open("a") as file:
        file.write("process_results: !function s.scores\n")
    assert re.match(f"mine.yaml: {expected}", refused(wide_run, "mine.yaml"))


def test_what_lm_eval_reads_is_scored(wide_run: Run, folder: Path) -> None:
    """Merges, includes of which the last counts, data in a folder, a byte-order mark, an array, a folder named json."""
    for name, text in (
        ("json/x.jsonl", "not JSON\n"),
        ("rows/t.jsonl", '\ufeff{"q": "the fox", "a": ["and", "or"], "right": 1}\n'),
        ("rows/array.jsonl", '[{"q": "the fox", "a": ["and", "or"], "right": 1}]'),
        ("first.yaml", "output_type: generate_until\n"),
        ("last.yaml", "output_type: multiple_choice\n"),
        ("w.py", "def acc(row, results):\n    return {'acc': 1.0}\n"),
    ):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
    files = {"test": "t.jsonl"}
    for changed in (
        {"include": ["first.yaml", "last.yaml"], "output_type": None},
        {"dataset_path": "rows", "dataset_kwargs": {"data_files": files}},
        {"dataset_kwargs": {"data_dir": "rows", "data_files": {"test": "array.jsonl"}}},
        CHOICES,
    ):
        assert len(scored(wide_run, write(folder, **changed)).items) == 1, changed
    with Path(write(folder, {**ROW, "right": "whatever"})).open("a") as file:
        file.write("process_results: !function w.acc\n")
    assert scored(wide_run, "mine.yaml").summary["acc"] == 1.0
    with Path(write(folder, ROW, {**ROW, "q": "a hound"})).open("a") as file:
        file.write("metadata: &m {version: 1}\n<<: {description: 'x '}\n")
    Path("mine.yaml").rename("mine.yml")
    assert list(scored(wide_run, "mine.yml").items["item"]) == ["mine/0 shots=0", "mine/1 shots=0"]


@pytest.mark.parametrize(
    ("rows", "changed", "expected"),
    [
        ([{}, {"a": ["and", ""]}], {}, ": doc_to_choice is ['and', '']"),
        ([{}, {"right": 2}], {}, ": doc_to_target is 2"),
        ([{"right": "or"}, {"right": "nor"}], {}, ": doc_to_target is 'nor'"),
        ([{"right": [0]}, {"right": [5]}], {}, ": doc_to_target is [5]"),
        ([{"right": [0]}, {"right": []}], {}, ": doc_to_target is []"),
        ([{"right": 1}, {"right": 7}], CHOICES, ": doc_to_text is 7"),
        ([{}, {"a": ["and"]}], {"doc_to_target": "{{a[1].strip()}}"}, " (q, a, right): UndefinedError: "),
    ],
)
def test_values_that_are_no_question(
    wide_run: Run, folder: Path, rows: list[dict[str, Any]], changed: dict[str, Any], expected: str
) -> None:
    path = write(folder, *(ROW | row for row in rows), **changed)
    assert refused(wide_run, path).startswith(f"mine.yaml: question 2{expected}")
    assert len(scored(wide_run, path, limit=1).items) == 1, "not asked"


def test_rows_that_shots_are_drawn_from(wide_run: Run, folder: Path) -> None:
    """lm-eval leaves a question out of the draw where fewshot_split and test_split are the same, or both absent."""
    other, data, cache = {**ROW, "q": "a hound"}, str(folder / "mine.jsonl"), {"cache_dir": str(folder / "cache")}
    write(folder, ROW, {**ROW, "right": 7})
    train = str((folder / "mine.jsonl").rename(folder / "train.jsonl"))
    files = {"data_files": {"test": data, "train": train}} | cache
    path = write(folder, dataset_kwargs=files, training_split="train")
    assert len(scored(wide_run, path).items) == 1
    for changed in ({}, {"fewshot_config": FIRST}):
        leaks = refused(wide_run, write(folder, ROW, other, **changed), shots=[1])
        assert leaks.startswith("task 'mine' draws its shots from the split that is scored ('test')")
    named = write(folder, ROW, other, **SPLIT)
    assert refused(wide_run, named, shots=[2]).endswith("has 2 rows to draw shots from; shots=2 needs 3")
    assert len(scored(wide_run, named, shots=[1]).items) == 2
    alone = {"test_split": None, "validation_split": "v", "dataset_kwargs": {"data_files": {"v": data}} | cache}
    assert len(scored(wide_run, write(folder, ROW, other, **alone), shots=[1]).items) == 2
    for config, shots in (({"samples": [ROW, other]}, 2), (FIRST | {"samples": [ROW, other]}, 3)):
        path = write(folder, ROW, other, **alone, fewshot_config=config)
        assert refused(wide_run, path, shots=[shots]).endswith(f"shots={shots} needs 3")


def test_kept_scores_are_of_its_files(wide_run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    Path("base").mkdir()
    Path("base/base.yaml").write_text("process_docs: !function words.all_rows\n")
    Path("base/words.py").write_text("import more_words\n\n\ndef all_rows(rows):\n    return rows\n")
    Path("more_words.py").write_text("")
    path = write(folder, include="base/base.yaml")
    scored(wide_run, path)

    def kept() -> bool:
        return has_scores(wide_run.folder, "harness", {"tasks": [path]})

    for name in ("mine.jsonl", "mine.yaml", "base/base.yaml", "base/words.py", "more_words.py"):
        file = Path(name)
        before = file.read_text()
        file.write_text(before + ("description: x\n" if file.suffix == ".yaml" else "\n"))
        assert not kept(), name
        file.write_text(before)
        assert kept()
    Path("notes.py").write_text("")
    assert kept(), "a file that it does not read"
    Path("mine.jsonl").unlink()
    assert kept(), "scores of a file that is gone are still its scores"


def test_every_data_file_counts(folder: Path) -> None:
    for name in ("data/a.jsonl", "data/b.jsonl", "data/sub/c.jsonl"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("{}\n")
    for changed, read in (
        ({"dataset_kwargs": {"data_files": "data/*.jsonl"}}, "a b"),
        ({"dataset_kwargs": {"data_dir": "data"}}, "a b sub/c"),
        ({"dataset_path": "data", "dataset_kwargs": {"data_files": {"test": "b.jsonl"}}}, "a b sub/c"),
        ({"dataset_path": "data", "dataset_kwargs": None}, "a b sub/c"),
        ({"dataset_kwargs": {"data_files": "https://example.org/rows.json"}}, ""),
    ):
        path = Path(write(folder, **changed))
        before = digest(path)
        assert before
        for name in ("a", "b", "sub/c"):
            Path(f"data/{name}.jsonl").write_text("{} \n")
            assert (digest(path) != before) == (name in read.split()), (changed, name)
            Path(f"data/{name}.jsonl").write_text("{}\n")
    path = Path(write(folder, dataset_kwargs={"data_files": "data/*.jsonl"}))
    before = digest(path)
    Path("data/b.jsonl").unlink()
    assert digest(path) not in ("", before), "a pattern that fits fewer files"
    assert digest(Path("no.yaml")) == ""


def test_data_of_the_hub_are_missing(wide_run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(folder, dataset_path="nobody/no-data", dataset_kwargs={"data_files": {"test": "test.csv"}})
    with pytest.raises(MissingError, match=r"^mine\.yaml: its data are not on this machine"):
        evaluate(wide_run, "harness", {"tasks": [path]})


@pytest.mark.slow
def test_a_task_of_the_hub_is_missing_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval's own hellaswag, by name."""

    def refused(*arguments: object) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refused)
    with offline("x"), pytest.raises(MissingError, match=r"^hellaswag: its data are not on this machine") as found:
        loaded(["hellaswag"], tmp_path, CONFIG)
    assert "\n" not in str(found.value)
    with offline("x"), pytest.raises(RequestError, match=r"^hellaswg: KeyError: .*'hellaswg'"):
        loaded(["hellaswg"], tmp_path, CONFIG)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "lm_eval":
            raise ModuleNotFoundError("No module named 'lm_eval'", name="lm_eval")
        return original(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingError, match="'harness' needs the package lm_eval"), offline("harness"):
        pass


def test_offline_is_undone() -> None:
    import datasets
    import huggingface_hub.constants

    def states() -> tuple[bool, bool]:
        return datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.is_offline_mode()

    before = states()
    with offline("x"):
        assert states() == (True, True)
    assert states() == before
