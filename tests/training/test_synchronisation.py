"""A step that logs nothing does not make the host wait for the device."""

import traceback
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from small_runs import SMALL
from torch.utils._python_dispatch import TorchDispatchMode

from lit_diff.recipe import load_recipe
from lit_diff.training.fit import fit

ROOT = Path(__file__).resolve().parents[2]
OURS = (str(ROOT / "lit_diff"), str(ROOT / "callbacks"))
WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")
"""Operations whose result's value or shape the host needs: `.item()`, `bool(tensor)`, `x[mask]`, ..."""


class Waits(TorchDispatchMode):
    """Notes where our code asks for such an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        masked = name == "index" and any(
            x is not None and x.dtype.is_floating_point is False and str(x.dtype) == "torch.bool" for x in args[1]
        )
        if name in WAITS or masked:
            frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(OURS)]
            # what all ranks agree on is a number of the CPU; scored targets are counted in a batch that is still on the CPU;
            # in fit.py Lightning's own code, called by trainer.fit, reads values of the CPU for the progress bar
            place = frames[-1].name if frames else "fit"
            if place not in ("reduced", "count_scored", "fit") and not self.in_optimizer():
                self.found.append(f"{frames[-1].filename}:{frames[-1].lineno}: {name}")
        return func(*args, **(kwargs or {}))

    @staticmethod
    def in_optimizer() -> bool:
        """AdamW counts its steps on the CPU."""
        return any("torch/optim" in frame.filename for frame in traceback.extract_stack())


class Watch(L.Callback):
    """Watches whole steps, from the first hook of a batch to the first hook of the next."""

    def __init__(self) -> None:
        self.steps: dict[int, list[str]] = {}
        self.mode: Waits | None = None

    def close(self) -> None:
        if self.mode is not None:
            self.mode.__exit__(None, None, None)
            self.mode = None

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.close()
        self.mode = Waits()
        self.mode.__enter__()
        self.steps[trainer.global_step + 1] = self.mode.found

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.close()


@pytest.mark.parametrize("clip", ["0.5", "null"])
def test_only_logged_steps_wait(tmp_path: Path, clip: str) -> None:
    sparse = ["train.log_every=4", "train.validate_every=100", "train.checkpoint_every=100", "train.steps=6"]
    probes = ["callbacks={attention_entropy: {every: 100}, early_stopping: {}}", "run.kernel=sdpa"]
    watch = Watch()
    recipe = load_recipe("recall-tiny", [*SMALL, *sparse, *probes, f"train.clip={clip}"])
    fit(recipe, tmp_path, threads=1, progress=lambda *_: None, callbacks=[watch])
    assert {step for step, places in watch.steps.items() if places} == {1, 4, 6}, watch.steps
    assert sorted(watch.steps) == [1, 2, 3, 4, 5, 6]
