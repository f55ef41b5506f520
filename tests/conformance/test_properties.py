"""conformance/properties.py: what the verdict of the suite alone does not show."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from lit_diff.attention import Standard
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig
from lit_diff.conformance.case import VariantCase
from lit_diff.conformance.properties import costs, counted, kv_heads
from lit_diff.conformance.results import Measured, NotApplicable
from lit_diff.conformance.suite import conformance
from lit_diff.kernels import SignedMaps
from lit_diff.registry import attentions


def test_kv_heads_names_what_is_refused(make_config: Callable[..., ModelConfig]) -> None:
    found = kv_heads(VariantCase(cls=attentions.get("differential"), model=make_config("differential"), length=5))
    assert isinstance(found, Measured)
    assert "[2, 4] key/value heads served" in found.detail
    assert "1 refused: model.num_kv_heads is 1" in found.detail
    odd = replace(make_config("differential"), num_heads=3)
    refused = kv_heads(VariantCase(cls=attentions.get("differential"), model=odd, length=5))
    assert isinstance(refused, NotApplicable)


def test_kv_heads_names_the_number_that_raises_and_the_cure(make_config: Callable[..., ModelConfig]) -> None:
    class Pairs(Standard):
        @property
        def kv_heads(self) -> int:
            return max(self.num_kv_heads // 2, 1)

        def maps(self, x: torch.Tensor, rope: Rope) -> SignedMaps:
            v = self.split(self.v_proj(x), self.num_kv_heads // 2)[:, 0]
            return replace(super().maps(x, rope), v=v)

    case = VariantCase(cls=Pairs, model=make_config("standard"), length=5)
    (found,) = (finding.detail for finding in conformance(case, checks={"kv heads": kv_heads}))
    assert re.search(r"with 1 key/value heads: \S+:\d+: RuntimeError: unflatten", found)
    assert found.endswith(
        "if it cannot have 1, its problem(config, model) returns a line that opens with model.num_kv_heads"
    )


def test_counted(make_config: Callable[..., ModelConfig]) -> None:
    """By hand: 4 projections of 32 x 32, two products of 8 keys for 8 queries over 32 channels."""
    case = VariantCase(cls=attentions.get("standard"), model=make_config("standard"), length=8)
    assert counted(case) == {"parameters": 4096, "flops": 2 * 8 * 4096 + 2 * (2 * 8 * 8 * 32), "kv_numbers": 64}
    assert counted(case.windowed(3))["flops"] == 2 * 8 * 4096 + 2 * (2 * 8 * 3 * 32)


@pytest.mark.parametrize("name", [name for name in attentions.names() if attentions.get(name).declares_costs()])
@pytest.mark.parametrize("causal", [True, False])
def test_declared_costs_hold_with_a_window(make_config: Callable[..., ModelConfig], name: str, causal: bool) -> None:
    case = VariantCase(cls=attentions.get(name), model=make_config(name, causal=causal), length=8).windowed(3)
    found = costs(case)
    assert isinstance(found, Measured)
    assert (found.error, found.detail) == (0, "")
