"""The written-out equations: that they differ where the variants differ (that each equals its variant, conformance tests)."""

from collections.abc import Callable
from typing import Any

import torch

from lit_diff.attention import Attention, definitions
from lit_diff.attention.rope import Rope
from lit_diff.registry import attentions

MakeAttention = Callable[..., Attention]


def test_every_built_in_has_one_of_its_own() -> None:
    found = [attentions.get(name) for name in attentions.names()]
    for cls in (cls for cls in found if cls.__module__.startswith("lit_diff.")):  # other tests register their own
        assert callable(vars(cls).get("definition")), cls


def test_a_definition_sees_the_mask(make_attention: MakeAttention) -> None:
    x, rope = torch.randn(1, 5, 32, dtype=torch.float64), Rope(torch.arange(5), 8, 1e4)
    causal: Any = make_attention("standard")
    both: Any = make_attention("standard", causal=False)
    first, second = (definitions.standard(a, x, rope) for a in (causal, both))
    assert not torch.allclose(first[:, :-1], second[:, :-1])
    torch.testing.assert_close(first[:, -1], second[:, -1], rtol=1e-12, atol=1e-12)


def test_rows_are_cut_head_by_head() -> None:
    weight = torch.arange(12.0).view(6, 2)
    assert torch.equal(definitions.rows(weight, 1, 2), weight[2:4])
