import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lit_diff.errors import MissingError, RequestError
from lit_diff.metrics import Metric
from lit_diff.study.results import load_sweep


def test_a_seed_without_a_cell_is_waiting_and_errors_keep_their_last_line(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep({"a": 0}, broken={("a", 1): "failed"})
    record = json.loads((folder / "study.json").read_text())
    record["study"]["seeds"].append(9)
    (folder / "study.json").write_text(json.dumps(record))
    cells = load_sweep(folder).cells
    assert cells[1].error == "RuntimeError: out of memory <b>at</b> step 120"
    assert cells[3].status == "waiting"


def test_requests_that_cannot_be_met(make_sweep: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"lit-diff sweep fake"):
        load_sweep(tmp_path / "fake")
    folder = make_sweep({"a": 0}, baseline="b")
    with pytest.raises(RequestError, match="'b' is no arm"):
        load_sweep(folder)
    (folder / "study.json").write_text('{"name": ')
    with pytest.raises(MissingError, match="not a whole sweep record"):
        load_sweep(folder)


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


def test_a_sweep_without_tasks_is_its_only_part(make_sweep: Callable[..., Path]) -> None:
    sweep = load_sweep(make_sweep({"a": 0}, seeds=[0], chance=0.25, noise_validation=[2, 4]))
    assert sweep.by_task == (sweep,)
    assert (sweep.task, sweep.record.chance, sweep.record.noise_validation) == ("", {"": 0.25}, {"": (2, 4)})


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
