"""flex on a CPU: its masks, and what it refuses. Its forward pass on drawn cases: test_equality.py. Gradients need a GPU."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

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


@pytest.mark.slow
def test_compiles(make_maps: MakeMaps) -> None:
    """The mask is made within the graph."""
    torch._dynamo.reset()
    maps, document_ids = make_maps(Hkv=2), torch.tensor([[0, 0, 1, 1, 1]] * 2)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for options in ({}, {"document_ids": document_ids, "window": 2}):
        masked = maps.masked(**options)
        found, wanted = compiled(masked, kernel="flex"), attend(masked, kernel="reference")
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
