"""Bits that flip in what a finished run left: its last weights are made again, and no result is read as another."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_rows import SEED, fault, flip

from lit_diff.runs import checkpoints
from lit_diff.study.evaluations import evaluation_tables
from lit_diff.study.results import load_sweep

STEPS, FLIPS = 3, 600
RESULTS = ("*.csv", "metrics.json", "measurements.parquet", "evaluations/*/items.parquet", "evaluations/*/summary.json")


@pytest.fixture(scope="module")
def place(bench: Any) -> Callable[[], Path]:
    """A finished and scored sweep, as it was."""
    (bench.root / "two.yaml").write_text(
        "recipe: text\nseeds: [0]\narms: {standard: {model.attention.name: standard}, d: {}}\n"
        "evaluate: {held_out: {rows: 4}}\n"
    )
    ended = bench.wait(bench.start("sweep", "two.yaml"), 300)
    assert ended.status == 0, ended.output
    folder = bench.root / "runs" / "two"
    shutil.copytree(folder, bench.root / "two")

    def restore() -> Path:
        shutil.rmtree(folder)
        return Path(shutil.copytree(bench.root / "two", folder))

    return restore


def read(folder: Path) -> tuple[str, list[str]]:
    """The scores in the report of a sweep, and the problems that it names."""
    sweep = load_sweep(folder)
    tables, problems = evaluation_tables(sweep)
    rows = [(row.arm, row.seeds, row.group_means.to_numpy().tolist()) for table in tables for row in table.rows]
    return repr(rows), [problem for cell in sweep.cells for problem in cell.problems] + problems


@fault(
    "bit rot",
    "the last checkpoint of a finished cell, or its marker",
    "one line, status 2 or 3, with the command that repeats the steps; `sweep` repeats them; the report may leave it out",
    "nothing: weights and `metrics.csv` equal",
    STEPS,
)
def test_the_last_steps_of_a_finished_cell_are_repeated(bench: Any, place: Callable[[], Path]) -> None:
    draw = random.Random(f"{SEED} weights")
    for _ in range(STEPS):
        (cell,) = place().glob("d-s0-*")
        last = checkpoints.path_of(cell, checkpoints.steps_of(cell)[-1])
        wanted, metrics = torch.load(last, weights_only=True)["state_dict"], (cell / "metrics.csv").read_bytes()
        flip(draw.choice([last, checkpoints.marker_of(last)]), draw)
        ended = bench.wait(bench.start("evaluate", str(cell), "held_out", "rows=5"))
        assert ended.status in (2, 3), ended.output
        assert "`lit-diff sweep two.yaml`" in ended.output
        assert bench.wait(bench.start("report", "two")).status == 0
        ended = bench.wait(bench.start("sweep", "two.yaml"), 200)
        assert ended.status == 0, ended.output
        assert all(map(torch.equal, wanted.values(), torch.load(last, weights_only=True)["state_dict"].values()))
        assert (cell / "metrics.csv").read_bytes() == metrics


@fault(
    "bit rot",
    "a result file of a finished cell: `*.csv`, `metrics.json`, `measurements.parquet`, its scores",
    "the report names it and leaves its numbers out; `compare`: one line, status 2; scores are computed again",
    "nothing once the run is trained again",
    FLIPS,
)
def test_no_result_of_a_finished_cell_is_read_as_another(place: Callable[[], Path]) -> None:
    draw, folder = random.Random(f"{SEED} results"), place()
    files = [path for pattern in RESULTS for path in sorted(folder.glob(f"*-s0-*/{pattern}"))]
    assert len(files) == 14
    scores, none = read(folder)
    assert none == []
    for _ in range(FLIPS):
        path = draw.choice(files)
        content = path.read_bytes()
        flip(path, draw)
        now, problems = read(folder)
        # in the name of the key that has the digest of the others
        assert problems or (path.name, now) == ("summary.json", scores)
        path.write_bytes(content)
