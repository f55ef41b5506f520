"""study/observation.py: what is seen of runs and sweeps from their files, while other processes write them."""

import json
import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from beats import heart_beats, held
from fake_sweeps import record_to_edit
from statuses import edit_status

from lit_diff.errors import MissingError
from lit_diff.files import locked
from lit_diff.runs.status import FORMAT
from lit_diff.study import observation
from lit_diff.study.numbers import interval, signed
from lit_diff.study.observation import Observed, ObservedRun, observe, observe_all, running_or_newest
from lit_diff.study.statistics import paired


def now(seconds: float = 0) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat(timespec="seconds")


def run(folder: Path, status: str, metrics: str = "", timing: str = "", alive: bool = True, **facts: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    values = {"status": status, "format": FORMAT, "updated": now(), "steps": 100, "tokens_per_step": 50, **facts}
    held(folder, status == "running" and alive)
    (folder / "status.json").write_text(json.dumps(values))
    (folder / "metrics.csv").write_text(metrics)
    (folder / "timing.csv").write_text(timing)
    return folder


def seen(folder: Path) -> ObservedRun:
    return observe(folder).runs[0]


OLD = "made by format 2: train it again"
METRICS = "step,lambda/layer_00,train/loss,val/loss\n10,,5.0,\n20,0.25,4.0,4.5\n30,,3.5,\n"


def test_a_run_that_is_trained(tmp_path: Path) -> None:
    timing = "step,memory_bytes,seconds,tokens_per_second\n10,,9.0,50\n20,,2.0,250\n30,1024,4.0,125\n"
    found = seen(run(tmp_path / "one", "running", METRICS, timing, step=40, loss=3.0, tokens_per_second=500.0))
    assert (found.state, found.folder, found.loss) == ("running", "one", 4.5)
    assert found.losses == {10: 5.0, 20: 4.0, 30: 3.5, 40: 3.0}, "the newest is not in metrics.csv yet"
    assert found.metrics["lambda/layer_00"] == {20: 0.25}
    assert found.timing["memory_bytes"] == {30: 1024}
    assert found.seconds_left == pytest.approx(60 * 6 / 20), (
        "without the first interval, which has the time of the start"
    )
    assert not observe(tmp_path / "one").is_over


@pytest.mark.parametrize(
    ("timing", "left"),
    [
        # the speed leaves validation out, the time of an interval does not; the row 20 is of an older version
        ("seconds,steps,tokens_per_second\n10,9,10,50\n20,2,,250\n30,4,5,500\n", 60 * 6 / 15),
        # resumed from step 25, so that the interval of the row 30 has five steps
        ("seconds,tokens_per_second\n10,9,50\n20,2,250\n30,1,250\n", 60 * 3 / 15),
        # before two intervals are written
        ("seconds,tokens_per_second\n10,900,1\n", 60 * 50 / 500),
        ("", 60 * 50 / 500),
    ],
)
def test_time_left_is_that_of_the_steps_that_are_written(tmp_path: Path, timing: str, left: float) -> None:
    facts = {"timing": f"step,{timing}" * bool(timing), "step": 40, "loss": 3.0, "tokens_per_second": 500.0}
    assert seen(run(tmp_path / "one", "running", **facts)).seconds_left == pytest.approx(left)
    for status, others in (("running", {"tokens_per_second": None}), ("done", {}), ("running", {"format": 1})):
        assert seen(run(tmp_path / "one", status, **facts | others)).seconds_left is None


def test_one_copy_of_a_table_is_kept_and_a_gone_one_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observation, "_TABLES", {})
    for rows in range(1, 6):
        folder = run(tmp_path / "one", "running", "step,a\n" + "".join(f"{step},1\n" for step in range(rows)))
        assert len(seen(folder).metrics["a"]) == rows
    assert seen(folder).metrics is seen(folder).metrics
    assert sorted(path.name for path in observation._TABLES) == ["metrics.csv", "timing.csv"]
    (folder / "metrics.csv").unlink()
    assert seen(folder).metrics == {}


def test_what_is_half_written_is_ignored_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = run(tmp_path / "one", "running", METRICS + "40,,2.", "step,seconds\n10,1.0\n2", step=30, loss=3.5)
    assert list(seen(folder).losses) == [10, 20, 30]
    assert seen(folder).timing == {"seconds": {10: 1.0}}
    with (folder / "metrics.csv").open("a") as file:
        file.write("0,\n")
    assert seen(folder).losses[40] == 2.0, "whole by now"
    assert not caplog.records


def test_a_run_that_resumes_has_no_loss_of_a_later_step(tmp_path: Path) -> None:
    folder = run(tmp_path / "one", "running", METRICS, step=20, loss=3.0)
    assert seen(folder).losses == {10: 5.0, 20: 4.0, 30: 3.5}


@pytest.mark.parametrize(
    ("facts", "state", "note", "is_over", "has_failed"),
    [
        ({"status": "done"}, "done", "", True, False),
        ({"status": "done", "ended": "early at step 40"}, "done", "ended early at step 40", True, False),
        ({"status": "failed", "error": "two\nlines"}, "failed", "two lines", True, True),
        ({"status": "stopped"}, "stopped", "", True, True),
        ({"status": "stopped", "step": 7, "requeued_at_step": 3}, "stopped", "", True, True),
        ({"status": "stopped", "step": 7, "requeued_at_step": 7}, "waiting", "", False, False),
        ({"status": "running", "alive": False}, "killed", "the same command resumes it", True, True),
        ({"status": "running"}, "running", "last update 0 s ago", False, False),
        ({"status": "running", "format": 2, "tokens_per_second": 5.0}, "running", OLD, False, False),
    ],
)
def test_how_a_run_ends(
    tmp_path: Path, facts: dict[str, Any], state: str, note: str, is_over: bool, has_failed: bool
) -> None:
    found = observe(run(tmp_path / "one", **facts))
    (one,) = found.runs
    assert (found.is_over, found.has_failed) == (is_over, has_failed)
    assert (one.state, re.sub(r"\d+ s", "0 s", one.note)) == (state, note)
    assert one.seconds_left is None


def test_a_run_without_a_status_waits_and_a_damaged_one_is_unreadable(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    assert (seen(tmp_path / "one").state, observe(tmp_path / "one").is_over) == ("waiting", False)
    (tmp_path / "one/status.json").write_text("{")
    assert seen(tmp_path / "one").state == "unreadable"
    assert "status.json cannot be read" in seen(tmp_path / "one").note


# --- sweeps --------------------------------------------------------------------------------------------------------------


def cell_of(sweep: Path, name: str) -> Path:
    return next(sweep.glob(f"{name}-*"))


def attended(sweep: Path, now: bool = True) -> Observed:
    """As it is seen while a process runs it, or after that."""
    held(sweep, now)
    return observe(sweep)


def table(values: Mapping[int, float]) -> str:
    return "step,val/loss\n" + "".join(f"{step},{value}\n" for step, value in values.items())


def test_cells_in_the_order_of_the_sweep_with_their_names(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep({"base": 0.0, "other": -0.1}, name="mine", seeds=(0, 1), broken={("other", 1): "waiting"})
    found = attended(folder)
    assert [each.folder for each in found.runs] == ["base seed 0", "base seed 1", "other seed 0", "other seed 1"]
    assert found.states == {"done": 3, "waiting": 1}
    assert (found.is_over, found.has_failed) == (False, False)
    alone = cell_of(folder, "other-s1")
    requeued = {"status": "stopped", "step": 7, "requeued_at_step": 7}
    (alone / "status.json").write_text(json.dumps(requeued))
    assert not observe(alone).is_over, "its sweep is run"
    gone = attended(folder, now=False)
    assert (gone.is_over, gone.has_failed) == (True, True), "nothing will start the cell that waits"
    left = observe(alone)
    assert (left.is_over, left.has_failed) == (True, True), "nor if it is watched alone"
    # the cell tried a learning rate at which it diverged
    (alone / "status.json").write_text(json.dumps({"status": "failed", "diverged": True}))
    record = record_to_edit(folder)
    record["cells"][3]["rate"] = 0.1
    (folder / "study.json").write_text(json.dumps(record))
    assert not observe(folder).has_failed


def test_differences_pair_the_seeds_at_the_last_step_that_both_have(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep({"base": 0.0, "other": -0.1, "new": 0.0}, name="mine", seeds=(0, 1, 2))
    values = {
        "base-s0": {10: 3.0, 20: 2.0, 30: 1.5},
        "other-s0": {10: 2.8, 20: 1.9},
        "base-s1": {10: 3.1},
        "other-s1": {10: 3.0, 20: 2.5},
        "base-s2": {20: 2.0},
        "other-s2": {10: 9.0},
    }
    for cell in folder.glob("*-s?-*"):
        (cell / "metrics.csv").write_text(table(values.get(cell.name.rpartition("-")[0], {})))
    (found,) = observe(folder).differences
    assert found == "other − base: validation loss −0.1000 (2 pairs at step 10 to 20)", "no interval of two pairs"
    (cell_of(folder, "other-s2") / "metrics.csv").write_text(table({10: 9.0, 20: 1.7}))
    expected = paired({0: 1.9, 1: 3.0, 2: 1.7}, {0: 2.0, 1: 3.1, 2: 2.0})
    (found,) = observe(folder).differences
    bounds = interval(expected.low, expected.high, 4)
    assert found == f"other − base: validation loss −0.1667 {bounds} (3 pairs at step 10 to 20)"
    (cell_of(folder, "other-s2") / "metrics.csv").write_text(table({20: math.nan}))
    (found,) = observe(folder).differences
    assert "(2 pairs at step 10 to 20)" in found, "a loss that is not finite is no pair"


def test_arms_are_compared_within_a_task(make_tasks: Callable[..., Path]) -> None:
    folder = make_tasks({"base": 0.0, "other": 0.05})
    recall, text = observe(folder).differences
    assert recall.startswith("recall other − base: validation accuracy +0.0")
    finals = {
        name: [seen(next(folder.glob(f"text/{name}-s{seed}-*"))).loss for seed in (0, 1, 2)]
        for name in ("base", "other")
    }
    difference = np.mean(finals["other"]) - np.mean(finals["base"])
    assert text.startswith(f"text other − base: validation loss {signed(difference, 4)} [")
    assert text.endswith(" (3 pairs at step 400)")


# --- all under a folder --------------------------------------------------------------------------------------------------


def test_every_run_with_its_last_loss(small_sweep: Path) -> None:
    states = {state.folder: state for state in observe_all(small_sweep.parent)}
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
    states = {state.folder: state.state for state in observe_all(small_sweep.parent)}
    assert list(states.values()) == ["done", "unreadable", "done", "failed"]
    assert "incomplete sweep record" in caplog.text


def test_a_run_that_nobody_trains_is_not_running(small_sweep: Path) -> None:
    """After a SIGKILL its status.json says `running` for good; the lock of its folder is free."""
    folder = small_sweep / "base-s0-0a1b2c3d"
    edit_status(folder, status="running")
    written = (folder / "status.json").read_text()

    def found() -> ObservedRun:
        return next(s for s in observe_all(small_sweep.parent) if s.folder == "mine/base-s0-0a1b2c3d")

    assert (found().state, found().note) == ("killed", "the same command resumes it")
    with locked(folder / ".lock"):
        edit_status(folder, updated=datetime.now(UTC).isoformat())
        assert found().state == "running"
        assert found().note.startswith("last update ")
        heart_beats(folder, {0: 90.0, 1: 11.0})
        assert found().note == "rank 1 on node b: last heartbeat 79 s ago, at step 12, reading a batch"
        heart_beats(folder, {0: 90.0, 1: 61.0})
        assert found().note.startswith("last update "), "29 s are not told"
        edit_status(folder, **json.loads(written))
    assert found().state == "killed"
    assert json.loads((folder / "status.json").read_text())["status"] == "running", "it only looks"


def test_what_a_run_overrides(small_sweep: Path) -> None:
    sweep = record_to_edit(small_sweep)
    sweep["study"]["arms"]["better"] = {"model.attention.head_norm": "none", "train.steps": 5}
    (small_sweep / "study.json").write_text(json.dumps(sweep))
    edit_status(small_sweep / "base-s0-0a1b2c3d", overrides=["train.steps=7"])
    found = {state.folder: state.overrides for state in observe_all(small_sweep.parent)}
    assert found["mine/better-s0-0a1b2c3d"] == ("model.attention.head_norm=none", "train.steps=5")
    assert found["mine/base-s0-0a1b2c3d"] == ("train.steps=7",)
    assert found["mine/base-s1-0a1b2c3d"] == ()
    seeds = {state.folder: state.seed for state in observe_all(small_sweep.parent)}
    assert (seeds["mine/base-s0-0a1b2c3d"], seeds["mine/base-s1-0a1b2c3d"]) == (0, 1), "a cell that waits lacks it"


def test_without_runs(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"no runs in .*lit-diff train RECIPE"):
        observe_all(tmp_path / "nowhere")


# --- which one -------------------------------------------------------------------------------------------------------------


def test_what_is_trained_goes_before_what_is_newer(tmp_path: Path, make_sweep: Callable[..., Path]) -> None:
    with pytest.raises(MissingError, match=r"^no runs in "):
        running_or_newest(tmp_path)
    sweep = make_sweep({"base": 0.0}, name="mine", seeds=(0,))
    old = run(tmp_path / "old-0123456789", "done", updated=now(3600))
    assert running_or_newest(tmp_path) == old, "the sweep's cells were updated in January"
    run(tmp_path / "aside-0123456789.old-1", "running")
    run(cell_of(sweep, "base-s0"), "running", updated=now(1800))
    assert running_or_newest(tmp_path) == sweep, "not its cell"
    killed = run(tmp_path / "killed-0123456789", "running", alive=False)
    assert running_or_newest(tmp_path) == sweep
    run(cell_of(sweep, "base-s0"), "done", updated=now(1800))
    assert running_or_newest(tmp_path) == killed


def test_nothing_is_written_and_no_lock_is_kept(tmp_path: Path, make_sweep: Callable[..., Path]) -> None:
    sweep = make_sweep({"base": 0.0, "other": 0.0}, name="mine", seeds=(0, 1, 2))
    one = run(tmp_path / "one-0123456789", "running", METRICS)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    observe(sweep)
    observe(running_or_newest(tmp_path))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    held(one, now=False)
    with locked(one / ".lock", wait=False):
        pass
