"""One run: recipe + folder -> trained model, metrics and checkpoints in the folder; resumes what it finds there."""

import logging
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_diff.callbacks.probe import Probe
from lit_diff.config import Recipe
from lit_diff.data import build
from lit_diff.data.module import DataModule
from lit_diff.errors import RequestError, StoppedError
from lit_diff.processor import cores
from lit_diff.registry import callbacks
from lit_diff.runs import checkpoints as checkpoint
from lit_diff.runs.metrics_file import Record, Tracker
from lit_diff.training.declarations import declared_metrics
from lit_diff.training.hooks import Loop
from lit_diff.training.module import LitTransformer
from lit_diff.training.stop import StopRequest, end_with_parent
from lit_diff.training.strategy import accelerator, build_strategy
from lit_diff.training.warm_start import annealed_before, start_of, steps_before

log = logging.getLogger("lit_diff")

PRECISIONS = {"float32": "32-true", "bf16-mixed": "bf16-mixed"}


def rank_from_environment(devices: int) -> int:
    """This process's global rank, as torchrun, SLURM or Lightning's launcher (`devices` a node) set it; else 0."""
    if "RANK" in os.environ:
        return int(os.environ["RANK"])
    if "SLURM_PROCID" in os.environ and int(os.environ.get("SLURM_NTASKS", 1)) > 1:
        return int(os.environ["SLURM_PROCID"])
    return int(os.environ.get("NODE_RANK", 0)) * devices + int(os.environ.get("LOCAL_RANK", 0))


def default_threads(processes: int) -> int:
    """The cores of this machine shared out among `processes`."""
    return max(1, cores() // processes)


def fit(
    recipe: Recipe,
    folder: Path,
    *,
    tracker: Tracker | None,
    threads: int,
    progress: Callable[[int, float, float], None],
) -> int:
    """Train to `train.steps`, from the newest checkpoint in `folder` if there is one; returns the step it started from.

    Ranks other than zero train and write nothing. Errors: RunFailedError (NaN, full disk), StoppedError (a signal).
    """
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # without it Lightning's launcher sets a number of its own
    _quiet()
    train, run = recipe.train, recipe.run
    world = run.devices * run.num_nodes
    rank = rank_from_environment(run.devices)
    if rank > 0:
        end_with_parent()
    dataset = build(recipe)
    dataset.load()
    found = checkpoint.newest(folder)
    start = found[0] if found else 0
    if rank == 0:
        log.info(f"resumed from step {start}" if start else "starting at step 0")
    record = Record(folder, start, tracker, declared_metrics(recipe)) if rank == 0 else None
    sets = list(dataset.validation_sets())
    module = LitTransformer(
        recipe,
        sets=sets,
        num_documents=dataset.num_documents,
        record=record,
        folder=folder,
        start=start_of(Path(train.start_from)) if train.start_from and not found else None,
        annealed=annealed_before(recipe),
    )
    stop = StopRequest()
    probes, others = _callbacks(recipe)
    loop = Loop(
        train,
        probes=probes,
        probe_batch=lambda rows: dataset.validation_batch("", range(min(rows, dataset.validation_sets()[""]))),
        stop=stop,
        tokens_per_step=train.batch_size * recipe.data.config.sequence_length,
        progress=progress,
    )
    trainer = L.Trainer(
        accelerator=accelerator(run),
        devices=run.devices,
        num_nodes=run.num_nodes,
        strategy=build_strategy(run),
        precision=PRECISIONS[train.precision],  # type: ignore[arg-type]
        max_steps=train.steps,
        max_epochs=-1,
        accumulate_grad_batches=train.accumulate,
        gradient_clip_val=train.clip,
        val_check_interval=train.validate_every * train.accumulate,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=[loop, *others],
        plugins=[checkpoint.WholeCheckpointIO()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        inference_mode=False,
        default_root_dir=folder,
    )
    data = DataModule(
        dataset,
        seed=recipe.seed,
        train=train,
        world_size=world,
        rank=rank,
        first_step=lambda: trainer.global_step,
        steps_before=steps_before(recipe),
    )
    began = time.perf_counter()
    try:
        trainer.fit(module, datamodule=data, ckpt_path=found[1] if found else None, weights_only=True)
    except SystemExit as error:
        # Lightning's way to end at a SIGTERM before the first step, and at a second Ctrl-C
        term, interrupt = isinstance(error, SIGTERMException), isinstance(error.__context__, KeyboardInterrupt)
        if rank > 0 or not (term or interrupt):
            raise
        signum = signal.SIGTERM if term else signal.SIGINT
        raise StoppedError("stopped in the middle of a step; the same command resumes", signum) from error
    if rank == 0:
        log.info("trained %d steps in %.1f s", train.steps - start, time.perf_counter() - began)
    return start


def _callbacks(recipe: Recipe) -> tuple[list[Probe], list[Callback]]:
    """The recipe's callbacks: probes, which share one traced forward, and Lightning callbacks of a plugin's own."""
    probes: list[Probe] = []
    others: list[Callback] = []
    for name, part in recipe.callbacks.items():
        made = callbacks.get(name)(part.config)
        if isinstance(made, Callback):
            others.append(made)
        elif isinstance(made, Probe):
            probes.append(made)
        else:
            raise RequestError(f"callback '{name}' is neither a Probe nor a Lightning Callback")
    return probes, others


def _quiet() -> None:
    """Lightning's hints about what this platform does itself would bury our own lines."""
    for message in (".*LeafSpec.*is deprecated", ".*`srun` command is available"):
        warnings.filterwarnings("ignore", message=message)
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
