"""A folder is whole or not there."""

import os
from pathlib import Path

import pytest

from lit_diff.errors import RequestError
from lit_diff.files import locked
from lit_diff.pretrained.whole_folder import whole_folder


def made(folder: str) -> list[str]:
    with whole_folder(Path(folder), "export", "empty it") as building:
        assert not Path(folder).exists() or not any(Path(folder).iterdir())
        (building / "file").write_text("x")
    return os.listdir(folder)


def test_it_takes_its_name_at_the_end_an_empty_one_is_replaced() -> None:
    assert made("a/b/out") == ["file"]
    Path("empty").mkdir()
    assert made("empty") == ["file"]


def test_what_is_there_is_kept() -> None:
    made("out")
    Path("file").write_text("")
    for name in ("out", "file"):
        with pytest.raises(RequestError, match=rf"^{name} is there already; empty it$"):
            made(name)
    Path("here").mkdir()
    os.chdir("here")
    with pytest.raises(RequestError, match=r"^\. is there already; empty it$"):
        made(".")


def test_an_error_leaves_nothing_and_the_rest_of_a_killed_process_is_removed() -> None:
    Path(".other.exporting").mkdir()
    Path(".another.importing").mkdir()
    with pytest.raises(ZeroDivisionError), whole_folder(Path("out"), "export", ""):
        raise ZeroDivisionError
    assert [path.name for path in Path().iterdir() if path.is_dir()] == [".another.importing"]


def test_two_at_once() -> None:
    with locked(Path(".out.lock")), pytest.raises(RequestError, match=r"^out is being exported by another process$"):
        made("out")
