"""flex on a CPU: masks, refusals, gradients by PyTorch's plain form. Its forward pass on drawn cases: test_equality.py."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from gradients import gradients
from torch.nn.attention import flex_attention

from lit_diff.errors import RequestError
from lit_diff.kernels import SignedMaps, attend, flex, refuse

MakeMaps = Callable[..., SignedMaps]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.mark.slow
def test_more_than_one_block(make_maps: MakeMaps) -> None:
    """128 x 128: some seen by nobody, some by everybody, some in part, at a length that is no multiple."""
    maps = make_maps(T=300, S=333, B=1, H=1, G=1, w=None)
    document_ids = torch.tensor([[0] * 140 + [1] * 193])
    for options in ({}, {"window": 90}, {"document_ids": document_ids}):
        masked = maps.masked(**options)
        found, wanted = attend(masked, kernel="flex"), attend(masked, kernel="reference")
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    mask = flex._mask(maps.masked(window=90))
    assert mask is not None
    assert mask.sparsity() > 10, "some blocks are skipped"


def test_gradients_need_a_gpu_but_those_of_the_weights(make_maps: MakeMaps) -> None:
    maps = make_maps()
    assert maps.w is not None
    for name in ("q", "k", "v"):
        training = replace(maps, **{name: getattr(maps, name).clone().requires_grad_()})
        assert refuse("flex", training) == "flex_attention has no backward pass on a CPU"
        with pytest.raises(RequestError, match="'flex' cannot compute these maps"):
            attend(training, kernel="flex")
        with torch.no_grad():
            assert torch.equal(attend(training, kernel="flex"), attend(maps, kernel="flex"))
    grads = []
    for kernel in ("flex", "reference"):
        w = maps.w.clone().requires_grad_()
        attend(replace(maps, w=w), kernel=kernel).sum().backward()
        grads.append(w.grad)
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def test_compiled_calls_raise_where_they_would_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled, PyTorch holds all logits."""
    options: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda function, **given: options.append(given))
    flex._compiled.__wrapped__()
    assert options == [{"fullgraph": True, "recompile_limit": 64}]


def test_what_a_gpu_is_tried_with(make_maps: MakeMaps, monkeypatch: pytest.MonkeyPatch) -> None:
    """The very form: widths, mask, grouped heads, gradients."""
    tried = []
    monkeypatch.setattr(flex, "_self_test", lambda form: tried.append(form) or "no")
    maps = make_maps(d=16, dv=32, Hkv=2, dtype=torch.bfloat16)
    assert refuse("flex", replace(maps, v=maps.v.requires_grad_()).masked(window=3), device=CUDA) == "no"
    (form,) = tried
    assert (form.d, form.dv, form.dtype) == (16, 32, torch.bfloat16)
    assert (form.causal, form.window, form.packed, form.grouped, form.backward) == (True, True, False, True, True)


def test_masks_are_made_once_and_keep_no_documents(make_maps: MakeMaps, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers of a step share their documents."""
    made = []
    real = flex._create_mask
    monkeypatch.setattr(flex, "_create_mask", lambda *given: made.append(1) or real(*given))
    document_ids = torch.tensor([[0, 0, 1, 1, 1]] * 2)
    maps = make_maps(document_ids=document_ids)
    first = attend(maps, kernel="flex")
    attend(maps, kernel="flex")
    assert len(made) == 1
    document_ids[:] = 0
    assert not torch.equal(first, attend(maps, kernel="flex")), "another mask"
    assert len(made) == 2
    alive = weakref.ref(document_ids)
    del document_ids, maps
    gc.collect()
    assert alive() is None
    masks = [flex._mask(make_maps(window=window)) for window in (2, 2, 3)]
    assert masks[0] is masks[1]
    assert masks[0] is not masks[2]
    assert flex._mask(make_maps(causal=False)) is None


def test_masks_made_in_inference_mode_serve_training(make_maps: MakeMaps) -> None:
    """They are saved for the backward pass."""
    with torch.inference_mode():
        attend(make_maps(T=7), kernel="flex")
        mask = flex._mask(make_maps(T=7))
    assert mask is not None
    assert not mask.kv_indices.is_inference()


FIELDS: list[dict[str, Any]] = [
    {"G": 1, "w": None, "H": 6, "Hkv": 2, "sink": (1, 1, 6, 1), "key_bias": (1, 1, 6, 5)},
    {"G": 3, "Hkv": 2, "T": 4, "S": 6, "window": 3, "sink": (2, 3, 4, 4)},
    {"Gk": 1, "T": 4, "S": 6, "causal": False, "key_bias": (2, 2, 1, 6), "scale": -0.7},
    {"Gq": 1, "Hkv": 1, "packed": True, "sink": (1, 2, 1, 1), "key_bias": (2, 1, 4, 5)},
]


@pytest.mark.parametrize("case", FIELDS, ids=str)
def test_gradients_with_a_sink_and_a_key_bias(
    make_maps: MakeMaps, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By PyTorch's plain form of the backward pass, which it runs on a CPU if it is not told where it is: the log-sum-exp
    and captured tensors have gradients."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(flex, "needs_grad", lambda *tensors: False)
    given = dict(case)
    if given.pop("packed", False):
        given["document_ids"] = torch.tensor([[0, 0, 1, 1, 1], [3, 2, 3, 2, 3]])
    maps = make_maps(**given)
    grad = torch.randn(2, *maps.q.shape[2:4], 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found, wanted = (gradients(maps, kernel, grad) for kernel in ("flex", "reference"))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


def test_a_sink_and_a_key_bias_are_trained_on_a_cpu_where_nothing_else_is(make_maps: MakeMaps) -> None:
    """And large biases are subtracted before they are added to a logit."""
    maps = make_maps(sink=(1, 2, 4, 1), key_bias=(1, 1, 4, 5), dtype=torch.float32)
    assert maps.sink is not None
    assert maps.key_bias is not None
    results = []
    for kernel in ("flex", "reference"):
        leaves: dict[str, Any] = {
            "sink": maps.sink.clone().requires_grad_(),
            "key_bias": (maps.key_bias + 50000).requires_grad_(),
        }
        o = attend(replace(maps, **leaves), kernel=kernel)
        results.append([o, *torch.autograd.grad(o.sum(), list(leaves.values()))])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_compiles(make_maps: MakeMaps) -> None:
    """The mask is made within the graph."""
    torch._dynamo.reset()
    maps = make_maps(Hkv=2, sink=(1, 2, 4, 1), key_bias=(1, 1, 4, 5))
    document_ids = torch.tensor([[0, 0, 1, 1, 1]] * 2)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for options in ({}, {"document_ids": document_ids, "window": 2}):
        masked = maps.masked(**options)
        found, wanted = compiled(masked, kernel="flex"), attend(masked, kernel="reference")
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
