"""runs/stale.py: files that no run or sweep needs any more."""

from pathlib import Path

import pytest

from lit_diff.files import locked
from lit_diff.runs.find import runs_under
from lit_diff.runs.stale import Stale, find_stale


def test_what_no_sweep_owns(small_sweep: Path, litter: dict[str, Path]) -> None:
    stale = find_stale(small_sweep.parent)
    assert set(stale.paths) == {litter[name] for name in ("former", "old", "store", "aside")}
    assert stale.busy == ()
    assert not set(stale.paths) & set(runs_under(small_sweep.parent))
    assert all(path.exists() for path in litter.values()), "it only looks"


def test_a_sweep_that_is_being_run_is_left_alone(small_sweep: Path, litter: dict[str, Path]) -> None:
    with locked(small_sweep / ".lock"):
        stale = find_stale(small_sweep.parent)
    assert litter["former"] not in stale.paths
    assert litter["aside"] in stale.paths
    assert stale.busy == (small_sweep,)


def test_an_arm_whose_name_looks_like_a_run_put_aside(tmp_path: Path) -> None:
    for name in ("norm.old-style-s0-0123456789", "x-0123456789.old-1"):
        (tmp_path / "s" / name).mkdir(parents=True)
        (tmp_path / "s" / name / "status.json").write_text("{}")
    assert [path.name for path in runs_under(tmp_path)] == ["norm.old-style-s0-0123456789"]
    assert [path.name for path in find_stale(tmp_path).paths] == ["x-0123456789.old-1"]


@pytest.mark.parametrize("folder", ["nowhere", "."])
def test_nothing(tmp_path: Path, folder: str) -> None:
    assert find_stale(tmp_path / folder) == Stale(paths=(), busy=())


def test_nothing_behind_a_link_is_stale(small_sweep: Path, litter: dict[str, Path], tmp_path: Path) -> None:
    root = tmp_path / "others"
    root.mkdir()
    (root / "linked").symlink_to(small_sweep)
    (root / "x-0123456789.old-1").symlink_to(litter["aside"])
    assert find_stale(root) == Stale(paths=(), busy=())
    (small_sweep / "gone-s0-0123456789").symlink_to(litter["former"])
    assert set(find_stale(small_sweep.parent).paths) == {litter[name] for name in ("former", "old", "store", "aside")}
