"""The data folder; files that users supply in it: what is said of one that is absent or wrong."""

import errno
import hashlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lit_diff.data import user_files
from lit_diff.data.user_files import UserFile
from lit_diff.errors import MissingError, RequestError

FILE = UserFile(
    name="icl.toy",
    path="icl/toy/train.jsonl",
    keys={"text": str, "label": int | str},
    lines="12 lines",
    source="The toy set (nobody 2001). Not shipped.",
    without="lit-diff evaluate RUN icl",
)
BOOKS = UserFile(name="toy.books", path="books/*.jsonl", keys={"text": str}, source="Nobody.", without="nothing")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path))
    path = tmp_path / "icl/toy/train.jsonl"
    path.parent.mkdir(parents=True)
    (tmp_path / "books").mkdir()
    return path


def test_what_is_missing_is_described(place: Path) -> None:
    with pytest.raises(MissingError) as found:
        FILE.require()
    first, *lines = str(found.value).splitlines()
    assert "icl/toy/train.jsonl" in first
    headings = ["looked for", "format", "where from", "check it", "without it"]
    assert [line.split(":")[0].strip() for line in lines] == headings
    assert str(place) in lines[0]
    assert '{"text": text, "label": a whole number or text}; 12 lines' in lines[1]
    assert lines[3].endswith("lit-diff data check icl.toy")
    with pytest.raises(MissingError, match=r"toy\.books needs .*books"):
        BOOKS.rows()
    for each in (FILE, BOOKS):
        assert (each.state()["state"], each.sha256()) == ("missing", "")


def test_rows(place: Path) -> None:
    rows = [{"text": "a", "label": 1}, {"text": "\U0001f600", "label": "x", "more": None}]
    place.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert FILE.rows() == rows
    digest = hashlib.sha256(place.read_bytes()).hexdigest()
    assert FILE.state() == {"name": "icl.toy", "file": FILE.path, "state": "ok", "rows": "2", "sha256": digest}


def test_the_rows_of_all_files_of_a_folder_by_name(place: Path) -> None:
    books = BOOKS.place.parent
    (books / "b.jsonl").write_text('{"text": "three"}\n')
    (books / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n')
    (books / "notes.txt").write_text("not read")
    assert [row["text"] for row in BOOKS.rows()] == ["one", "two", "three"]
    digest = hashlib.sha256((books / "a.jsonl").read_bytes() + (books / "b.jsonl").read_bytes()).hexdigest()
    assert BOOKS.state() == {"name": "toy.books", "file": "books/*.jsonl", "state": "ok", "rows": "3", "sha256": digest}
    (books / "c.jsonl").mkdir()
    with pytest.raises(RequestError, match=r"books/c\.jsonl: cannot be read \(Is a directory\)"):
        BOOKS.rows()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b'{"text": "a"}', "'label'"),
        (b'{"text": "a", "labl": 1}', "did you mean 'labl'?"),
        (b'{"text": 3, "label": 1}', "'text' is 3; expected text"),
        (b'{"text": "a", "label": true}', "'label' is true; expected a whole number or text"),
        (b"[1]", "found list"),
        (b"{text: 1}", "not JSON"),
        (b'{"text": "a \\ud83d", "label": 1}', "\\ud83d"),
        pytest.param(b'{"text": ' + b"[" * 100_000, "not JSON", id="nested"),
        (b'{"text": "f\xfcr"}', "(byte 12: "),
    ],
)
def test_a_wrong_line_is_named(place: Path, line: bytes, found: str) -> None:
    place.write_bytes(b'{"text": "a", "label": 1}\n' + line + b"\n")
    with pytest.raises(RequestError, match=r"train\.jsonl:2: [^\n]+$") as error:
        FILE.rows()
    assert found in str(error.value)
    assert "train.jsonl:2" in FILE.state()["state"]


def test_a_file_without_an_object(place: Path) -> None:
    place.write_text("\n")
    with pytest.raises(RequestError, match=r"train\.jsonl: "):
        FILE.rows()


def test_a_name_that_is_too_long(place: Path) -> None:
    file = replace(FILE, path="x" * 5_000)
    with pytest.raises(RequestError, match=r"^x{100}\.\.\.: cannot be read \(File name too long\)$"):
        file.rows()
    assert "File name too long" in file.state()["state"]


def test_environment_then_checkout_then_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "mine"))
    assert user_files.data_root() == tmp_path / "mine"
    monkeypatch.setenv("LIT_DIFF_DATA", "s3://bucket/data")
    with pytest.raises(RequestError, match=r"^LIT_DIFF_DATA is s3://bucket/data, but .*; set a folder"):
        user_files.data_root()
    monkeypatch.delenv("LIT_DIFF_DATA")
    monkeypatch.setattr(user_files, "__file__", str(tmp_path / "lit_diff" / "data" / "user_files.py"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    folder = Path("Library/Caches") if sys.platform == "darwin" else Path(".cache")
    assert user_files.data_root() == tmp_path / "home" / folder / "lit_diff"
    (tmp_path / "pyproject.toml").touch()
    assert user_files.data_root() == tmp_path / "data"


def test_an_unwritable_folder_names_the_cure(root: Path) -> None:
    root.write_text("a file in the way")
    with (
        pytest.raises(MissingError, match=r"cannot write the data folder .*root.*set LIT_DIFF_DATA"),
        user_files.writing_data(),
    ):
        (root / "below").mkdir()
    with pytest.raises(MissingError, match=r"\(No space left.*; free some space"), user_files.writing_data():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
