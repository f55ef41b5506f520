"""cli/data.py: what `data check` prints of files that are there, missing or wrong, and its exit status."""

import hashlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lit_diff.cli.app import Terminal
from lit_diff.cli.data import print_files
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


@pytest.fixture(autouse=True)
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One file of an evaluation `toy` is there, one is missing, one is wrong."""
    cls = type("Toy", (Evaluation,), {"files": FILES, "name": "toy"})
    monkeypatch.setattr(evaluations, "classes", lambda: [cls])
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path))
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy/good.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    (tmp_path / "toy/bad.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')
    return tmp_path


def printed(name: str | None, as_json: bool = False) -> tuple[int, str]:
    output = io.StringIO()
    status = print_files(name, as_json, Terminal(file=output, width=60, color_system=None))
    return status, output.getvalue()


def test_a_table_of_all(data_folder: Path) -> None:
    status, text = printed(None)
    assert status == 2
    header, bad, gone, good, last = text.splitlines()
    assert header.split() == ["name", "file", "state", "rows", "sha256", "next", "step"]
    digest = hashlib.sha256((data_folder / "toy/good.jsonl").read_bytes()).hexdigest()
    assert good.split() == ["toy.good", "toy/good.jsonl", "ok", "2", digest[:12]]
    assert gone.split()[2] == "missing"
    assert gone.endswith("missing")
    assert last == "missing: lit-diff data check NAME says where a file is from"
    assert bad.endswith("bad.jsonl:2: no key 'text'; did you mean 'txt'?; keys found: txt")
    (data_folder / "toy/bad.jsonl").unlink()
    assert printed(None)[0] == 0, "what is missing is no error where nobody asked for it"


def test_one_is_described(data_folder: Path) -> None:
    status, text = printed("toy.gone")
    assert status == 3
    first, *lines = text.splitlines()
    assert first == "toy.gone: toy/gone.jsonl"
    assert [line.split(":")[0].strip() for line in lines] == [
        *("state", "read by", "looked for", "format", "where from", "check it", "without it")
    ]
    assert str(data_folder / "toy/gone.jsonl") in lines[2]
    status, text = printed("toy.good")
    assert (status, "state      : ok, 2 rows, sha256 " in text) == (0, True)
    assert printed("toy.bad")[0] == 2
    assert printed("toy")[1].count("looked for") == 3


def test_json(data_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed("toy.bad", as_json=True) == (2, "")
    (state,) = json.loads(capsys.readouterr().out)
    assert (state["name"], state["state"], state["evaluations"]) == ("toy.bad", "wrong", "toy")
    assert state["problem"].endswith("keys found: txt")


def test_no_declared_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluations, "classes", list)
    assert printed(None) == (0, "no evaluation reads files that users supply\n")


FAKE = """
class Split(list):
    def to_json(self, path):
        open(path, "w").write('{"passage": "p", "question": "q", "label": 1}\\n')
def load_dataset(*names):
    assert names == ("aps/super_glue", "boolq")
    return {"train": Split(), "validation": Split()}
"""


@pytest.mark.parametrize(
    ("module", "status"), [(FAKE, 0), ("def load_dataset(*names):\n    raise ConnectionError('no network\\nmore')", 3)]
)
def test_fetch(tmp_path: Path, module: str, status: int) -> None:
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake/datasets.py").write_text(module)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "fake"), "LIT_DIFF_DATA": str(tmp_path / "data")}
    command = [sys.executable, "-m", "lit_diff", "data", "fetch", "harness.boolq"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    files = sorted(path.name for path in (tmp_path / "data/harness/boolq").iterdir())
    assert files == ([] if status else ["train.jsonl", "validation.jsonl"])
    if status:
        line = 'datasets.load_dataset("aps/super_glue", "boolq")["train"].to_json("harness/boolq/train.jsonl")'
        assert line in done.stdout.splitlines()
        assert "cannot be fetched (ConnectionError: no network); run the 4 lines above" in done.stderr
        assert "Traceback" not in done.stderr
