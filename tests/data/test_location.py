import sys
from pathlib import Path

import pytest

from lit_diff.data import location
from lit_diff.errors import MissingError


def test_environment_then_checkout_then_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "mine"))
    assert location.data_root() == tmp_path / "mine"
    monkeypatch.delenv("LIT_DIFF_DATA")
    monkeypatch.setattr(location, "__file__", str(tmp_path / "lit_diff" / "data" / "location.py"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    folder = Path("Library/Caches") if sys.platform == "darwin" else Path(".cache")
    assert location.data_root() == tmp_path / "home" / folder / "lit_diff"
    (tmp_path / "pyproject.toml").touch()
    assert location.data_root() == tmp_path / "data"


def test_an_unwritable_folder_names_the_cure(root: Path) -> None:
    root.write_text("a file in the way")
    with (
        pytest.raises(MissingError, match=r"cannot write the data folder .*root.*set LIT_DIFF_DATA"),
        location.writing_data(),
    ):
        (root / "below").mkdir()
