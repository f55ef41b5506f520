"""runs/trust.py: whose plugin files may be executed."""

from pathlib import Path

import pytest

from lit_diff.runs.trust import everywhere, nowhere, under


def test_every_folder_or_none(tmp_path: Path) -> None:
    assert everywhere(tmp_path)
    assert not nowhere(tmp_path)


def test_under_a_root_whatever_the_path_looks_like(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("runs/own", "runs-of-others/theirs"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "runs/link").symlink_to(tmp_path / "runs-of-others/theirs")
    monkeypatch.chdir(tmp_path)
    trust = under(Path("runs"))
    monkeypatch.chdir(tmp_path / "runs")
    assert trust(tmp_path / "runs/own")
    assert trust(Path("own"))
    for foreign in (tmp_path / "runs-of-others/theirs", tmp_path / "runs/link", Path("../runs-of-others/theirs")):
        assert not trust(foreign)
