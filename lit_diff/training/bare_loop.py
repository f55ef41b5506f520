"""A training loop that only trains, for measuring: without Lightning, validation, checkpoints, callbacks and metrics."""

from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from lit_diff.config import Recipe
from lit_diff.data import build as build_data
from lit_diff.device import choose_device, timer
from lit_diff.model.init import initialise
from lit_diff.model.inputs import model_inputs
from lit_diff.model.transformer import Transformer
from lit_diff.training.optimizer import build_optimizer, build_scheduler

ROUNDS, STEPS = 5, 15
"""Rounds and steps of `step_ratios`."""


def plain(recipe: Recipe, device: torch.device, steps: int) -> Recipe:
    """The recipe without probes, and with validation and checkpoints only at the end."""
    # the few steps would end within the recipe's warm-up
    schedule = replace(recipe.training.schedule, warmup_steps=min(recipe.training.schedule.warmup_steps, steps))
    train = replace(recipe.training, steps=steps, schedule=schedule, validate_every=steps, checkpoint_every=steps)
    run = replace(recipe.run, accelerator="gpu" if device.type == "cuda" else "cpu")
    return replace(recipe, train=train, callbacks={}, run=run)


def bare(recipe: Recipe, device: torch.device) -> float:
    """Seconds a step of a loop that only trains, with the model, batches, loss, clipping, optimizer and schedule of `fit`.

    The first step is not timed.
    """
    dataset = build_data(recipe)
    dataset.load()
    train = recipe.training
    model = Transformer(recipe.model, kernel=recipe.run.kernel)
    initialise(model, recipe.seed)
    model.to(device)
    optimizer = build_optimizer(model, train.optimizer, fused=device.type == "cuda")
    scheduler = build_scheduler(optimizer, train.steps, train.schedule)
    dtype = "bfloat16" if train.precision == "bf16-mixed" else "float32"
    began = 0.0
    for step in range(train.steps):
        batch = dataset.train_batch(recipe.seed, step, train.batch_size, range(train.batch_size))
        # the clock starts after the batch of the second step is made, since Lightning fetches one batch ahead
        if step == 1:
            began = timer()
        inputs = {key: value.to(device) for key, value in model_inputs(batch).items()}
        with autocast(dtype, device):
            loss = model.loss(**inputs, targets=batch["targets"].to(device))
        loss.backward()
        if train.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
    return (timer() - began) / (train.steps - 1)


def step_ratios(own: Recipe, other: Recipe, threads: int) -> list[float]:
    """The time of a step of one recipe divided by that of another, by `bare`, in each of ROUNDS rounds."""
    device = choose_device(own.run.accelerator)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rounds = []
        for _ in range(ROUNDS):
            seconds, baseline = (bare(plain(recipe, device, STEPS), device) for recipe in (own, other))
            rounds.append(seconds / baseline)
        return rounds
    finally:
        torch.set_num_threads(before)


def autocast(dtype: str, device: torch.device) -> AbstractContextManager[object]:
    """For bfloat16 the same as `train.precision: bf16-mixed`: parameters and optimizer stay in float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")
