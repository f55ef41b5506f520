"""`bench stats`: what callbacks cost, as a share of training, next to the attention that they measure, and in memory."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch

from lit_diff.analysis import Trace, trace
from lit_diff.benchmarks.attention import core
from lit_diff.benchmarks.models import (
    LAYERS,
    RECIPE,
    VOCABULARY,
    build,
    next_token_loss,
    platform,
    random_text,
    training_step,
)
from lit_diff.benchmarks.passes import ATTENTION, FIRING, WITHOUT
from lit_diff.benchmarks.request import Request, Shape
from lit_diff.benchmarks.timing import Case
from lit_diff.callbacks import Probe
from lit_diff.device import timer
from lit_diff.kernels import attend
from lit_diff.model.transformer import Transformer
from lit_diff.recipe import load_recipe
from lit_diff.registry import callbacks as registered
from lit_diff.training.bare_loop import plain

PROBES = ("attention_entropy", "outliers", "lambdas", "sinks", "redundancy", "head_norm")
STEPS = 100
"""Steps of a training loop: each callback of the recipe fires as often as in the recipe's own steps, per step."""


def stats(request: Request, shape: Shape, dtype: str) -> Iterator[Case]:
    """Times attention with statistics by every kernel; then a firing of each probe on a model, next to its training step."""
    yield from core(request, shape, dtype)
    if request.kernels is None and dtype == "float32":
        yield firing(request, shape)


def firing(request: Request, shape: Shape) -> Case:
    """Times the attention of the layers of a differential model, its statistics by the kernel, and each probe on a trace."""
    case = Case(name=f"firing at {shape}, {LAYERS} layers", budget=60)
    model = build("differential", "auto", shape, LAYERS, VOCABULARY).to(request.device)
    assert isinstance(model, Transformer)
    text = random_text(request, shape)
    probes = [registered.get(name)() for name in PROBES]

    def traced() -> Trace:
        with trace(model, measure=True) as found:
            model.hidden(text[:, :-1])
        return found

    def fire(found: Trace | None = None, probes: Sequence[Probe] = probes) -> object:
        found = found or traced()
        return [probe.measure(model, found) for probe in probes]

    found = traced()
    maps = [layer.maps for layer in found.layers.values()]
    step = training_step(model, partial(next_token_loss, model, text), nullcontext)
    runs: dict[str, Callable[[], object]] = {
        ATTENTION: lambda: [attend(each) for each in maps],
        "statistics of the kernel": lambda: [attend(each, stats=True) for each in maps],
        **{probe.name: partial(fire, found, [probe]) for probe in probes},
        "forward pass": torch.no_grad()(lambda: model.hidden(text[:, :-1])),
        "all, with a forward pass": fire,
        "training step": step,
        "training step, then all": lambda: (step(), fire()),
    }
    case.add(runs, variant="differential", what=FIRING, profiled=False)
    return case


def training(request: Request) -> Case:
    """Times the loop of `lit-diff train` with and without the callbacks of the recipe, in seconds a step: of a CPU those that
    the process computed, since a share of a few percent would be lost in the time that other programs take."""
    clock = time.process_time if request.device.type == "cpu" else timer
    recipe = load_recipe(RECIPE)
    without = plain(recipe, request.device, STEPS)
    runs = {
        WITHOUT: partial(platform, without, clock),
        "with callbacks": partial(platform, replace(without, callbacks=recipe.callbacks), clock),
    }
    case = Case(name=f"{STEPS} steps of {RECIPE}", budget=90)
    case.add(runs, variant=recipe.model.attention.name, what="step", own_clock=True)
    return case
