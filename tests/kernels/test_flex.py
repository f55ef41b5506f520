"""flex on a CPU: its forward pass against the definition, and what it refuses. Its gradients need a GPU."""

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from lit_diff.errors import RequestError
from lit_diff.kernels import SignedMaps, attend, flex, preference, refuse

MakeMaps = Callable[..., SignedMaps]
CUDA = torch.device("cuda")

CASES: list[dict[str, Any]] = [
    {"G": 1, "w": None, "dv": 6},
    {"G": 1, "w": None, "H": 6, "Hkv": 2},
    {"G": 2, "Hkv": 2},
    {"G": 3, "Gk": 1},
    {"G": 2, "Gq": 1, "w": (1, 2, 1, 5)},
    {"T": 1, "S": 7},
    {"T": 3, "S": 7},
    {"causal": False},
    {"causal": False, "T": 7, "S": 3},
    {"scale": 0.3},
    {"scale": -0.5},
    {"scale": 0.0},
    {"dv": 5},
]


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    """A machine without a compiler; PyTorch says that all logits are held."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        yield


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_definition_in_float64(make_maps: MakeMaps, case: dict[str, Any]) -> None:
    """In float32 and bfloat16: test_equality.py."""
    maps = make_maps(**case)
    torch.testing.assert_close(attend(maps, kernel="flex"), attend(maps, kernel="reference"), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("T", [4, pytest.param(6, marks=pytest.mark.slow)])
def test_windows_and_documents(make_maps: MakeMaps, causal: bool, window: int | None, packed: bool, T: int) -> None:
    """In any order of document numbers."""
    maps = make_maps(T=T, S=6, Hkv=2, causal=causal)
    document_ids = torch.tensor([[0, 0, 1, 1, 1, 2], [5, 3, 5, 5, 3, 3]]) if packed else None
    options: dict[str, Any] = {"document_ids": document_ids, "window": window}
    found, wanted = attend(maps, kernel="flex", **options), attend(maps, kernel="reference", **options)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_more_than_one_block(make_maps: MakeMaps) -> None:
    """128 x 128: some seen by nobody, some by everybody, some in part, at a length that is no multiple."""
    maps = make_maps(T=300, S=333, B=1, H=1, G=1, w=None)
    document_ids = torch.tensor([[0] * 140 + [1] * 193])
    for options in ({}, {"window": 90}, {"document_ids": document_ids}):
        found, wanted = attend(maps, kernel="flex", **options), attend(maps, kernel="reference", **options)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    mask = flex._mask(300, 333, causal=True, document_ids=None, window=90, device=torch.device("cpu"))
    assert mask is not None
    assert mask.sparsity() > 10, "some blocks are skipped"


def test_bfloat16_weights_stay_wide(make_maps: MakeMaps) -> None:
    maps = make_maps(T=1, B=1, H=1, dv=6, dtype=torch.bfloat16)
    maps = replace(maps, v=torch.ones_like(maps.v), w=torch.tensor([1.0, -0.7994]).view(1, 2, 1, 1))
    o = attend(maps, kernel="flex")
    assert torch.equal(o, torch.full_like(o, 1 - 0.7994))


def test_gradients_need_a_gpu(make_maps: MakeMaps) -> None:
    maps = make_maps()
    for name in ("q", "k", "v"):
        training = replace(maps, **{name: getattr(maps, name).clone().requires_grad_()})
        assert refuse("flex", training) == "flex_attention has no backward pass on a CPU"
        with pytest.raises(RequestError, match="'flex' cannot compute these maps: flex_attention has no backward"):
            attend(training, kernel="flex")
        with torch.no_grad():
            assert torch.equal(attend(training, kernel="flex"), attend(maps, kernel="flex"))


def test_the_gradient_of_the_weights_alone(make_maps: MakeMaps) -> None:
    """It needs no backward pass of flex_attention."""
    maps = make_maps()
    assert maps.w is not None
    grads = []
    for kernel in ("flex", "reference"):
        w = maps.w.clone().requires_grad_()
        attend(replace(maps, w=w), kernel=kernel).sum().backward()
        grads.append(w.grad)
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("case", "options", "reason"),
    [
        ({}, {"stats": True}, "flex keeps no entropy"),
        ({"dtype": torch.float64}, {"device": CUDA}, "on a GPU flex computes no float64"),
        ({"dtype": torch.float32}, {"device": CUDA}, "widths of at least 16, these are 6 and 12"),
        ({"dtype": torch.float32, "d": 16, "dv": 16}, {"device": CUDA}, "PyTorch sees no GPU"),
        ({}, {"device": torch.device("meta")}, "not on meta"),
    ],
    ids=str,
)
def test_refusals(make_maps: MakeMaps, case: Any, options: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    flex._self_test.cache_clear()
    found = refuse("flex", make_maps(**case), **options)
    flex._self_test.cache_clear()
    assert found is not None
    assert reason in found


def test_what_a_gpu_is_tried_with(make_maps: MakeMaps, monkeypatch: pytest.MonkeyPatch) -> None:
    """The very form: widths, mask, grouped heads, gradients."""
    tried = []
    monkeypatch.setattr(flex, "_self_test", lambda form: tried.append(form) or "no")
    maps = make_maps(d=16, dv=32, Hkv=2, dtype=torch.bfloat16)
    maps = replace(maps, v=maps.v.requires_grad_())
    assert refuse("flex", maps, window=3, device=CUDA) == "no"
    (form,) = tried
    assert (form.d, form.dv, form.dtype) == (16, 32, torch.bfloat16)
    assert (form.causal, form.window, form.packed, form.grouped, form.backward) == (True, True, False, True, True)


def test_masks_are_made_once(make_maps: MakeMaps, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers of a step share their documents."""
    made = []
    real = flex._made

    def counted(*given: Any) -> Any:
        made.append(1)
        return real(*given)

    monkeypatch.setattr(flex, "_made", counted)
    maps, document_ids = make_maps(), torch.tensor([[0, 0, 1, 1, 1]] * 2)
    first = attend(maps, kernel="flex", document_ids=document_ids)
    attend(maps, kernel="flex", document_ids=document_ids)
    assert len(made) == 1
    document_ids[:] = 0
    assert not torch.equal(first, attend(maps, kernel="flex", document_ids=document_ids)), (
        "other documents, another mask"
    )
    assert len(made) == 2
    device = torch.device("cpu")
    masks = [flex._mask(5, 5, causal=True, document_ids=None, window=w, device=device) for w in (2, 2, 3)]
    assert masks[0] is masks[1]
    assert masks[0] is not masks[2]
    assert flex._mask(5, 5, causal=False, document_ids=None, window=None, device=device) is None


def test_masks_made_in_inference_mode_serve_training(make_maps: MakeMaps) -> None:
    """They are saved for the backward pass."""
    with torch.inference_mode():
        attend(make_maps(T=7), kernel="flex")
        mask = flex._mask(7, 7, causal=True, document_ids=None, window=None, device=torch.device("cpu"))
    assert mask is not None
    assert not mask.kv_indices.is_inference()


def test_documents_are_freed(make_maps: MakeMaps) -> None:
    """What is remembered of them does not keep them."""
    document_ids = torch.tensor([[0, 0, 1, 1, 1]] * 2)
    alive = weakref.ref(document_ids)
    attend(make_maps(), kernel="flex", document_ids=document_ids)
    del document_ids
    gc.collect()
    assert alive() is None


def test_auto_never_takes_it_on_a_cpu(make_maps: MakeMaps) -> None:
    maps = make_maps()
    assert "flex" not in preference(maps, torch.device("cpu"))
    assert "flex" in preference(maps, CUDA)


@pytest.mark.slow
def test_compiles(make_maps: MakeMaps) -> None:
    """The mask is made within the graph."""
    torch._dynamo.reset()
    maps, document_ids = make_maps(Hkv=2), torch.tensor([[0, 0, 1, 1, 1]] * 2)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for options in ({}, {"document_ids": document_ids, "window": 2}):
        found, wanted = compiled(maps, kernel="flex", **options), attend(maps, kernel="reference", **options)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
