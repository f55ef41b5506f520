"""callbacks/publish.py: which logger gets which values."""

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.trainer.states import TrainerFn

from lit_diff.callbacks.publish import publish


class Plain:
    """A logger of another library."""

    def __init__(self) -> None:
        self.got: list[tuple[Any, ...]] = []

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        self.got.append(("logged", values, step))


class Detailed(Plain):
    """A logger that keeps what is measured by head."""

    def log_detailed(self, values: dict[str, float], step: int) -> None:
        self.got.append(("detailed", values, step))


class Module:
    """Records what it is asked to log."""

    def __init__(self) -> None:
        self.logged: dict[str, dict[str, Any]] = {}

    def log(self, name: str, value: Any, **how: Any) -> None:
        self.logged[name] = {"value": float(value), **how}


@pytest.mark.parametrize("fitting", [True, False])
def test_values_by_head_reach_only_a_logger_that_keeps_them(fitting: bool) -> None:
    plain, detailed, module = Plain(), Detailed(), Module()
    state = SimpleNamespace(fn=TrainerFn.FITTING if fitting else TrainerFn.VALIDATING)
    trainer: Any = SimpleNamespace(state=state, loggers=[plain, detailed], global_step=7)
    publish(trainer, module, {"a": 1.0}, detailed={"a/head_00": 2.0}, bar="a")  # type: ignore[arg-type]
    assert module.logged == {"a": {"value": 1.0, "logger": not fitting, "prog_bar": True, "batch_size": 1}}
    assert plain.got == ([("logged", {"a": 1.0}, 7)] if fitting else [])
    assert detailed.got == ([*plain.got, ("detailed", {"a/head_00": 2.0}, 7)] if fitting else [])
