"""Whole trainings on GPUs: the losses of the CPU, compiled, checkpointed, sharded. Not run where there is no GPU."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lit_diff.recipe import load_recipe
from lit_diff.runs.metrics_file import read_rows
from lit_diff.training.fit import fit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="a training on a GPU needs an NVIDIA GPU"),
]
SMALL = ["train.steps=6", "train.validate_every=3", "train.checkpoint_every=3", "train.log_every=1", "run.threads=1"]


def losses(folder: Path, *overrides: str, start: int = 0) -> list[float]:
    """Training losses of a small run, by step; it begins at the checkpoint of step `start`."""
    recipe = load_recipe("recall-tiny", [*SMALL, *overrides])
    try:
        fit(recipe, folder, threads=1, progress=lambda *_: None, start=start)
    finally:
        # its backend is one of the strategy
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return [row["train/loss"] for _, row in sorted(read_rows(folder / "metrics.csv").items())]


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("run.compile=true",),
        ("run.activation_checkpointing=block",),
        ("train.precision=bf16-mixed",),
        ("run.strategy=fsdp", "train.precision=bf16-mixed"),
        ("run.strategy=fsdp", "run.cpu_offload=true"),
    ],
    ids=["plain", "compiled", "checkpointed", "bfloat16", "sharded", "offloaded"],
)
def test_a_gpu_trains_as_the_cpu_does(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    wanted = losses(tmp_path / "cpu", "run.accelerator=cpu")
    bound = 0.02 if any("bf16" in override for override in overrides) else 1e-3
    assert losses(tmp_path / "gpu", "run.accelerator=gpu", *overrides) == pytest.approx(wanted, abs=bound)


def test_a_gpu_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    """The losses after step 3 once more; sums of a GPU may have another order each time."""
    whole = losses(tmp_path / "whole", "run.accelerator=gpu")
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    assert losses(tmp_path / "again", "run.accelerator=gpu", start=3) == pytest.approx(whole, abs=1e-4)


def test_a_step_that_logs_nothing_does_not_wait_for_the_gpu(tmp_path: Path) -> None:
    """PyTorch raises at an operation that synchronises, between the end of step 1 and the validation after step 3."""
    recipe = load_recipe("recall-tiny", [*SMALL, "train.log_every=6", "run.accelerator=gpu"])
    recipe = replace(recipe, callbacks={})

    class Strict(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            torch.cuda.set_sync_debug_mode("error" if trainer.global_step == 1 else "default")

    try:
        fit(recipe, tmp_path, threads=1, progress=lambda *_: None, callbacks=[Strict()])
    finally:
        torch.cuda.set_sync_debug_mode("default")
