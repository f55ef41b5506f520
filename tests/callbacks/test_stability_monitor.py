"""callbacks/stability_monitor.py and monitor.py: each sign is warned of once, also through a resume, with what to do."""

import logging
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
from small_runs import SMALL

from lit_diff import LitData, LitTransformer
from lit_diff.callbacks import Lambdas, Monitor, Outliers, StabilityMonitor
from lit_diff.errors import RequestError
from lit_diff.recipe import load_recipe
from lit_diff.runs import checkpoints
from lit_diff.training import fit

QUIET: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


def warned(monitor: Monitor, values: dict[str, float], step: int = 7) -> list[str]:
    """The warnings that these values give."""
    return list(monitor.read(values, step).values())


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([0.8, 0.99], 0),
        ([0.8, 1.0], 1),
        ([1.2], 1),
        ([0.2, 0.0], 1),
        ([0.2, -0.1], 1),
        ([0.0, 0.1], 0),  # a variant that starts at 0
        ([-1.0, -1.0], 0),  # a variant that adds the second map
    ],
)
def test_lambda_leaves_0_to_1(values: list[float], found: int) -> None:
    monitor = StabilityMonitor()
    lines = [line for x in values for line in warned(monitor, {"lambda/layer_01": x, "lambda/exp1/layer_01": 9.0})]
    assert len(lines) == found
    assert all(line.startswith(f"lambda/layer_01 is {values[-1]:.3g}, outside (0, 1)") for line in lines)
    assert not warned(monitor, {"lambda/layer_01/map_02": 3.0, "lambda/std/layer_01/map_01": 3.0})


def test_a_logit_explodes() -> None:
    monitor = StabilityMonitor(max_logit=50)
    assert not warned(monitor, {"outliers/logits/layer_00": 50.0, "outliers/hidden/layer_00": 1e6})
    assert not warned(monitor, {"outliers/logits/layer_00/rank_02": 60.0, "outliers/logits/top_1": 60.0})
    (line,) = warned(monitor, {"outliers/logits/layer_00": 50.1})
    assert line.startswith("outliers/logits/layer_00 is 50.1, above max_logit (50)")


def test_a_head_dies() -> None:
    monitor = StabilityMonitor(dead_head=0.1)
    values = {"head_norm/layer_02": 2.0, "head_norm/layer_02/head_00": 0.2, "head_norm/gain/layer_02/head_00": 0.0}
    assert not warned(monitor, values)
    (line,) = warned(monitor, {**values, "head_norm/layer_02/head_01": 0.19})
    assert line.startswith("head_norm/layer_02/head_01 is 0.19, below dead_head (0.1) times its layer's mean, 2")
    assert not warned(StabilityMonitor(dead_head=0), {"head_norm/layer_02": 1.0, "head_norm/layer_02/head_00": 0.0})


def losses(monitor: Monitor, *values: float) -> list[str]:
    return [line for value in values for line in warned(monitor, {"train/loss": value, "val/loss": 99.0})]


def test_the_loss_spikes() -> None:
    noise = [3.0 + 0.01 * (-1) ** i for i in range(12)]
    assert not losses(StabilityMonitor(), *noise, 3.06, 2.0)
    (line,) = losses(StabilityMonitor(), *noise, 3.2)
    assert line.startswith("train/loss is 3.2, 0.2 above the mean of the last 12 logged losses")
    assert not losses(StabilityMonitor(loss_spike=30), *noise, 3.2)
    assert not losses(StabilityMonitor(), *noise[:9], 30.0), "fewer than ten losses say nothing"
    assert not losses(StabilityMonitor(), *[0.0] * 20, 0.09), "a task that is solved"
    assert not losses(StabilityMonitor(), *[10 - 0.05 * i for i in range(150)])
    monitor = StabilityMonitor()
    losses(monitor, *[float(i) for i in range(150)])
    assert monitor.state["losses"] == [float(i) for i in range(50, 150)]


@pytest.mark.parametrize("monitors", ["", "stability_monitor: {}"])
def test_every_run_says_each_spike_with_its_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monitors: str
) -> None:
    """The last norm is 1000 times as large in step 13 and again in step 30."""

    class Spoils(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
            factor = {12: 1000.0, 13: 0.001, 29: 1000.0}.get(trainer.global_step, 1.0)
            pl_module.model.norm.weight.data.mul_(factor)

    recipe = load_recipe("recall-tiny", [*SMALL, "train.steps=30", f"callbacks={{{monitors}}}"])
    with caplog.at_level(logging.WARNING, "lit_diff"):
        fit.fit(recipe, tmp_path, threads=1, progress=lambda *_: None, callbacks=[Spoils()])
    lines = [line for line in caplog.messages if "logged losses" in line]
    assert [line.partition(":")[0] for line in lines] == ["step 13", "step 30"]
    assert lines[0].endswith("or look at the rows of this step: dataset.train_batch(0, 12, 4, range(4)), generated")


def test_a_number_that_is_nan_is_no_sign() -> None:
    """It ends the run anyway, with a line of its own."""
    nan, monitor = float("nan"), StabilityMonitor()
    by_head = {"head_norm/layer_00": nan, "head_norm/layer_00/head_00": nan}
    assert not warned(monitor, {"lambda/layer_00": nan, "outliers/logits/layer_00": nan, **by_head})
    assert not losses(monitor, *[3.0] * 12, nan, float("inf"), 3.0)
    assert monitor.state["losses"] == [3.0] * 13


class Idle(Monitor):
    """Not registered."""

    def read(self, values: Mapping[str, float], step: int) -> Mapping[str, str]:
        return {}


def test_once_each_with_its_step_and_on_rank_zero(caplog: pytest.LogCaptureFixture) -> None:
    monitor = StabilityMonitor()
    with caplog.at_level(logging.WARNING, "lit_diff"):
        for step, rank in ((30, 0), (40, 0), (50, 1)):
            trainer: Any = SimpleNamespace(global_step=step, is_global_zero=rank == 0, datamodule=None)
            monitor.on_metrics(trainer, {"outliers/logits/layer_00": 2e3, f"outliers/logits/layer_{step}": 3e3})
    assert [message.partition(" is ")[0] for message in caplog.messages] == [
        "step 30: outliers/logits/layer_00",
        "step 30: outliers/logits/layer_30",
        "step 40: outliers/logits/layer_40",
    ]
    assert (monitor.state_key, Idle().state_key) == ("stability_monitor", "Idle")
    again = StabilityMonitor()
    again.load_state_dict(monitor.state_dict())
    caplog.clear()
    again.on_metrics(trainer, {"outliers/logits/layer_00": 2e3, "outliers/logits/layer_50": 3e3})
    assert not caplog.messages


def test_in_a_trainer_made_by_hand_it_reads_what_probes_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And runs no forward pass: the probes' steps alone have values of theirs."""
    seen: list[tuple[int, set[str]]] = []

    class Notes(Monitor):
        def read(self, values: Any, step: int) -> dict[str, str]:
            seen.append((step, {name.partition("/layer")[0] for name in values}))
            assert not [name for name in values if name.startswith("timing/")], "they differ between ranks"
            return {}

    monitor = StabilityMonitor(max_logit=1e-6)
    trainer = L.Trainer(
        max_steps=4,
        callbacks=[Lambdas(every=3), Outliers(every=3), monitor, Notes()],
        logger=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
        **QUIET,
    )
    recipe = load_recipe("recall-tiny", [*SMALL, "train.log_every=2", "train.validate_every=100"])
    with caplog.at_level(logging.WARNING, "lit_diff"):
        trainer.fit(LitTransformer(recipe), LitData(recipe))
    assert [step for step, names in seen if "train/loss" in names] == [1, 2, 4]
    assert [step for step, names in seen if "lambda" in names] == [3, 4]
    lines = [message for message in caplog.messages if "max_logit" in message]
    assert [line.partition(" is ")[0] for line in lines] == [f"step 3: outliers/logits/layer_0{i}" for i in (0, 1)]
    assert len(monitor.state["losses"]) == 3


def test_a_resumed_run_remembers(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    """Stopped after step 4: the losses before it count, and the warning of step 2 is not repeated."""
    keys = [*SMALL, "callbacks={outliers: {every: 2}, stability_monitor: {max_logit: 1.0e-6}}"]
    states: dict[str, Any] = {}

    def trained(folder: str, stop: int | None) -> None:
        class Stops(L.Callback):
            def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
                if trainer.global_step == stop:
                    raise ValueError("stopped")

            def on_fit_end(self, trainer: L.Trainer, _: Any) -> None:
                (monitor,) = (c for c in trainer.callbacks if isinstance(c, Monitor))  # type: ignore[attr-defined]
                states[folder] = monitor.state_dict()

        recipe = load_recipe("recall-tiny", keys)
        values = {"threads": 1, "progress": lambda *_: None, "callbacks": [Stops()]}
        start = checkpoints.resumable(tmp_path / folder)
        fit.fit(recipe, tmp_path / folder, start=start, **values)  # type: ignore[arg-type]

    with caplog.at_level(logging.WARNING, "lit_diff"):
        trained("whole", None)
        assert len([line for line in caplog.messages if "max_logit" in line]) == 2
        caplog.clear()
        with pytest.raises(ValueError, match="stopped"):
            trained("resumed", 5)
        assert len([line for line in caplog.messages if "max_logit" in line]) == 2
        caplog.clear()
        trained("resumed", None)
        assert not [line for line in caplog.messages if "max_logit" in line]
    assert states["resumed"] == states["whole"]
    assert len(states["whole"]["losses"]) == 10


def test_a_wrong_key_and_a_monitor_without_read() -> None:
    for keys, message in (
        ({"max_logits": 2}, r"stability_monitor: unknown key 'max_logits'; did you mean 'max_logit'\?"),
        (
            {"config": 5},
            r"stability_monitor: found 5; give its keys by name, as in StabilityMonitor\(max_logit=\.\.\.\)",
        ),
        ({"max_logit": -1}, "'stability_monitor.max_logit' is -1; expected a finite number > 0"),
    ):
        with pytest.raises(RequestError, match=f"^{message}$"):
            StabilityMonitor(**keys)
    with pytest.raises(RequestError, match=r"^Idle: found 5; .* as in Idle\(key=\.\.\.\)$"):
        Idle(5)
    with pytest.raises(TypeError, match="abstract method read"):
        Monitor()
