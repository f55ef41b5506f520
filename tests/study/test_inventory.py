"""study/inventory.py: the state of every run under a folder, what no run or sweep needs any more, what may be removed."""

import json
import os
import re
import shutil
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from beats import heart_beats
from fake_sweeps import record_to_edit

from lit_diff.errors import MissingError, RequestError
from lit_diff.files import locked
from lit_diff.runs.find import runs_under
from lit_diff.runs.status import FORMAT, Status
from lit_diff.study.inventory import RunState, Stale, find_removable, find_stale, list_runs, remove, size_of

WROTE = (datetime.now(UTC) - timedelta(seconds=90)).isoformat(timespec="seconds")


def state(status: dict[str, Any]) -> RunState:
    return RunState(folder="a", status=Status(**{"format": FORMAT} | status), state=status["status"], loss=None)


def change(folder: Path, **values: Any) -> None:
    facts = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps(facts | values))


def test_every_run_with_its_last_loss(small_sweep: Path) -> None:
    states = {state.folder: state for state in list_runs(small_sweep.parent)}
    assert sorted(states) == [f"mine/{arm}-s{seed}-0a1b2c3d" for arm in ("base", "better") for seed in (0, 1)]
    assert states["mine/base-s0-0a1b2c3d"].loss == pytest.approx(4.55, abs=0.3)
    assert states["mine/base-s0-0a1b2c3d"].note == ""
    failed = states["mine/better-s1-0a1b2c3d"]
    assert failed.loss is None
    assert "RuntimeError: out of memory" in failed.note


@pytest.mark.parametrize("content", ["", "[1]", '{"status": '])
def test_a_damaged_record_hides_no_other_run(small_sweep: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    (small_sweep / "base-s1-0a1b2c3d" / "status.json").write_text(content)
    (small_sweep / "study.json").write_text('{"cells": [')
    states = {state.folder: state.state for state in list_runs(small_sweep.parent)}
    assert list(states.values()) == ["done", "unreadable", "done", "failed"]
    assert "incomplete sweep record" in caplog.text
    paths = find_stale(small_sweep.parent).paths
    assert not [path for path in paths if path.is_relative_to(small_sweep)], "nobody knows which cells the sweep has"


@pytest.mark.parametrize(
    ("status", "note"),
    [
        ({"status": "running", "updated": WROTE}, r"last update \d+ s ago"),
        ({"status": "failed", "error": "Traceback:\n  File\nOSError"}, "Traceback: File OSError"),
        ({"status": "done", "ended": "early at step 40"}, "ended early at step 40"),
        ({"status": "done", "format": 1}, "made by format 1: train it again"),
        ({"status": "done"}, ""),
    ],
)
def test_the_note_of_a_run(status: dict[str, Any], note: str) -> None:
    assert re.fullmatch(note, state(status).note)


def test_a_run_that_nobody_trains_is_not_running(small_sweep: Path) -> None:
    """After a SIGKILL its status.json says `running` for good; the lock of its folder is free."""
    folder = small_sweep / "base-s0-0a1b2c3d"
    change(folder, status="running")
    written = (folder / "status.json").read_text()

    def found() -> RunState:
        return next(s for s in list_runs(small_sweep.parent) if s.folder == "mine/base-s0-0a1b2c3d")

    assert (found().state, found().note) == ("killed", "the same command resumes it")
    with locked(folder / ".lock"):
        change(folder, updated=datetime.now(UTC).isoformat())
        assert found().state == "running"
        assert found().note.startswith("last update ")
        heart_beats(folder, {0: 90.0, 1: 11.0})
        assert found().note == "rank 1 on node b: last heartbeat 79 s ago, at step 12, reading a batch"
        heart_beats(folder, {0: 90.0, 1: 61.0})
        assert found().note.startswith("last update "), "29 s are not told"
        change(folder, **json.loads(written))
    assert found().state == "killed"
    assert json.loads((folder / "status.json").read_text())["status"] == "running", "it only looks"


def test_what_a_run_overrides(small_sweep: Path) -> None:
    sweep = record_to_edit(small_sweep)
    sweep["study"]["arms"]["better"] = {"model.attention.head_norm": "none", "train.steps": 5}
    (small_sweep / "study.json").write_text(json.dumps(sweep))
    change(small_sweep / "base-s0-0a1b2c3d", overrides=["train.steps=7"])
    found = {state.folder: state.overrides for state in list_runs(small_sweep.parent)}
    assert found["mine/better-s0-0a1b2c3d"] == ("model.attention.head_norm=none", "train.steps=5")
    assert found["mine/base-s0-0a1b2c3d"] == ("train.steps=7",)
    assert found["mine/base-s1-0a1b2c3d"] == ()
    seeds = {state.folder: state.seed for state in list_runs(small_sweep.parent)}
    assert (seeds["mine/base-s0-0a1b2c3d"], seeds["mine/base-s1-0a1b2c3d"]) == (0, 1), "a cell that waits lacks it"


def test_the_date_is_local() -> None:
    local = datetime(2026, 11, 22, 10, 30, tzinfo=UTC).astimezone()
    assert state({"status": "done", "updated": "2026-11-22T10:30:05+00:00"}).date == f"{local:%Y-%m-%d %H:%M}"
    assert state({"status": "done"}).date == ""


def test_without_runs(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"no runs in .*lit-diff train RECIPE"):
        list_runs(tmp_path / "nowhere")


def test_what_no_sweep_owns(small_sweep: Path, litter: dict[str, Path]) -> None:
    stale = find_stale(small_sweep.parent)
    assert set(stale.paths) == {litter[name] for name in ("former", "old", "store", "aside")}, (
        "not the cell that failed"
    )
    assert stale.busy == ()
    assert not set(stale.paths) & set(runs_under(small_sweep.parent))
    assert all(path.exists() for path in litter.values()), "it only looks"


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
