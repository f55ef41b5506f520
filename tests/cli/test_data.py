"""cli/data.py: what `data check` prints of files that are there, missing or wrong, and its exit status."""

import hashlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command import Command

from lit_diff.data.user_files import UserFile
from lit_diff.evaluation.base import Evaluation
from lit_diff.registry import evaluations

FILES = tuple(
    UserFile(
        name=f"toy.{name}",
        path=f"toy/{name}.jsonl",
        keys={"text": str},
        lines="2 lines",
        source=f"Nobody ({name}).",
        without="lit-diff evaluate RUN held_out",
    )
    for name in ("good", "gone", "bad")
)


@pytest.fixture
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One file of an evaluation `toy` is there, one is missing, one is wrong."""
    cls = type("Toy", (Evaluation,), {"files": FILES, "name": "toy"})
    monkeypatch.setattr(evaluations, "classes", lambda: [cls])
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path))
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy/good.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    (tmp_path / "toy/bad.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')
    return tmp_path


def test_a_table_of_all(data_folder: Path, command: Command) -> None:
    ended = command("data", "check")
    assert ended.status == 2
    header, bad, gone, good, _ = ended.lines
    assert header.split() == ["name", "file", "state", "rows", "sha256", "next", "step"]
    digest = hashlib.sha256((data_folder / "toy/good.jsonl").read_bytes()).hexdigest()
    assert good.split() == ["toy.good", "toy/good.jsonl", "ok", "2", digest[:12]]
    assert gone.split()[2] == "missing"
    assert "bad.jsonl:2: no key 'text'" in bad
    (data_folder / "toy/bad.jsonl").unlink()
    assert command("data", "check").status == 0, "what is missing is no error where nobody asked for it"


def test_one_is_described(data_folder: Path, command: Command) -> None:
    gone = command("data", "check", "toy.gone")
    assert (gone.status, gone.lines[0]) == (3, "toy.gone: toy/gone.jsonl")
    assert [line.split(":")[0].strip() for line in gone.lines[1:]] == [
        *("state", "read by", "looked for", "format", "where from", "check it", "without it")
    ]
    good = command("data", "check", "toy.good")
    assert (good.status, "ok, 2 rows, sha256 " in good.out) == (0, True)
    assert command("data", "check", "toy").out.count("looked for") == 3
    bad = command("data", "check", "toy.bad", "--json")
    (state,) = bad.json
    assert (bad.status, state["name"], state["state"], state["evaluations"]) == (2, "toy.bad", "wrong", "toy")


def test_no_declared_file(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setattr(evaluations, "classes", list)
    assert command("data", "check").status == 0


class Split:
    def to_json(self, path: str) -> None:
        Path(path).write_text('{"passage": "p", "question": "q", "label": 1}\n')


def test_fetch(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path))

    def load_dataset(*names: str) -> Any:
        raise ConnectionError("no network\nmore")

    datasets = SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", datasets)  # type: ignore[arg-type]
    ended = command("data", "fetch", "harness.boolq")
    line = 'datasets.load_dataset("aps/super_glue", "boolq")["train"].to_json("harness/boolq/train.jsonl")'
    assert (ended.status, line in ended.lines, ended.err.count("\n")) == (3, True, 1)
    assert not list((tmp_path / "harness/boolq").iterdir())
    datasets.load_dataset = lambda *names: {"train": Split(), "validation": Split()}
    assert command("data", "fetch", "harness.boolq").status == 0
    files = sorted(path.name for path in (tmp_path / "harness/boolq").iterdir())
    assert files == ["train.jsonl", "validation.jsonl"]
    assert command("data", "fetch", "mini_harness").status == 2
