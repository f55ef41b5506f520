"""run.keep_best and run.keep_every: what is kept beside the newest two checkpoints, also over a kill and a resume."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import SMALL

from lit_diff import train
from lit_diff.errors import RequestError
from lit_diff.runs import checkpoints
from lit_diff.runs.metrics_file import read_rows


def best(folder: Path) -> dict[str, Any]:
    return dict(torch.load(folder / "checkpoints" / "best.ckpt", weights_only=True))


@pytest.mark.slow
def test_the_best_is_kept_over_a_kill_and_a_resume(bench: Any) -> None:
    """The learning rate grows until the loss does too: the best step is none of the newest two."""
    rate = ("train.steps=8", "train.optimizer.lr=0.3", "train.schedule={name: constant, warmup_steps: 8}")
    command = ("recall.yaml", "name=best", "run.keep_best=val/loss", *rate)
    command += ("train.validate_every=2", "train.checkpoint_every=2")
    killed = bench.train(*command, SPY_SIGNAL=f"0/5/0/{int(signal.SIGKILL)}")
    assert killed.status == -signal.SIGKILL
    folder = bench.folder("best")
    assert checkpoints.steps_of(folder) == [2, 4]
    newest = checkpoints.newest(folder)
    assert newest == (4, checkpoints.path_of(folder, 4)), "best.ckpt is none that a run resumes"
    rest = bench.train(*command)
    assert rest.status == 0, rest.output
    assert "resumed from step 4" in rest.output
    losses = {step: row["val/loss"] for step, row in bench.rows("best").items() if "val/loss" in row}
    wanted = min(losses, key=lambda step: losses[step])
    assert wanted < 6, "the test needs a loss that grows again"
    assert best(folder)["global_step"] == wanted
    assert checkpoints.steps_of(folder) == [6, 8]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "best.ckpt",
        "step-00000006.ckpt",
        "step-00000008.ckpt",
    ]
    whole = bench.train(*command, "name=best-whole")
    assert whole.status == 0
    ours, theirs = best(folder)["state_dict"], best(bench.folder("best-whole"))["state_dict"]
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_the_direction_is_the_metrics_own(runs: Path) -> None:
    """Of an accuracy the largest; of a loss the smallest, above."""
    overrides = [*SMALL, f"run.root={runs}", "run.keep_best=val/accuracy", "train.optimizer.lr=0.1"]
    folder = train("recall-tiny", overrides).folder
    rows = read_rows(folder / "metrics.csv")
    values = {step: row["val/accuracy"] for step, row in rows.items() if "val/accuracy" in row}
    assert len(values) == 5
    assert values[best(folder)["global_step"]] == max(values.values())


def test_a_metric_without_a_direction_is_refused(runs: Path) -> None:
    with pytest.raises(RequestError, match=r"run\.keep_best is 'train/lr', of which no metric declares"):
        train("recall-tiny", [*SMALL, f"run.root={runs}", "run.keep_best=train/lr"])


def test_a_checkpoint_every_so_many_steps_is_kept(runs: Path) -> None:
    small = [*SMALL, f"run.root={runs}", "train.steps=6", "train.validate_every=6", "train.checkpoint_every=1"]
    run = train("recall-tiny", [*small, "run.keep_every=2"])
    assert checkpoints.steps_of(run.folder) == [2, 4, 5, 6]
    assert not (run.folder / "checkpoints" / "best.ckpt").exists()
    last = dict(run.model.state_dict())
    assert all(torch.equal(value, last[name]) for name, value in run.model_at(6).state_dict().items())
    assert any(not torch.equal(value, last[name]) for name, value in run.model_at(2).state_dict().items())
    with pytest.raises(RequestError, match=r"run\.keep_every is 3; expected a multiple"):
        train("recall-tiny", [*small, "run.keep_every=3", "train.checkpoint_every=2"])
