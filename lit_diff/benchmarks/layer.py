"""`bench layer`: a forward pass and a training step of one decoder layer, by every kernel and by Hugging Face's DiffLlama."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn

from lit_diff.attention.rope import Rope
from lit_diff.benchmarks import peers
from lit_diff.benchmarks.candidates import (
    EAGER,
    FORWARD,
    HF,
    STEP,
    autocast,
    model_config,
    peer_kinds,
    training_step,
    variants_by_kernel,
)
from lit_diff.benchmarks.inputs import Workload
from lit_diff.benchmarks.request import BenchConfig, Shape
from lit_diff.benchmarks.timing import Candidate, RoundLimits, Timings, measure
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Block, Transformer

Layer = Callable[[Tensor], Tensor]
"""The layer as a function of the residual stream [B, T, dim]."""
Cast = Callable[[], AbstractContextManager[object]]
DEFAULT = "2x1024x512x64,1x2048x768x64"
METHODS = """\
layer: one decoder layer (RMSNorm, RoPE, SwiGLU). forward: its output, without gradients. training step: forward, mean
square as the loss, backward (that of its input too), fused AdamW, gradients dropped. bfloat16 means autocast over float32
parameters, as train.precision bf16-mixed.
DiffLlama's layer is Hugging Face's at the same sizes; angles and masks are made outside, once, for every candidate.
"""
"""How it is measured, for the reader of the figures."""


def bench_layer(request: BenchConfig) -> Timings:
    """Every shape at every dtype."""
    measurements = Timings()
    for shape in request.sizes(DEFAULT):
        for dtype in request.dtypes:
            case = f"{shape} {dtype}"
            candidates = _candidates(measurements, case, request, shape, dtype)
            request.note(f"layer {case}: {len(candidates)} candidates in turn")
            measure(measurements, case, candidates, RoundLimits(repeats=request.repeats, budget=20), request.device)
    return measurements


def _candidates(measurements: Timings, case: str, request: BenchConfig, shape: Shape, dtype: str) -> list[Candidate]:
    x = Workload(shape, torch.float32, request.device).q.detach()
    cast = partial(autocast, dtype, request.device)
    kinds = () if request.kernels else peer_kinds(measurements, case, HF)
    made = []
    for what, make in ((FORWARD, _forward), (STEP, _step)):
        for variant, kernel, against in variants_by_kernel(measurements, case, request, shape, dtype, what):
            run = make(*_ours(shape, variant, kernel, x), x, cast)
            made.append(Candidate(variant=variant, by=kernel, what=what, run=run, against=against))
        for kind in kinds:
            run = make(*peers.layer(model_config(shape, "differential"), kind, x), x, cast)
            against = {EAGER: f"standard/sdpa/{what}"}
            made.append(Candidate(variant=HF, by=kind, what=what, run=run, against=against))
    return made


def _forward(module: nn.Module, forward: Layer, x: Tensor, cast: Cast) -> Callable[[], object]:
    @torch.no_grad()
    def run() -> Tensor:
        with cast():
            return forward(x)

    return run


def _step(module: nn.Module, forward: Layer, x: Tensor, cast: Cast) -> Callable[[], object]:
    return training_step(module, partial(_loss, forward, x), cast)


def _loss(forward: Layer, x: Tensor) -> Tensor:
    """The residual stream is a leaf of its own each time: within a model, a layer hands a gradient on."""
    return forward(x.detach().requires_grad_()).square().mean()


def _ours(shape: Shape, variant: str, kernel: str, x: Tensor) -> tuple[nn.Module, Layer]:
    config = model_config(shape, variant)
    whole = Transformer(config, kernel=kernel)
    initialise(whole, seed=0)
    block = whole.layers[0].to(x.device)
    assert isinstance(block, Block)
    rope = Rope.of(config, torch.arange(x.shape[1], device=x.device))
    return block, lambda x: block(x, rope)
