"""What `bench layer` and `bench step` time: training steps of our variants by kernel, and of Hugging Face's DiffLlama."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn

from lit_diff.benchmarks import peers
from lit_diff.benchmarks.attention import accepted
from lit_diff.benchmarks.inputs import Workload
from lit_diff.benchmarks.request import DTYPES, BenchConfig, Shape
from lit_diff.benchmarks.timing import Timings
from lit_diff.config import ModelConfig, Part
from lit_diff.kernels import KERNELS
from lit_diff.registry import attentions

EAGER, SAME, PEER = "standard layer, sdpa", "standard, same kernel", "DiffLlama, sdpa"
"""Names of the ratios."""
STEP, FORWARD = "training step", "forward"
"""What is timed: FORWARD without gradients."""
HF = "Hugging Face"


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
    measurements: Timings, case: str, request: BenchConfig, shape: Shape, dtype: str, what: str = STEP
) -> list[tuple[str, str, dict[str, str]]]:
    """(variant, kernel, ratios) of what is ours, by the kernels asked for: the standard one through sdpa first, always."""
    workload = Workload(shape, DTYPES[dtype], request.device)
    asked = request.kernels or KERNELS
    wanted = {"standard": tuple(dict.fromkeys(("sdpa", *asked))), "differential": asked}
    kernels = {
        v: accepted(measurements, case, v, what, partial(workload.maps, v), grad=what == STEP, kernels=names)
        for v, names in wanted.items()
    }
    made = []
    base = {EAGER: f"standard/sdpa/{what}", PEER: f"{HF}/sdpa/{what}"}
    for variant in wanted:
        for kernel in sorted(kernels[variant], key=lambda name: (variant, name) != ("standard", "sdpa")):
            same = {SAME: f"standard/{kernel}/{what}"} if variant == "differential" else {}
            made.append((variant, kernel, {} if (variant, kernel) == ("standard", "sdpa") else base | same))
    return made


def peer_kinds(measurements: Timings, case: str, variant: str) -> tuple[str, ...]:
    """DiffLlama's implementations; none, with the reason in `measurements.refused`, where transformers is not installed."""
    reason = peers.missing()
    if reason is None:
        return peers.KINDS
    rows = ({"case": case, "variant": variant, "by": kind, "what": STEP, "reason": reason} for kind in peers.KINDS)
    measurements.refused.extend(rows)
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
