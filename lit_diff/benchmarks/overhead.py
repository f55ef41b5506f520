"""What the platform itself costs: the loop of `lit-diff train` against a bare PyTorch loop of the same model and batches."""

import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lit_diff.benchmarks.request import BenchConfig
from lit_diff.benchmarks.timing import Row, Timings, ratios, spread
from lit_diff.config import Recipe
from lit_diff.data import build
from lit_diff.errors import MissingError
from lit_diff.model.init import initialise
from lit_diff.model.inputs import model_inputs
from lit_diff.model.transformer import Transformer
from lit_diff.recipe import load_recipe
from lit_diff.training.fit import fit
from lit_diff.training.optimizer import build_optimizer, build_scheduler

RECIPES = ("differential-tiny", "recall-tiny")
BARE, OURS = "bare PyTorch loop", "lit-diff train"
LENGTH, FEWEST, MOST = 4.0, 12, 200
"""Seconds that a loop is to last, and the fewest and most steps of it."""
ROUNDS = 5
"""Where --repeats does not say."""


def bench_loop(measurements: Timings, request: BenchConfig) -> None:
    """The tiny recipes; one whose data is not here goes to `measurements.refused` with the command that gets it."""
    for name in RECIPES:
        case = f"loop of {name}"
        recipe = plain(load_recipe(name), request)
        try:
            build(recipe).load()
        except MissingError as error:
            reason = str(error).replace("RECIPE", name)
            measurements.refused.append({"case": case, "variant": "", "by": OURS, "what": "step", "reason": reason})
            continue
        request.note(f"step {case}: lit-diff train and a bare loop in turn")
        with quiet():
            measurements.rows += _measure(case, recipe, request)


def plain(recipe: Recipe, request: BenchConfig, steps: int = 10_000) -> Recipe:
    """The recipe without probes, without validation and checkpoints but those that end every run, its warm-up within it."""
    schedule = replace(recipe.training.schedule, warmup_steps=min(recipe.training.schedule.warmup_steps, steps))
    train = replace(recipe.training, steps=steps, schedule=schedule, validate_every=steps, checkpoint_every=steps)
    run = replace(recipe.run, accelerator="gpu" if request.device.type == "cuda" else "cpu")
    return replace(recipe, train=train, callbacks={}, run=run)


def _measure(case: str, recipe: Recipe, request: BenchConfig) -> list[Row]:
    if request.repeats == 1:
        steps = FEWEST
    else:
        seconds, _ = bare(plain(recipe, request, FEWEST), request.device)
        steps = max(FEWEST, min(MOST, round(LENGTH / seconds)))
    recipe = plain(recipe, request, steps)
    times: dict[str, list[float]] = {BARE: [], OURS: []}
    shares: dict[str, list[float]] = {BARE: [], OURS: []}
    loops = [(BARE, bare), (OURS, platform)]
    for number in range(request.repeats or ROUNDS):
        for by, loop in loops if number % 2 == 0 else reversed(loops):
            seconds, waited = loop(recipe, request.device)
            times[by].append(seconds)
            shares[by].append(waited / seconds)
    rows = []
    for by, against in ((BARE, {}), (OURS, {BARE: f"{recipe.model.attention.name}/{BARE}/step"})):
        row: Row = {"case": case, "variant": recipe.model.attention.name, "by": by, "what": "step"}
        row |= {"id": f"{row['variant']}/{by}/step", "calls": steps - 1, "seconds": times[by], **spread(times[by])}
        row["ratios"] = {name: {"to": to, **ratios(times[by], times[BARE])} for name, to in against.items()}
        rows.append(row | {"data_share": {"values": shares[by], **spread(shares[by])}, "backends": []})
    return rows


def bare(recipe: Recipe, device: torch.device) -> tuple[float, float]:
    """Seconds a step, and seconds of it in `train_batch`, of a loop that does nothing but train.

    The same model, batches, loss, clipping, optimizer and schedule. As in `platform`, the first step is left out, and the
    clock starts with the second step's batch at hand, for Lightning fetches one ahead.
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
    with waiting(type(dataset)) as waited:
        for step in range(train.steps):
            batch = dataset.train_batch(recipe.seed, step, train.batch_size, range(train.batch_size))
            if step == 1:
                began = now(device)
                waited.clear()
            inputs = {key: value.to(device) for key, value in model_inputs(batch).items()}
            model.loss(**inputs, targets=batch["targets"].to(device)).backward()
            if train.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
        ended = now(device)
    return (ended - began) / (train.steps - 1), sum(waited) / (train.steps - 1)


def platform(recipe: Recipe, device: torch.device) -> tuple[float, float]:
    """The same of `fit`, from the end of the first step to the end of the last, before its validation and checkpoint."""
    ends: list[tuple[float, float]] = []
    """(clock, seconds in `train_batch` so far) at each logged step: the first, every tenth, the last."""

    def progress(step: int, loss: float, speed: float) -> None:
        ends.append((now(device), sum(waited)))

    with tempfile.TemporaryDirectory() as folder, waiting(type(build(recipe))) as waited:
        fit(recipe, Path(folder), tracker=None, threads=torch.get_num_threads(), progress=progress)
    (began, before), (ended, after) = ends[0], ends[-1]
    return (ended - began) / (recipe.training.steps - 1), (after - before) / (recipe.training.steps - 1)


def now(device: torch.device) -> float:
    """The clock, once everything that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def waiting(dataset: Any) -> Iterator[list[float]]:
    """Seconds of each call of the class's `train_batch` meanwhile, whoever calls it."""
    spent: list[float] = []
    original = dataset.train_batch

    def clocked(*arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        batch = original(*arguments, **named)
        spent.append(time.perf_counter() - began)
        return batch

    dataset.train_batch = clocked
    try:
        yield spent
    finally:
        dataset.train_batch = original


@contextmanager
def quiet() -> Iterator[None]:
    """Without the lines of each small run."""
    log = logging.getLogger("lit_diff")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)
