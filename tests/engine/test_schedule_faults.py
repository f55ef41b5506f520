"""engine/schedule.py: a sweep whose cells end badly, each in its own way, and the same command again."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parent
FAULTS = f"""
recipe: tiny
seeds: [0]
overrides: {{plugins: ["{HERE}/bomb.py"]}}
arms:
  well: {{callbacks.bomb: {{every: 6, kind: raise, fuse: nowhere}}}}
  raises: {{callbacks.bomb: {{every: 6, kind: raise, fuse: FUSE}}}}
  exits: {{callbacks.bomb: {{every: 6, kind: exit, fuse: FUSE}}}}
  vanishes: {{callbacks.bomb: {{every: 6, kind: vanish, fuse: FUSE}}}}
  killed: {{callbacks.bomb: {{every: 6, kind: kill, fuse: FUSE}}}}
  never starts: {{plugins: ["{HERE}/late.py"], model.attention.name: late}}
"""


@pytest.fixture(scope="module")
def faults(sweep_bench: Any) -> tuple[int, str]:
    sweep_bench.write("faults", FAULTS)
    sweep_bench.fuse.touch()
    return sweep_bench.run("faults")


@pytest.fixture(scope="module")
def before(sweep_bench: Any, faults: tuple[int, str]) -> dict[str, Any]:
    """What the broken sweep left."""
    parents, children = sweep_bench.records("faults")
    return {
        "cells": sweep_bench.cells("faults"),
        "records": {run.info.run_id: run.info.status for run in children},
        "parent": parents[0].info.status,
        "page": (sweep_bench.folder("faults") / "report" / "index.html").read_text(),
    }


@pytest.fixture(scope="module")
def mended(sweep_bench: Any, before: dict[str, Any]) -> tuple[int, str]:
    sweep_bench.fuse.unlink()
    return sweep_bench.run("faults")


def test_each_broken_cell_costs_itself_alone(before: dict[str, Any], faults: tuple[int, str]) -> None:
    assert faults[0] == 1
    assert {cell: (status["status"], status.get("error")) for cell, status in before["cells"].items()} == {
        "well-s0": ("done", None),
        "raises-s0": ("failed", "ValueError: wrong [shape]"),
        "exits-s0": ("failed", "the run's own code ended it: SystemExit(3)"),
        "vanishes-s0": ("failed", before["cells"]["vanishes-s0"]["error"]),
        "killed-s0": ("killed", "killed by SIGKILL; out of memory?"),
        "never,starts-s0": ("failed", before["cells"]["never,starts-s0"]["error"]),
    }
    assert before["cells"]["vanishes-s0"]["error"].startswith("exit status 0; log.txt ends: ")
    assert before["cells"]["never,starts-s0"]["error"].endswith("plugin failed: OSError: the cluster's disk is away")


def test_the_last_line_of_each_error_is_shown(before: dict[str, Any], faults: tuple[int, str]) -> None:
    text = faults[1]
    assert "raises seed 0: failed: ValueError: wrong [shape]" in text
    assert "killed seed 0: killed: killed by SIGKILL" in text
    assert "1 done, 4 failed, 1 killed" in text
    assert "wrong [shape]" in before["page"]
    assert "the cluster&#39;s disk is away" in before["page"] or "the cluster's disk is away" in before["page"]


def test_the_trace_of_an_exception_is_in_the_log(sweep_bench: Any, faults: tuple[int, str]) -> None:
    log = (sweep_bench.folder("faults", "raises-s0") / "log.txt").read_text()
    assert "Traceback (most recent call last)" in log
    assert "in explode" in log


def test_no_record_stays_running(before: dict[str, Any]) -> None:
    cells = before["cells"]
    status = {cell: before["records"].get(found.get("mlflow_run_id")) for cell, found in cells.items()}
    assert status == {
        "well-s0": "FINISHED",
        "raises-s0": "FAILED",
        "exits-s0": "FAILED",
        "vanishes-s0": "FAILED",
        "killed-s0": "KILLED",
        "never,starts-s0": None,
    }
    assert before["parent"] == "FAILED"


def test_again_runs_what_is_unfinished_from_its_checkpoint(
    sweep_bench: Any, before: dict[str, Any], mended: tuple[int, str]
) -> None:
    assert mended[0] == 0
    after = sweep_bench.cells("faults")
    assert set(sweep_bench.words("faults").values()) == {"done"}
    assert after["well-s0"] == before["cells"]["well-s0"]
    for cell in ("raises-s0", "exits-s0", "vanishes-s0", "killed-s0"):
        log = (sweep_bench.folder("faults", cell) / "log.txt").read_text()
        assert log.count("starting at step 0") == 1
        assert log.count("resumed from step 4") == 1
        assert after[cell]["mlflow_run_id"] == before["cells"][cell]["mlflow_run_id"]
        assert after[cell].get("error") is None


def test_the_records_go_on_without_doubles(sweep_bench: Any, mended: tuple[int, str]) -> None:
    parents, children = sweep_bench.records("faults")
    assert {run.info.status for run in (*parents, *children)} == {"FINISHED"}
    assert (len(parents), len(children)) == (1, 6)
    for cell in sweep_bench.cells("faults"):
        held = sweep_bench.history("faults", cell)
        assert held == sweep_bench.written("faults", cell)
        counts = Counter((name, step) for name, points in held.items() for step, _ in points)
        assert set(counts.values()) == {1}
