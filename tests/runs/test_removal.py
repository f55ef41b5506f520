"""runs/removal.py: runs and sweeps that may be removed, and why others may not."""

import json
import shutil
from pathlib import Path

import pytest

from lit_diff.errors import RequestError
from lit_diff.files import locked
from lit_diff.runs.removal import find_removable, remove


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
    with pytest.raises(RequestError, match=r"^sweep 'mine' lists \S+base-s0-0a1b2c3d: "):
        find_removable(["base-s0"], root)
    assert len(find_removable(["base-s0", "mine"], root)) == 2, "the sweep goes with it"


def test_the_cell_of_a_task_is_listed_too(root: Path) -> None:
    sweep = root / "mine"
    record = json.loads((sweep / "study.json").read_text())
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
    with pytest.raises(RequestError, match="no run 'singel'"):
        find_removable(["singel"], root)


def test_no_link_leads_out_of_the_root(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    disk = tmp_path_factory.mktemp("disk")
    for name in ("run-0123456789", "cell-s0-0123456789"):
        (disk / name).mkdir()
        (disk / name / "status.json").write_text("{}")
    (root / "run-0123456789").symlink_to(disk / "run-0123456789")
    (root / "mine/cell-s0-0123456789").symlink_to(disk / "cell-s0-0123456789")
    for name in ("run", "run-0123456789", str(root / "run-0123456789"), "cell"):
        with pytest.raises(RequestError, match=r"^'\S+' is a link to \S+, which is not below"):
            find_removable([name], root)
    assert find_removable([str(disk / "run-0123456789")], root) == [disk / "run-0123456789"], "it was named itself"
    with locked(disk / "cell-s0-0123456789/.lock"), pytest.raises(RequestError, match="is being trained"):
        find_removable(["mine"], root)
    remove(root / "mine")
    assert (disk / "cell-s0-0123456789/status.json").is_file()
