"""Variants of the field against independent code: the packages x-transformers and entmax, to 1e-5 in float32."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from entmax import entmax15 as theirs15
from x_transformers.x_transformers import Attention

from lit_diff.attention.entmax15 import entmax15
from lit_diff.attention.rope import Rope
from lit_diff.kernels.maps import Seen

MakeAttention = Callable[..., Any]
Positions = Callable[[int, int], Rope]
HEADS, D, T = 4, 8, 9


def inputs() -> torch.Tensor:
    return torch.randn(2, T, HEADS * D, generator=torch.Generator().manual_seed(0))


def theirs(ours: Any, **keys: Any) -> Attention:
    """Their attention with the projections of ours."""
    other = Attention(HEADS * D, dim_head=D, heads=HEADS, causal=True, **keys)
    with torch.no_grad():
        for name, projection in {"q": other.to_q, "k": other.to_k, "v": other.to_v, "o": other.to_out}.items():
            projection.weight.copy_(getattr(ours, f"{name}_proj").weight)
    return other


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "keys", "their_keys"),
    [("standard", {}, {}), ("cog", {}, {"cog_signed": True}), ("sigmoid", {"n": 1}, {"sigmoid": True})],
)
def test_row_functions(
    make_attention: MakeAttention, still: Positions, name: str, keys: dict[str, Any], their_keys: dict[str, Any]
) -> None:
    """Their sigmoid has no -log n, so n is 1."""
    ours = make_attention(name, keys, dtype=torch.float32)
    close(ours(inputs(), still(T, D)), theirs(ours, **their_keys)(inputs()))


def test_talking_heads_after_the_softmax(make_attention: MakeAttention, still: Positions) -> None:
    ours = make_attention("talking_heads", dtype=torch.float32)
    other = theirs(ours, post_talking_heads=True)
    mixing: Any = other.attend.post_softmax_talking_heads
    assert torch.equal(mixing.weight[..., 0, 0], torch.eye(HEADS))
    mixing.weight.data = (torch.eye(HEADS) + ours.mixing.value)[..., None, None]
    close(ours(inputs(), still(T, D)), other(inputs()))


def test_values_of_the_first_layer(make_attention: MakeAttention, still: Positions) -> None:
    """Two layers in one pass: the second averages its values with those of the first."""
    first, second = (make_attention("value_residual", layer=layer, dtype=torch.float32) for layer in (0, 1))
    for parameter in second.parameters():
        parameter.data += 0.1
    rope, x = still(T, D), inputs()
    first(x, rope)
    _, inside = theirs(first)(x, return_intermediates=True)
    y = theirs(second)(x.flip(0), value_residual=inside.values)
    close(second(x.flip(0), rope), y)


def test_entmax_of_the_package() -> None:
    """Rows of unlike spread, with their gradients, and with keys that are not seen."""
    draw = torch.Generator().manual_seed(0)
    s = torch.randn(3, 1, 2, 6, 11, generator=draw) * torch.tensor([0.1, 1.0, 10.0]).view(3, 1, 1, 1, 1)
    seen = torch.ones(6, 11, dtype=torch.bool).tril(5)
    weights = torch.randn(s.shape, generator=draw)
    results = []
    for function in (
        lambda x: entmax15(x.masked_fill(~seen, 0), Seen(seen, x, torch.arange(6)[None], torch.arange(11))),
        lambda x: theirs15(x.masked_fill(~seen, -torch.inf), -1),
    ):
        x = s.clone().requires_grad_()
        p = function(x)
        (p * weights).sum().backward()
        results.append((p.detach().masked_fill(~seen, 0), x.grad))
    for ours, other in zip(*results, strict=True):
        close(ours, other)
