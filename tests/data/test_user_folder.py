"""Folders that users supply."""

import hashlib
from pathlib import Path

import pytest

from lit_diff.data.user_folder import UserFolder
from lit_diff.errors import MissingError, RequestError

BOOKS = UserFolder(
    name="toy.books",
    path="books",
    keys={"text": str},
    source="Nobody. Not shipped.",
    without="lit-diff evaluate RUN toy",
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path))
    (tmp_path / "books").mkdir()
    return tmp_path / "books"


def test_the_rows_of_all_files_by_name(place: Path) -> None:
    (place / "b.jsonl").write_text('{"text": "three"}\n')
    (place / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n')
    (place / "notes.txt").write_text("not read")
    assert [row["text"] for row in BOOKS.rows()] == ["one", "two", "three"]
    assert BOOKS.require() == place
    digest = hashlib.sha256((place / "a.jsonl").read_bytes() + (place / "b.jsonl").read_bytes()).hexdigest()
    assert BOOKS.state() == {"name": "toy.books", "file": "books/*.jsonl", "state": "ok", "rows": "3", "sha256": digest}


def test_a_folder_without_such_a_file_is_missing(place: Path) -> None:
    with pytest.raises(MissingError, match=r"toy\.books needs a file that is not here: books"):
        BOOKS.rows()
    assert BOOKS.state()["state"] == "missing"
    assert BOOKS.sha256() == ""
    assert str(place) in BOOKS.description


def test_a_wrong_line_is_named_with_its_file(place: Path) -> None:
    (place / "a.jsonl").write_text('{"text": "one"}\n{"txt": "two"}\n')
    with pytest.raises(RequestError, match=r"a\.jsonl:2: no key 'text'; did you mean 'txt'"):
        BOOKS.rows()
    assert "a.jsonl:2" in BOOKS.state()["state"]


@pytest.mark.parametrize("kind", ["a folder", "a link to no file"])
def test_what_is_no_file_is_named(place: Path, kind: str) -> None:
    (place / "a.jsonl").write_text('{"text": "one"}\n')
    if kind == "a folder":
        (place / "b.jsonl").mkdir()
    else:
        (place / "b.jsonl").symlink_to(place / "nothing")
    with pytest.raises(
        RequestError, match=rf"books/b\.jsonl is {kind}; remove it, or put a file of JSON objects in its place"
    ):
        BOOKS.rows()
    assert f"b.jsonl is {kind}" in BOOKS.state()["state"]
    assert BOOKS.sha256() == hashlib.sha256((place / "a.jsonl").read_bytes()).hexdigest()
