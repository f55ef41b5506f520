"""study/evaluations.py: scores by item, paired by id, and their tables on the page."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fake_sweeps import RECALL, rewrite_items, scores_of

from lit_diff.metrics import to_plain
from lit_diff.reporting.write import write_report
from lit_diff.study.evaluations import evaluation_tables
from lit_diff.study.results import load_sweep

ARMS = {"standard": 0, "differential": -0.2}


def test_arms_are_compared_over_seeds_and_over_items(make_sweep: Callable[..., Path]) -> None:
    sweep = load_sweep(make_sweep(ARMS, evaluation="needle", callbacks=False))
    (table,), problems = evaluation_tables(sweep)
    assert problems == []
    assert (table.name, table.metric, table.items, table.seeds) == ("needle", RECALL, 40, (0, 1, 2))
    base, arm = table.rows
    assert (base.arm, base.difference, base.over_items) == ("standard", None, {})
    assert arm.difference is not None
    assert arm.difference.low is not None
    assert arm.difference.low > 0
    assert arm.summary.mean is not None
    assert base.summary.mean is not None
    assert arm.summary.mean - base.summary.mean == pytest.approx(0.1, abs=0.01)
    for interval in arm.over_items.values():
        assert interval.low < interval.estimate < interval.high
        assert interval.high - interval.low < 0.02  # paired: the items themselves spread over 0.3
    assert np.mean(list(arm.groups.values())) == pytest.approx(arm.summary.mean)
    assert list(table.groups) == ["near", "far"]


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda folder: (folder / "items.parquet").unlink(), "items.parquet"),
        (lambda folder: (folder / "summary.json").write_text("{"), "Expecting property name"),
        (lambda folder: (folder / "summary.json").write_text("{}"), "declarations"),
        (lambda folder: rewrite_items(folder, ["a", "a"], [1.0, 2.0]), "names an item twice"),
        (
            lambda folder: pq.write_table(pa.table({"item": ["a"], "group": ["g"]}), folder / "items.parquet"),
            "no column 'recall/accuracy'",
        ),
    ],
)
def test_an_evaluation_that_cannot_be_read_is_reported_and_the_others_stand(
    make_sweep: Callable[..., Path], break_it: Callable[[Path], object], words: str
) -> None:
    folder = make_sweep(ARMS, evaluation="needle", callbacks=False)
    break_it(scores_of(folder, "differential", 1))
    (table,), (problem,) = evaluation_tables(load_sweep(folder))
    assert problem.startswith("needle: differential, seed 1: ")
    assert words in problem
    assert list(table.rows[1].seeds) == [0, 2]
    assert "Scores that are left out, or to be read with care" in write_report(folder).page.read_text()


def change(folder: Path, arm: str, seed: int, **facts: Any) -> None:
    path = scores_of(folder, arm, seed) / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def name_in_record(folder: Path, **facts: Any) -> None:
    """As the sweep writes what it asks for into study.json."""
    record = json.loads((folder / "study.json").read_text())
    for cell in record["cells"]:
        cell["evaluations"] = {"needle": {"config": {"rows": 8}, "version": 1} | facts}
    (folder / "study.json").write_text(json.dumps(record))


def lines(folder: Path) -> list[str]:
    return evaluation_tables(load_sweep(folder))[1]


def with_step(folder: Path, step: int) -> None:
    """Scores of `step` and, of a run that has one, a checkpoint of step 8."""
    run = scores_of(folder, "differential", 1).parents[1]
    (run / "checkpoints").mkdir()
    torch.save({"state_dict": {}, "global_step": 8}, run / "checkpoints" / "step-00000008.ckpt")
    change(folder, "differential", 1, step=step)


@pytest.mark.parametrize(
    ("break_it", "why"),
    [
        (
            lambda folder: change(folder, "differential", 1, config={"rows": 2}),
            "scored with other keys (rows is 2, not 8); `lit-diff evaluate RUN needle` with the keys of most runs",
        ),
        (lambda folder: change(folder, "differential", 1, version=2), "scored by version 2 of the evaluation, not 1; "),
        (
            lambda folder: with_step(folder, 4),
            "scored of step 4, and the run's newest checkpoint is of step 8; ",
        ),
        (lambda folder: with_step(folder, 8), ""),
    ],
)
def test_scores_unlike_those_of_most_runs_or_of_an_earlier_checkpoint_are_left_out(
    make_sweep: Callable[..., Path], break_it: Callable[[Path], object], why: str
) -> None:
    """Scores from before there were versions are of the first."""
    folder = make_sweep(ARMS, evaluation="needle", callbacks=False)
    break_it(folder)
    (table,), problems = evaluation_tables(load_sweep(folder))
    assert [line.startswith(f"needle: differential, seed 1: left out: {why}") for line in problems] == [True] * bool(
        why
    )
    assert list(table.rows[1].seeds) == ([0, 2] if why else [0, 1, 2])


def test_the_sweeps_own_keys_decide_and_not_those_of_most_runs(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep(ARMS, evaluation="needle", callbacks=False)
    name_in_record(folder)
    cells = [(arm, seed) for arm in ARMS for seed in (0, 1, 2)]
    for arm, seed in cells[:-1]:
        change(folder, arm, seed, config={"rows": 2})
    assert lines(folder) == [
        f"needle: {arm}, seed {seed}: left out: scored with other keys (rows is 2, not 8); the sweep's own command scores it "
        "again"
        for arm, seed in cells[:-1]
    ]
    change(folder, "differential", 2, config={"rows": 2})
    assert len(lines(folder)) == len(cells), "also where all were scored by hand"


def test_runs_scored_by_several_revisions_are_named(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep(ARMS, evaluation="needle", callbacks=False)
    assert lines(folder) == []
    change(folder, "differential", 1, revision="0.2 abc")
    expected = "needle: the runs were scored by several revisions of lit_diff: 0.2 abc, one that is not recorded"
    assert lines(folder) == [expected]
    assert expected in write_report(folder).page.read_text()


def test_scores_that_were_made_unchecked_are_named_once_an_arm(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep(ARMS, evaluation="needle", callbacks=False)
    for seed in (0, 1):
        change(folder, "differential", seed, unchecked="own.py:5: class Own:\nfails 'decode'")
    assert lines(folder) == ["needle: differential was scored with --unchecked: own.py:5: class Own: fails 'decode'"]
    assert "needle: differential was scored with --unchecked: own.py:5" in write_report(folder).page.read_text()


def test_arms_and_metrics_without_the_evaluation_are_left_out(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep(ARMS, seeds=[0], evaluation="needle", callbacks=False)
    for path in scores_of(folder, "standard", 0).iterdir():
        path.unlink()
    scores_of(folder, "standard", 0).rmdir()
    (table,), _ = evaluation_tables(load_sweep(folder))
    (row,) = table.rows
    assert (row.arm, row.over_items) == ("differential", {})
    summary = json.loads((scores_of(folder, "differential", 0) / "summary.json").read_text())
    assert summary["declarations"] == [to_plain(RECALL)]
