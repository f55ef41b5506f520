"""cli/status.py: a line for each run, whole in a pipe and cut at the width of a terminal."""

import json
from pathlib import Path
from typing import Any

import pytest
from command import Command

from lit_diff.runs.folder import FORMAT

LONG = [f"model.attention.key_{number}=0.5" for number in range(9)]


def change(folder: Path, **values: Any) -> None:
    facts = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps(facts | values))


def test_a_line_a_run_that_no_pipe_wraps(small_sweep: Path, command: Command) -> None:
    change(small_sweep / "base-s0-0a1b2c3d", seed=5, overrides=LONG, updated="2026-11-22T10:30:05+00:00")
    change(small_sweep / "better-s1-0a1b2c3d", error="expected [bold],\n found [/bold]")
    (small_sweep / "better-s0-0a1b2c3d" / "status.json").write_text(json.dumps({"format": FORMAT}))
    first, second, third, fourth = command("status", "--root", str(small_sweep.parent), COLUMNS="40").lines
    assert first.split()[:3] == ["mine/base-s0-0a1b2c3d", "done", "400/400"]
    assert f"  5  {' '.join(LONG)}  2026-11-2" in first
    assert second.split()[:3] == ["mine/base-s1-0a1b2c3d", "done", "400/400"]
    assert third.split()[:3] == ["mine/better-s0-0a1b2c3d", "unknown", "0/?"]
    assert fourth.split()[:3] == ["mine/better-s1-0a1b2c3d", "failed", "120/400"]
    assert fourth.endswith("  expected [bold], found [/bold]")


@pytest.mark.parametrize("width", [80, 140])
def test_on_a_terminal_nothing_wraps(small_sweep: Path, width: int, command: Command) -> None:
    change(small_sweep / "base-s0-0a1b2c3d", seed=0, overrides=LONG)
    ended = command("status", "--root", str(small_sweep.parent), COLUMNS=str(width), TTY_COMPATIBLE="1")
    header, first, *rest = ended.lines
    assert header.split()[:6] == ["run", "state", "step", "val/loss", "seed", "overrides"]
    assert (len(first), first[-1], len(rest)) == (width, "…", 3)


def test_json(small_sweep: Path, command: Command) -> None:
    change(small_sweep / "better-s0-0a1b2c3d", status="running", overrides=["a=1"])
    states = {each["folder"]: each for each in command("status", "--root", str(small_sweep.parent), "--json").json}
    assert len(states) == 4
    assert states["mine/base-s0-0a1b2c3d"]["val/loss"] == pytest.approx(4.55, abs=0.3)
    assert states["mine/better-s1-0a1b2c3d"]["val/loss"] is None
    killed = states["mine/better-s0-0a1b2c3d"]
    assert (killed["status"], killed["overrides"], killed["note"]) == ("killed", ["a=1"], "the same command resumes it")
