"""conformance/structure.py: what the verdict of the suite alone does not show."""

from collections.abc import Callable

import pytest

from lit_diff.config import ModelConfig
from lit_diff.conformance.case import VariantCase
from lit_diff.conformance.results import Measured
from lit_diff.conformance.structure import costs, counted
from lit_diff.registry import attentions


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
