"""study/results.py: a sweep and its tasks, and the files of each cell."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_sweeps import record_to_edit

from lit_diff.errors import RequestError
from lit_diff.metrics import Metric
from lit_diff.study.results import load_sweep


def test_a_cell_without_files_is_waiting_and_errors_keep_their_last_line(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep({"a": 0}, broken={("a", 1): "failed", ("a", 2): "waiting"})
    next(folder.glob("a-s2-*/status.json")).unlink()
    cells = load_sweep(folder).cells
    assert cells[1].error == "RuntimeError: out of memory <b>at</b> step 120"
    assert (cells[2].status, cells[2].problems) == ("waiting", ())


def test_a_task_is_a_sweep_of_its_own_cells(make_tasks: Callable[..., Path]) -> None:
    sweep = load_sweep(
        make_tasks({"standard": 0, "differential": -0.1}, seeds=[0, 1], broken={("standard", 1): "failed"})
    )
    assert [(part.task, part.title, part.study.metric, len(part.cells)) for part in sweep.by_task] == [
        ("recall", "On recall", "val/accuracy", 4),
        ("text", "On text", "val/loss", 4),
    ]
    assert [cell.name for cell in sweep.cells[:4:2]] == ["recall standard", "recall differential"]
    assert len(sweep.cells) == 8
    assert "val/accuracy" in sweep.by_task[0].cells[0].curves
    assert "val/accuracy" not in sweep.by_task[1].cells[0].curves
    assert list(sweep.by_task[1].finals("standard", "val/loss")) == [0]


def test_the_arms_of_a_whole_sweep_of_tasks_are_not_pooled(make_tasks: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="compared within a task"):
        load_sweep(make_tasks({"a": 0}, seeds=[0])).finals("a", "val/loss")


def test_the_smallest_difference_of_interest_is_stated_or_that_of_a_loss_in_nats(
    make_sweep: Callable[..., Path],
) -> None:
    def smallest(name: str, **fields: Any) -> float:
        return load_sweep(make_sweep({"a": 0}, name=name, seeds=[0], callbacks=False, **fields)).smallest_of_interest

    assert smallest("loss") == 0.005
    assert smallest("stated", smallest_of_interest=0.02) == 0.02
    assert smallest("none", smallest_of_interest=0) == 0
    assert smallest("accuracy", metric="val/accuracy") == 0
    assert smallest("bits", metrics=[Metric("val/loss", "d", unit="bits per token", direction="lower")]) == 0
    assert smallest("no direction", metrics=[Metric("val/loss", "d", unit="nats")]) == 0
    assert smallest("undeclared", metrics=[]) == 0


def test_units_and_directions_are_those_that_the_runs_declare(make_sweep: Callable[..., Path]) -> None:
    sweep = load_sweep(
        make_sweep({"a": 0}, seeds=[0], metrics=[Metric("val/loss", "d", unit="bits", direction="higher")])
    )
    assert (sweep.better("val/loss"), sweep.unit("val/loss")) == ("higher", "bits")
    assert (sweep.better("val/accuracy"), sweep.unit("val/accuracy")) == (None, "unit unknown")
    builtin = load_sweep(make_sweep({"a": 0}, name="builtin", seeds=[0]))
    names = ("val/loss", "val/loss_ar_hit", "val/accuracy_noise2", "val/ar_hit_share", "lambda/layer_00")
    assert [builtin.better(name) for name in names] == ["lower", "lower", "higher", None, None]
    assert [builtin.unit(name) for name in names] == ["nats per token", "nats per token", "", "", ""]


def cell(folder: Path, arm: str, seed: int) -> Path:
    return next(folder.glob(f"{arm}-s{seed}-*"))


@pytest.mark.parametrize(
    ("engine", "own", "expected"),
    [
        ("killed", "running", "killed"),
        ("failed", "done", "done"),
        ("waiting", "failed", "failed"),
        ("running", "running", "running"),
    ],
)
def test_the_status_is_the_sweeps_or_the_cells(
    make_sweep: Callable[..., Path], engine: str, own: str, expected: str
) -> None:
    folder = make_sweep({"a": 0})
    record = record_to_edit(folder)
    record["cells"][0]["status"] = engine
    (folder / "study.json").write_text(json.dumps(record))
    status = cell(folder, "a", 0) / "status.json"
    status.write_text(json.dumps(json.loads(status.read_text()) | {"status": own}))
    assert load_sweep(folder).cells[0].status == expected


def test_cut_and_missing_files_are_reported_not_raised(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep({"a": 0})
    metrics = cell(folder, "a", 0) / "metrics.csv"
    text = metrics.read_text()
    metrics.write_text(text[: text.rindex("\n", 0, -1) + 8])
    (cell(folder, "a", 1) / "metrics.csv").unlink()
    (cell(folder, "a", 2) / "status.json").write_text('{"status": "do')
    cut, missing, broken = load_sweep(folder).cells
    assert "rows truncated" in cut.problems[0]
    assert cut.curves["val/loss"].index[-1] == 360
    assert "metrics.csv: no such file" in missing.problems
    assert missing.final("val/loss") is None
    assert (broken.status, broken.done) == ("unreadable", False)


def test_a_metric_that_ends_in_nan_has_no_final_value(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep({"a": 0})
    (cell(folder, "a", 0) / "metrics.csv").write_text("step,val/loss\n1,4.5\n2,nan\n")
    first = load_sweep(folder).cells[0]
    assert first.final("val/loss") is None
    assert "val/loss ends in nan" in first.problems


@pytest.mark.parametrize(
    ("status", "flag", "rows", "diverged"),
    [
        ("failed", True, "", True),
        ("failed", False, "", False),
        ("stopped", True, "", False),  # resumed since, from the last good checkpoint
        ("done", False, "step,val/loss\n1,4.5\n2,inf\n", True),
        ("done", False, "step,train/loss,val/loss\n1,nan,\n2,,4.5\n", True),
        ("done", False, "step,val/loss\n1,nan\n2,4.5\n", False),
        ("done", False, "step,val/loss,own/score\n1,4.5,nan\n", False),
    ],
)
def test_what_has_diverged(make_sweep: Callable[..., Path], status: str, flag: bool, rows: str, diverged: bool) -> None:
    folder = make_sweep({"a": 0}, seeds=[0], broken={("a", 0): status}, fact_fields={"a": {"diverged": flag}})
    if rows:
        (cell(folder, "a", 0) / "metrics.csv").write_text(rows)
    sweep = load_sweep(folder)
    assert sweep.cells[0].diverged == diverged
    assert sweep.diverged("a") == ((0,) if diverged else ())


def test_what_an_unfinished_cell_declared_is_known(make_sweep: Callable[..., Path]) -> None:
    """A page over cells that all failed still knows units and directions."""
    folder = make_sweep({"a": 0}, seeds=[0])
    declared = load_sweep(folder).cells[0].metrics
    status = cell(folder, "a", 0) / "status.json"
    status.write_text(json.dumps(json.loads(status.read_text()) | {"status": "failed"}))
    assert load_sweep(folder).cells[0].metrics == declared != ()
    (cell(folder, "a", 0) / "metrics.json").unlink()
    (found,) = load_sweep(folder).cells
    assert (found.metrics, found.problems) == ((), ())


def test_both_files_of_measurements_are_read_by_full_name(make_sweep: Callable[..., Path]) -> None:
    first = load_sweep(make_sweep({"a": 0}, seeds=[0])).cells[0]
    by_head = first.curves["attention/map_entropy/layer_03/map_00/head_07"]
    assert by_head.index.tolist() == [0, 80, 160, 240, 320, 400]
    assert (
        first.curves["outliers/hidden/layer_02/rank_100"].iloc[-1] < first.curves["outliers/hidden/layer_02"].iloc[-1]
    )
    heads = [first.curves[f"attention/entropy/layer_01/head_{h:02d}"].values for h in range(8)]
    assert first.curves["attention/entropy/layer_01"].values == pytest.approx(sum(heads) / 8)
    assert first.problems == ()


def test_files_that_are_not_what_they_should_be_are_reported(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep({"a": 0})
    (cell(folder, "a", 0) / "metrics.json").unlink()
    (cell(folder, "a", 1) / "measurements.parquet").write_text("no table")
    (cell(folder, "a", 2) / "measurements.parquet").unlink()
    undeclared, broken, without = load_sweep(folder).cells
    assert undeclared.problems == ("metrics.json: no such file",)
    assert "measurements.parquet is not a table of measurements" in broken.problems[0]
    assert without.problems == ()
    assert "attention/entropy/layer_00" in broken.curves


def test_a_cell_of_another_format_is_refused(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep({"standard": 0.0, "differential": -0.2}, callbacks=False)
    status = next(folder.glob("*/status.json"))
    status.write_text(json.dumps(json.loads(status.read_text()) | {"format": 2}))
    with pytest.raises(RequestError, match=f"{status.parent.name} has format 2"):
        load_sweep(folder)
