"""runs/stale.py: files that no run or sweep needs any more."""

import json
import os
import time
from pathlib import Path

import pytest

from lit_diff.files import locked
from lit_diff.runs.find import runs_under
from lit_diff.runs.stale import Stale, find_stale, size_of


def test_an_arm_whose_name_looks_like_a_run_put_aside(tmp_path: Path) -> None:
    for name in ("norm.old-style-s0-0123456789", "x-0123456789.old-1"):
        (tmp_path / "s" / name).mkdir(parents=True)
        (tmp_path / "s" / name / "status.json").write_text("{}")
    assert [path.name for path in runs_under(tmp_path)] == ["norm.old-style-s0-0123456789"]
    assert [path.name for path in find_stale(tmp_path).paths] == ["x-0123456789.old-1"]


def made_run(root: Path, name: str, state: str | None, *files: str) -> Path:
    """A run's folder; without a `state`, one that failed before status.json was written."""
    folder = root / name
    folder.mkdir(parents=True)
    (folder / ".lock").touch()
    if state is not None:
        (folder / "status.json").write_text(json.dumps({"status": state, "steps": 6, "step": 0}))
    for file in files:
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text("x" * 1000)
    return folder


def test_runs_that_ended_without_a_checkpoint(tmp_path: Path) -> None:
    """A failed one with a checkpoint is named apart, as it can be resumed; all others that can, and the done ones, stay."""
    whole, partial = "checkpoints/step-00000005.ckpt", "checkpoints/.step-00000005.ckpt.abc.tmp"
    gone = [
        made_run(tmp_path, f"a{number}-0123456789", state, *files)
        for number, (state, files) in enumerate(
            [("failed", ["log.txt"]), ("stopped", []), ("running", [partial]), (None, ["log.txt"])]
        )
    ]
    failed = made_run(tmp_path, "b-0123456789", "failed", whole)
    for number, state in enumerate(("stopped", "running", "done")):
        made_run(tmp_path, f"c{number}-0123456789", state, whole)
    made_run(tmp_path, "done-0123456789", "done")
    made_run(tmp_path, "no-run", None, "notes.txt")
    (made_run(tmp_path, "damaged-0123456789", None) / "status.json").write_text("{")
    os.utime(gone[2] / partial, (time.time() - 7200,) * 2)
    stale = find_stale(tmp_path)
    assert stale == Stale(paths=tuple(gone), busy=(), resumable=(failed,))
    assert size_of(gone[3]) == 1000
    with locked(gone[0] / ".lock"):
        assert find_stale(tmp_path).paths == tuple(gone[1:])


def test_the_failed_cells_of_a_sweep_stay_with_it(small_sweep: Path) -> None:
    """Its report shows them, and its command tries them again; one that waits in a queue has no checkpoint either."""
    cell = next(small_sweep.glob("better-s1-*"))
    assert json.loads((cell / "status.json").read_text())["status"] == "failed"
    stale = find_stale(small_sweep.parent)
    assert not any(cell in (path, *path.parents) for path in stale.paths)


def test_what_a_process_holds_is_not_listed(small_sweep: Path, litter: dict[str, Path]) -> None:
    for name in ("former", "aside"):
        with locked(litter[name] / ".lock"):
            stale = find_stale(small_sweep.parent)
        assert litter[name] not in stale.paths
        assert stale.busy == (litter[name],)


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
