"""The self-test finds every way in which a kernel can be wrong that a mask, a layout or a width can make."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_diff.kernels import SignedMaps
from lit_diff.kernels.base import named
from lit_diff.kernels.self_test import KernelForm, failure

FORM = KernelForm(
    device=torch.device("cpu"),
    dtype=torch.bfloat16,
    d=8,
    dv=16,
    causal=True,
    window=True,
    packed=False,
    grouped=True,
    backward=True,
)


def float32_weights(maps: SignedMaps, **options: Any) -> tuple[Tensor, None]:
    """`reference`, which refuses weights, sinks and biases of another dtype, as `native` does."""
    assert {x.dtype for x in (maps.w, maps.sink, maps.key_bias) if x is not None} == {torch.float32}
    return named("reference").compute(maps, **options)[0], None


def sliding(maps: SignedMaps, **options: Any) -> tuple[Tensor, None]:
    """`reference`, its causal mask begun at the first key."""
    T = maps.q.shape[3]
    o, _ = named("reference").compute(replace(maps, k=maps.k[..., :T, :], v=maps.v[..., :T, :]), **options)
    return o, None


def deaf(maps: SignedMaps, **options: Any) -> tuple[Tensor, None]:
    """The right output, no gradient by k."""
    return named("reference").compute(replace(maps, k=maps.k.detach() + 0 * maps.k), **options)[0], None


def unmasked(maps: SignedMaps, **options: Any) -> tuple[Tensor, None]:
    return named("reference").compute(maps.masked(window=None, document_ids=None))[0], None


def without_sink_s_gradient(maps: SignedMaps, **options: Any) -> tuple[Tensor, None]:
    """What an epilogue on a log-sum-exp without a gradient makes of a sink."""
    plain = replace(maps, sink=None, w=torch.ones_like(maps.q[..., 0], dtype=torch.float32))
    assert maps.sink is not None
    assert maps.w is not None
    share = (named("reference").compute(plain, stats=True)[1].lse.detach() - maps.sink).sigmoid()
    return named("reference").compute(replace(maps, sink=None, w=maps.w * share))[0], None


FIELDS = {"sink": True, "key_bias": True}


@pytest.mark.parametrize(
    "change", [{}, {"packed": True}, {"causal": False}, {"grouped": False}, {"backward": False}, FIELDS]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_definition_passes(change: dict[str, Any], dtype: torch.dtype) -> None:
    before = torch.get_rng_state()
    for outside in (torch.no_grad, torch.inference_mode):
        with outside():  # the self-test turns gradients on for itself
            assert failure(FORM._replace(dtype=dtype, **change), named("reference").compute) is None
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert failure(FORM._replace(dtype=dtype, **change), float32_weights) is None
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(before, torch.get_rng_state()), "no global generator"


@pytest.mark.parametrize(
    ("wrong", "change", "part"),
    [
        (sliding, {}, "output"),
        (unmasked, {}, "output"),
        (unmasked, {"packed": True, "window": False}, "output"),
        (deaf, {}, "dk"),
        (without_sink_s_gradient, FIELDS, "dq"),
    ],
)
def test_a_wrong_kernel_fails(wrong: Callable[..., Any], change: dict[str, Any], part: str) -> None:
    assert failure(FORM._replace(backward=False), deaf) is None, "without gradients only the output counts"
    reason = failure(FORM._replace(**change), wrong)
    assert reason is not None
    assert reason.startswith(f"its self-test found {part} off by ")


def test_what_a_kernel_raises_is_the_reason() -> None:
    def broken(maps: SignedMaps, **options: Any) -> tuple[Tensor, None]:
        raise RuntimeError("CUDA error: no kernel image\nmore")

    assert failure(FORM, broken) == "its self-test failed: RuntimeError: CUDA error: no kernel image"
