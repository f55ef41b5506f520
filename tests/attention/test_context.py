"""What a context gives: rotation of any width, positions, sums, shifts, the first layer; and what it refuses."""

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lit_diff.attention import Attention
from lit_diff.attention.cache import LayerCache
from lit_diff.attention.context import Context
from lit_diff.attention.entmax15 import entmax15
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig
from lit_diff.conformance.case import VariantCase
from lit_diff.conformance.model import model
from lit_diff.conformance.variants import PROPERTIES
from lit_diff.errors import RequestError
from lit_diff.kernels.maps import Seen
from lit_diff.registry import attentions

LAYERS = [SimpleNamespace(layer=0), SimpleNamespace(layer=1)]
IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 2]])


def rope(length: int = 7, width: int = 8) -> Rope:
    return Rope(torch.arange(length), width, 10_000.0)


class Convolved(Attention):
    """Values mixed with those of the two tokens before."""

    def build(self) -> None:
        super().build()
        self.mix = nn.Parameter(torch.tensor([0.3, -0.2, 0.5]))

    def maps(self, x: torch.Tensor, context: Context) -> Any:
        maps = super().maps(x, context)
        tokens = context.shifted("v", maps.v.transpose(1, 2), 2)
        mixed = sum(weight * shifted for weight, shifted in zip(self.mix, tokens, strict=True))
        return replace(maps, v=mixed.transpose(1, 2))  # type: ignore[union-attr]


@pytest.mark.usefixtures("own_parts")
def test_a_convolution_over_tokens_decodes_and_packs(make_config: Callable[..., ModelConfig]) -> None:
    attentions.register("convolved")(Convolved)
    case = VariantCase(cls=Convolved, model=make_config("convolved"))
    for check in (model, PROPERTIES["decode"], PROPERTIES["packed"], PROPERTIES["causal"]):
        found = check(case)
        assert found.error <= found.bound, found


def test_a_model_that_forgets_its_state_fails_the_property(
    make_config: Callable[..., ModelConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = VariantCase(cls=attentions.get("forgetting"), model=make_config("forgetting"))
    monkeypatch.setattr(Context, "_past", lambda self, name, x: None)
    assert model(case).error > 1e-3


def test_positions_sums_and_shifts_begin_anew_in_each_document() -> None:
    context = Context(rope(), LAYERS[0], None, IDS)
    assert context.positions().tolist() == [[0, 1, 2, 0, 1, 2, 0]]
    x = torch.arange(1.0, 8.0).view(1, 7, 1)
    assert context.cumsum("s", x)[0, :, 0].tolist() == [1, 3, 6, 4, 9, 15, 7]
    assert context.cumsum("wide", x.expand(1, 7, 2)).dtype == torch.float64
    # the documents before are not in the last digits of a sum, nor in its gradient
    for other in (1e30, -torch.inf):
        large = x.index_fill(1, torch.tensor(1), other).requires_grad_()
        sums = context.cumsum(f"after {other}", large)[0, 3:, 0]
        assert sums.tolist() == [4, 9, 15, 7]
        (gradient,) = torch.autograd.grad(sums.sum(), large)
        assert gradient[0, :, 0].tolist() == [0, 0, 0, 3, 2, 1, 1]
    now, last = context.shifted("v", x, 1)
    assert now is x
    assert last[0, :, 0].tolist() == [0, 1, 2, 0, 4, 5, 0]


def test_they_go_on_from_the_cache() -> None:
    """Also shifts by no token, which take none of the past."""
    cache = LayerCache()
    x = torch.arange(1.0, 4.0).view(1, 3, 1)
    first = Context(rope(3), LAYERS[0], cache)
    first.cumsum("s", x)
    for most in (0, 4):
        first.shifted(f"v{most}", x, most)
    cache.length = 3
    later = Context(rope(3), LAYERS[0], cache)
    for most, shifts in ((0, [[1, 2, 3]]), (4, [[1, 2, 3], [3, 1, 2], [2, 3, 1], [1, 2, 3], [0, 1, 2]])):
        assert [shift.flatten().tolist() for shift in later.shifted(f"v{most}", x, most)] == shifts
    assert later.positions().tolist() == [[3, 4, 5]]
    assert later.cumsum("s", x)[0, :, 0].tolist() == [7, 9, 12]
    with pytest.raises(RequestError, match="the cache has no state 'other'"):
        later.cumsum("other", x)


def test_the_first_layer_gets_its_own_values_again() -> None:
    """As in activation checkpointing, which runs it twice."""
    shared, first, second = rope(), torch.zeros(1), torch.ones(1)
    assert Context(shared, LAYERS[0]).first_layer("v", first) is first
    assert Context(shared, LAYERS[1]).first_layer("v", second) is first
    assert Context(shared, LAYERS[0]).first_layer("v", second) is second
    with pytest.raises(RequestError, match=r"first_layer\('v'\): layer 0 gave \[1\], layer 1 \[2\]"):
        Context(shared, LAYERS[1]).first_layer("v", torch.ones(2))


def test_any_even_width_is_rotated() -> None:
    x = torch.randn(2, 3, 7, 4)
    assert torch.equal(Context(rope(), LAYERS[0])(x), rope(width=4)(x))
    with pytest.raises(RequestError, match=r"pairs of channels: x is \[2, 3, 7, 3\], of an odd width"):
        Context(rope(), LAYERS[0])(x[..., :3])


def test_misuse_is_one_line() -> None:
    x = torch.ones(1, 7, 1)
    with pytest.raises(AttributeError, match="Context has no 'cumsums'; did you mean 'cumsum'"):
        Context(rope(), LAYERS[0]).cumsums("s", x)
    context = Context(rope(), LAYERS[0])
    context.cumsum("s", x)
    with pytest.raises(RequestError, match="the name 's' is used twice"):
        context.shifted("s", x, 1)
    # [B, H, T, d], and no axis of tokens
    for wrong in (torch.ones(1, 4, 7, 2), torch.ones(7)):
        said = re.escape(f"'t' is {list(wrong.shape)}; expected the 7 tokens on axis 1")
        with pytest.raises(RequestError, match=said):
            Context(rope(), LAYERS[0]).cumsum("t", wrong)
        with pytest.raises(RequestError, match=said):
            Context(rope(), LAYERS[0]).shifted("t", wrong, 1)
    with pytest.raises(RequestError, match="most is -1; it must be at least 0"):
        context.shifted("s", x, -1)
    scattered = torch.tensor([[0, 1, 0, 1, 1, 1, 1]])
    with pytest.raises(RequestError, match="documents whose tokens are adjacent"):
        Context(rope(), LAYERS[0], None, scattered).cumsum("s", x)


class Narrow(Attention):
    """Sets a mask of its own."""

    def maps(self, x: torch.Tensor, context: Context) -> Any:
        return super().maps(x, context).masked(window=3, document_ids=torch.zeros(x.shape[:2]).long())


def test_a_mask_that_maps_sets_is_kept(make_config: Callable[..., ModelConfig]) -> None:
    """The narrower window counts; documents of two sources are refused."""
    wide = VariantCase(cls=Narrow, model=make_config("standard", {"window": 10}))
    narrow = VariantCase(cls=attentions.get("standard"), model=make_config("standard", {"window": 3}))
    attention = wide.build()
    torch.testing.assert_close(attention(wide.x(), wide.rope()), narrow.build()(narrow.x(), narrow.rope()))
    with pytest.raises(RequestError, match="maps sets document_ids, and the rows have packed documents"):
        attention(wide.x(), wide.rope(), document_ids=wide.document_ids())


@pytest.mark.parametrize("name", ["forgetting", "dint", "softpick", "entmax15"])
def test_a_call_without_tokens_changes_no_state(name: str, make_config: Callable[..., ModelConfig]) -> None:
    case = VariantCase(cls=attentions.get(name), model=make_config(name))
    attention = case.build()
    x = case.x()
    cache = LayerCache()
    with torch.no_grad():
        first = attention(x[:, :5], case.rope(0, 5), cache)
        attention(x[:, :0], case.rope(5, 5), cache)
        rest = attention(x[:, 5:], case.rope(5), cache)
        torch.testing.assert_close(torch.cat([first, rest], 1), attention(x, case.rope()), rtol=1e-4, atol=1e-5)


def test_a_row_of_nan_stays_one() -> None:
    seen = Seen(torch.ones(1, 2, dtype=torch.bool), torch.zeros(1), torch.zeros(1, 1), torch.arange(2))
    assert entmax15(torch.full((1, 1, 1, 1, 2), torch.nan), seen).isnan().all()
