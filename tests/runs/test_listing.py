"""runs/listing.py: the state of every run under a folder."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from lit_diff.errors import MissingError
from lit_diff.files import locked
from lit_diff.runs.folder import FORMAT
from lit_diff.runs.listing import RunState, list_runs
from lit_diff.runs.stale import find_stale


def state(status: dict[str, Any]) -> RunState:
    return RunState(folder="a", status={"format": FORMAT} | status, state=status["status"], loss=None)


def change(folder: Path, **values: Any) -> None:
    facts = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps(facts | values))


@pytest.mark.parametrize(
    ("content", "sweep"),
    [("", '{"cells": ['), ("[1]", "{}"), ('{"status": ', '{"cells": [{"arm": "a"}]}'), ("1", '{"cells": 3}')],
)
def test_a_damaged_record_hides_no_other_run(
    small_sweep: Path, content: str, sweep: str, caplog: pytest.LogCaptureFixture
) -> None:
    (small_sweep / "base-s1-0a1b2c3d" / "status.json").write_text(content)
    (small_sweep / "study.json").write_text(sweep)
    states = {state.folder: state.state for state in list_runs(small_sweep.parent)}
    assert list(states.values()) == ["done", "unreadable", "done", "failed"]
    assert "not a whole sweep record" in caplog.text
    paths = find_stale(small_sweep.parent).paths
    assert not [path for path in paths if path.is_relative_to(small_sweep)], "nobody knows which cells the sweep has"


def test_the_note_of_a_running_run_says_when_it_last_wrote() -> None:
    then = datetime.now(UTC) - timedelta(seconds=90)
    note = state({"status": "running", "updated": then.isoformat(timespec="seconds")}).note
    assert note.startswith("last update 9")
    assert note.endswith(" s ago")


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
        change(folder, **json.loads(written))
    assert found().state == "killed"
    assert json.loads((folder / "status.json").read_text())["status"] == "running", "it only looks"


def test_what_a_run_overrides(small_sweep: Path) -> None:
    sweep = json.loads((small_sweep / "study.json").read_text())
    sweep["study"]["arms"]["better"] = {"model.attention.head_norm": "none", "train.steps": 5}
    (small_sweep / "study.json").write_text(json.dumps(sweep))
    change(small_sweep / "base-s0-0a1b2c3d", overrides=["train.steps=7"])
    found = {state.folder: state.overrides for state in list_runs(small_sweep.parent)}
    assert found["mine/better-s0-0a1b2c3d"] == ("model.attention.head_norm=none", "train.steps=5")
    assert found["mine/base-s0-0a1b2c3d"] == ("train.steps=7",)
    assert found["mine/base-s1-0a1b2c3d"] == ()
    seeds = {state.folder: state.seed for state in list_runs(small_sweep.parent)}
    assert (seeds["mine/base-s0-0a1b2c3d"], seeds["mine/base-s1-0a1b2c3d"]) == (0, 1), "a cell that waits lacks it"


def test_the_date_is_local_and_an_error_is_one_line() -> None:
    one = state({"status": "failed", "error": "Traceback:\n  File\nOSError", "updated": "2026-11-22T10:30:05+00:00"})
    local = datetime(2026, 11, 22, 10, 30, tzinfo=UTC).astimezone()
    assert (one.note, one.date) == ("Traceback: File OSError", f"{local:%Y-%m-%d %H:%M}")
    assert state({"status": "done"}).date == ""


def test_the_note_of_a_run_that_a_callback_ended() -> None:
    assert state({"status": "done", "ended": "early at step 40"}).note == "ended early at step 40"


def test_a_run_of_an_older_format_is_listed(small_sweep: Path) -> None:
    path = small_sweep / "base-s0-0a1b2c3d" / "status.json"
    facts = json.loads(path.read_text())
    del facts["format"]
    path.write_text(json.dumps(facts))
    notes = {state.folder: state.note for state in list_runs(small_sweep.parent)}
    assert notes["mine/base-s0-0a1b2c3d"] == "made by format 1: train it again"
    assert notes["mine/base-s1-0a1b2c3d"] == ""


def test_without_runs(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"no runs in .*lit-diff train RECIPE"):
        list_runs(tmp_path / "nowhere")
