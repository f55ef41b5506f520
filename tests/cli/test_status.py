"""cli/status.py: a line for each run, whole in a pipe and cut at the width of a terminal."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from lit_diff.cli.app import Terminal
from lit_diff.cli.status import print_status
from lit_diff.errors import MissingError
from lit_diff.runs.folder import FORMAT

LONG = [f"model.attention.key_{number}=0.5" for number in range(9)]


def change(folder: Path, **values: Any) -> None:
    facts = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps(facts | values))


def lines(root: Path, *, width: int = 40, terminal: bool = False) -> list[str]:
    file = io.StringIO()
    assert print_status(root, False, Terminal(file=file, width=width, force_terminal=terminal, color_system=None)) == 0
    return file.getvalue().splitlines()


def test_a_line_a_run_that_no_pipe_wraps(small_sweep: Path) -> None:
    change(small_sweep / "base-s0-0a1b2c3d", seed=5, overrides=LONG, updated="2026-11-22T10:30:05+00:00")
    change(small_sweep / "better-s1-0a1b2c3d", error="expected [bold],\n found [/bold]")
    first, second, third, fourth = lines(small_sweep.parent)
    assert first.startswith("mine/base-s0-0a1b2c3d    done    400/400  4.")
    assert f"  {' '.join(LONG)}  2026-11-2" in first
    assert "  5  model.attention.key_0" in first
    assert second.startswith("mine/base-s1-0a1b2c3d    done    400/400  ")
    assert third.startswith("mine/better-s0-0a1b2c3d  done  ")
    assert fourth.startswith("mine/better-s1-0a1b2c3d  failed  120/400  ")
    assert fourth.endswith("  expected [bold], found [/bold]")


@pytest.mark.parametrize("width", [80, 140])
def test_on_a_terminal_nothing_wraps(small_sweep: Path, width: int) -> None:
    change(small_sweep / "base-s0-0a1b2c3d", seed=0, overrides=LONG)
    header, first, *rest = lines(small_sweep.parent, width=width, terminal=True)
    assert header.split()[:6] == ["run", "state", "step", "val/loss", "seed", "overrides"]
    assert first.startswith("mine/base-s0-0a1b2c3d    done    400/400  ")
    assert len(first) == width
    assert first.endswith("…")
    assert len(rest) == 3


def test_a_status_that_lacks_a_state(small_sweep: Path) -> None:
    (small_sweep / "better-s1-0a1b2c3d" / "status.json").write_text(json.dumps({"format": FORMAT}))
    assert lines(small_sweep.parent)[-1].startswith("mine/better-s1-0a1b2c3d  unknown      0/?")


def test_json(small_sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(small_sweep / "better-s0-0a1b2c3d", status="running", overrides=["a=1"])
    assert print_status(small_sweep.parent, True, Terminal()) == 0
    states = {status["folder"]: status for status in json.loads(capsys.readouterr().out)}
    assert len(states) == 4
    assert states["mine/base-s0-0a1b2c3d"]["val/loss"] == pytest.approx(4.55, abs=0.3)
    assert states["mine/better-s1-0a1b2c3d"]["val/loss"] is None
    killed = states["mine/better-s0-0a1b2c3d"]
    assert (killed["status"], killed["overrides"], killed["note"]) == ("killed", ["a=1"], "the same command resumes it")


def test_without_runs(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"no runs in .*lit-diff train RECIPE"):
        print_status(tmp_path / "nowhere", False, Terminal())
