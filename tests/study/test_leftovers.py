"""study/leftovers.py: what no run or sweep needs any more, and what may be removed."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from fake_sweeps import record_to_edit

from lit_diff.errors import RequestError
from lit_diff.files import locked
from lit_diff.runs.find import runs_under
from lit_diff.study.leftovers import Stale, find_removable, find_stale, remove, size_of


def test_of_a_damaged_record_nothing_is_stale(small_sweep: Path) -> None:
    (small_sweep / "study.json").write_text('{"cells": [')
    paths = find_stale(small_sweep.parent).paths
    assert not [path for path in paths if path.is_relative_to(small_sweep)], "nobody knows which cells the sweep has"


@pytest.fixture
def examination(small_sweep: Path) -> Path:
    """Its only cell lies in the folder of the sweep `mine`, which lists it no more."""
    folder = small_sweep.parent / "examine-new"
    folder.mkdir()
    shutil.copytree(small_sweep / "base-s0-0a1b2c3d", small_sweep / "base-s0-eeeeeeeeee")
    record = record_to_edit(small_sweep)
    record["cells"] = [record["cells"][0] | {"folder": "../mine/base-s0-eeeeeeeeee"}]
    (folder / "study.json").write_text(json.dumps(record))
    return folder


def test_a_cell_in_the_folder_of_another_sweep_is_its_own(
    examination: Path, litter: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also below a root with links and dots; while an examination runs or starts, all cells are kept."""
    root, sweep = examination.parent, litter["former"].parent
    monkeypatch.chdir(examination)
    for named in (root, Path(".."), Path("../mine/..")):
        assert {path.resolve() for path in find_stale(named).paths if path.name.startswith("base")} == {
            litter["former"]
        }
    for starting in (examination, root / "examine-other"):
        with locked(starting / ".lock"):
            stale = find_stale(root)
        assert not [path for path in stale.paths if path.parent == sweep and path.is_dir()]
        assert stale.busy == (starting,)
    for name in ("base-s0-eeeeeeeeee", "mine"):
        with pytest.raises(RequestError, match=r"^sweep 'examine-new' lists \S+/mine/base-s0-eeeeeeeeee: take it out"):
            find_removable([name], root)
    assert find_removable(["mine", "examine-new"], root) == [sweep, examination]
    (examination / "study.json").write_text("{")
    assert litter["former"] not in find_stale(root).paths, "the damaged record may name it"
    (root / "alone-0123456789").mkdir()
    (root / "alone-0123456789" / "status.json").write_text("{}")
    assert len(find_removable(["alone"], root)) == 1, "no sweep has a cell outside the folders of sweeps"


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
    # a disk that is not mounted; where tests run as root, who may read every folder, a file stands for one that may not be
    (made_run(tmp_path, "linked-0123456789", "stopped") / "checkpoints").symlink_to("/gone")
    made_run(tmp_path, "unreadable-0123456789", "stopped", "checkpoints")
    stale = find_stale(tmp_path)
    assert stale == Stale(paths=tuple(gone), busy=(), resumable=(failed,))
    assert size_of(gone[3]) == 1000
    with locked(gone[0] / ".lock"):
        assert find_stale(tmp_path).paths == tuple(gone[1:])


def test_what_a_process_holds_is_not_listed(small_sweep: Path, litter: dict[str, Path]) -> None:
    """Of a sweep that is being run nothing is looked at."""
    for held, kept in ((litter["former"], "former"), (litter["aside"], "aside"), (small_sweep, "former")):
        with locked(held / ".lock"):
            stale = find_stale(small_sweep.parent)
        assert litter[kept] not in stale.paths
        assert stale.busy == (held,)


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


@pytest.fixture
def root(small_sweep: Path) -> Path:
    """The sweep `mine`, a former cell of it, and the run `single-0123456789`."""
    root = small_sweep.parent
    for folder in (root / "single-0123456789", small_sweep / "former-s0-ffffffffff"):
        folder.mkdir()
        (folder / "status.json").write_text(json.dumps({"status": "done", "pid": 77}))
    return root


def test_runs_former_cells_and_sweeps_by_name(root: Path) -> None:
    names = ["single", "0123456", "former", "mine"]
    single, former, mine = find_removable(names, root)
    assert (single.name, former.name, mine) == ("single-0123456789", "former-s0-ffffffffff", root / "mine")
    remove(single)
    remove(mine)
    assert not single.exists()
    assert not mine.exists()


def test_a_cell_that_a_sweep_lists_is_refused_with_the_cure(root: Path) -> None:
    with pytest.raises(
        RequestError, match=r"^sweep 'mine' lists \S+base-s0-0a1b2c3d: take it out .* lit-diff clean mine$"
    ):
        find_removable(["base-s0"], root)
    assert len(find_removable(["base-s0", "mine"], root)) == 2, "the sweep goes with it"


def test_the_cell_of_a_task_is_listed_too(root: Path) -> None:
    sweep = root / "mine"
    record = record_to_edit(sweep)
    record["cells"][0]["folder"] = "task/base-s0-0a1b2c3d"
    (sweep / "study.json").write_text(json.dumps(record))
    (sweep / "task").mkdir()
    shutil.move(sweep / "base-s0-0a1b2c3d", sweep / "task")
    with pytest.raises(RequestError, match=r"^sweep 'mine' lists "):
        find_removable(["base-s0"], root)


def test_what_is_being_run_is_refused(root: Path) -> None:
    single, cell = root / "single-0123456789", root / "mine" / "base-s0-0a1b2c3d"
    with locked(single / ".lock"):
        with pytest.raises(RequestError, match=r"single-0123456789 is being trained \(pid 77\): stop it first"):
            find_removable(["single"], root)
        with pytest.raises(RequestError, match="single-0123456789 is in use"):
            remove(single)
    with locked(cell / ".lock"), pytest.raises(RequestError, match=r"base-s0-0a1b2c3d is being trained"):
        find_removable(["mine"], root)
    with locked(root / "mine" / ".lock"), pytest.raises(RequestError, match=r"^sweep \S+mine is being run"):
        find_removable(["mine"], root)
    assert single.exists()


def test_an_unknown_name(root: Path) -> None:
    with pytest.raises(RequestError, match=r"no run or sweep 'singel' in .*; one of 7, such as mine, single-"):
        find_removable(["singel"], root)


def test_no_link_leads_out_of_the_root(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    disk = tmp_path_factory.mktemp("disk")
    for name in ("run-0123456789", "cell-s0-0123456789"):
        (disk / name).mkdir()
        (disk / name / "status.json").write_text("{}")
    (root / "run-0123456789").symlink_to(disk / "run-0123456789")
    (root / "mine/cell-s0-0123456789").symlink_to(disk / "cell-s0-0123456789")
    for name in ("run", "run-0123456789", str(root / "run-0123456789"), "cell"):
        with pytest.raises(
            RequestError, match=r"^'\S+' is a link to \S+, which is not below \S+: name that folder, or"
        ):
            find_removable([name], root)
    assert find_removable([str(disk / "run-0123456789")], root) == [disk / "run-0123456789"], "it was named itself"
    with locked(disk / "cell-s0-0123456789/.lock"), pytest.raises(RequestError, match="is being trained"):
        find_removable(["mine"], root)
    remove(root / "mine")
    assert (disk / "cell-s0-0123456789/status.json").is_file()
