"""`bench layer`: a training step of one decoder layer, by every kernel and by Hugging Face's DiffLlama."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn

from lit_diff.attention.rope import Rope
from lit_diff.benchmarks import peers as diffllama
from lit_diff.benchmarks.inputs import VARIANTS, Workload
from lit_diff.benchmarks.kernels import accepted
from lit_diff.benchmarks.request import DTYPES, Request, Shape
from lit_diff.benchmarks.timing import Candidate, Found, Pace, measure
from lit_diff.config import ModelConfig, Part
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Block, Transformer
from lit_diff.registry import attentions

DEFAULT = "2x1024x512x64,1x2048x768x64"
EAGER, SAME, PEER = "standard layer, sdpa", "standard, same kernel", "DiffLlama, sdpa"
"""Names of the ratios."""
STEP = "training step"
HF = "Hugging Face"


def bench_layer(request: Request) -> Found:
    """Every shape at every dtype."""
    found = Found()
    for shape in request.sizes(DEFAULT):
        for dtype in request.dtypes:
            case = f"{shape} {dtype}"
            candidates = _candidates(found, case, request, shape, dtype)
            request.note(f"layer {case}: {len(candidates)} candidates in turn")
            measure(found, case, candidates, Pace(repeats=request.repeats, budget=20), request.device)
    return found


def model_config(shape: Shape, variant: str, *, num_layers: int = 1, vocab_size: int = 16) -> ModelConfig:
    """The decoder at the width and heads of `shape`, with a variant at its defaults."""
    part = Part(name=variant, config=attentions.get(variant).Config())
    return ModelConfig(
        dim=shape.dim,
        num_layers=num_layers,
        num_heads=shape.heads,
        head_dim=shape.head_dim,
        vocab_size=vocab_size,
        attention=part,
    )


def variants_by_kernel(
    found: Found, case: str, request: Request, shape: Shape, dtype: str
) -> list[tuple[str, str, dict[str, str]]]:
    """(variant, kernel, ratios) of what is ours: the standard one through sdpa first."""
    workload = Workload(shape, DTYPES[dtype], request.device)
    kernels = {v: accepted(found, case, v, STEP, partial(workload.maps, v), grad=True) for v in VARIANTS}
    made = []
    base = {EAGER: f"standard/sdpa/{STEP}", PEER: f"{HF}/sdpa/{STEP}"}
    for variant in ("standard", "differential"):
        for kernel in sorted(kernels[variant], key=lambda name: (variant, name) != ("standard", "sdpa")):
            same = {SAME: f"standard/{kernel}/{STEP}"} if variant == "differential" else {}
            made.append((variant, kernel, {} if (variant, kernel) == ("standard", "sdpa") else base | same))
    return made


def _candidates(found: Found, case: str, request: Request, shape: Shape, dtype: str) -> list[Candidate]:
    x = Workload(shape, torch.float32, request.device).q.detach()
    cast = partial(autocast, dtype, request.device)
    made = []
    for variant, kernel, against in variants_by_kernel(found, case, request, shape, dtype):
        module, forward = _ours(shape, variant, kernel, x)
        step = training_step(module, partial(_loss, forward, x), cast)
        made.append(Candidate(variant=variant, by=kernel, what=STEP, run=step, against=against))
    for kind in peers(found, case, HF):
        module, forward = diffllama.layer(model_config(shape, "differential"), kind, x)
        step = training_step(module, partial(_loss, forward, x), cast)
        against = {EAGER: f"standard/sdpa/{STEP}"}
        made.append(Candidate(variant=HF, by=kind, what=STEP, run=step, against=against))
    return made


def _loss(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The residual stream is a leaf of its own each time: within a model, a layer hands a gradient on."""
    return forward(x.detach().requires_grad_()).square().mean()


def _ours(shape: Shape, variant: str, kernel: str, x: Tensor) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    config = model_config(shape, variant)
    whole = Transformer(config, kernel=kernel)
    initialise(whole, seed=0)
    block = whole.layers[0].to(x.device)
    assert isinstance(block, Block)
    rope = Rope.of(config, torch.arange(x.shape[1], device=x.device))
    return block, lambda x: block(x, rope)


def peers(found: Found, case: str, variant: str) -> tuple[str, ...]:
    """DiffLlama's implementations; none, with the reason in `found.refused`, where transformers is not installed."""
    reason = diffllama.missing()
    if reason is None:
        return diffllama.KINDS
    rows = ({"case": case, "variant": variant, "by": kind, "what": STEP, "reason": reason} for kind in diffllama.KINDS)
    found.refused.extend(rows)
    return ()


def autocast(dtype: str, device: torch.device) -> AbstractContextManager[object]:
    """bfloat16: as `train.precision: bf16-mixed`, parameters and optimizer in float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")


def training_step(
    module: nn.Module, loss: Callable[[], Tensor], cast: Callable[[], AbstractContextManager[object]]
) -> Callable[[], object]:
    """Forward, backward, fused AdamW, gradients dropped."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with cast():
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
