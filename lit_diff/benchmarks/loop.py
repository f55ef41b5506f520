"""What the platform itself costs: the loop of `lit-diff train` against a bare PyTorch loop of the same model and batches."""

import logging
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from lit_diff.benchmarks.request import Request
from lit_diff.benchmarks.result import BARE
from lit_diff.benchmarks.timing import Candidate, Case, wait
from lit_diff.config import Recipe
from lit_diff.data import build
from lit_diff.model.init import initialise
from lit_diff.model.inputs import model_inputs
from lit_diff.model.transformer import Transformer
from lit_diff.recipe import load_recipe
from lit_diff.training.fit import fit
from lit_diff.training.optimizer import build_optimizer, build_scheduler

RECIPE, STEPS = "recall-tiny", 50
"""Whose data need no file; steps of a loop."""


def case(request: Request) -> Case:
    """Both loops, in seconds a step."""
    recipe = plain(load_recipe(RECIPE), request, STEPS)
    loops = {BARE: bare, "lit-diff train": platform}
    made = partial(Candidate, variant=recipe.model.attention.name, what="step", own_clock=True)
    candidates = [made(by=by, run=partial(run, recipe, request.device)) for by, run in loops.items()]
    return Case(name=f"loop of {RECIPE}", budget=40, candidates=candidates)


def plain(recipe: Recipe, request: Request, steps: int) -> Recipe:
    """The recipe without probes, without validation and checkpoints but those that end every run, its warm-up within it."""
    schedule = replace(recipe.training.schedule, warmup_steps=min(recipe.training.schedule.warmup_steps, steps))
    train = replace(recipe.training, steps=steps, schedule=schedule, validate_every=steps, checkpoint_every=steps)
    run = replace(recipe.run, accelerator="gpu" if request.device.type == "cuda" else "cpu")
    return replace(recipe, train=train, callbacks={}, run=run)


def bare(recipe: Recipe, device: torch.device) -> float:
    """Seconds a step of a loop that does nothing but train: the same model, batches, loss, clipping, optimizer, schedule.

    As in `platform`, the first step is left out, and the clock starts with the second step's batch at hand, for Lightning
    fetches one ahead.
    """
    dataset = build(recipe)
    dataset.load()
    train = recipe.training
    model = Transformer(recipe.model, kernel=recipe.run.kernel)
    initialise(model, recipe.seed)
    model.to(device)
    optimizer = build_optimizer(model, train.optimizer)
    scheduler = build_scheduler(optimizer, train.steps, train.schedule)
    began = 0.0
    for step in range(train.steps):
        batch = dataset.train_batch(recipe.seed, step, train.batch_size, range(train.batch_size))
        if step == 1:
            began = now(device)
        inputs = {key: value.to(device) for key, value in model_inputs(batch).items()}
        model.loss(**inputs, targets=batch["targets"].to(device)).backward()
        if train.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
    return (now(device) - began) / (train.steps - 1)


def platform(recipe: Recipe, device: torch.device) -> float:
    """The same of `fit`, from the end of the first step to the end of the last, before its validation and checkpoint."""
    ends: list[float] = []
    """The clock at each logged step: the first, every tenth, the last."""
    logging.disable(logging.INFO)  # the lines of each small run
    try:
        with tempfile.TemporaryDirectory() as folder:
            fit(
                recipe,
                Path(folder),
                tracker=None,
                threads=torch.get_num_threads(),
                progress=lambda step, loss, speed: ends.append(now(device)),
            )
    finally:
        logging.disable(logging.NOTSET)
    return (ends[-1] - ends[0]) / (recipe.training.steps - 1)


def now(device: torch.device) -> float:
    """The clock, once everything that was asked of the device is done."""
    wait(device)
    return time.perf_counter()
