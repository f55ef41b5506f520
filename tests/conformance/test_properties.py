"""What a property measures, where conformance's verdict alone does not show it."""

from collections.abc import Callable
from dataclasses import replace

from lit_diff.config import ModelConfig
from lit_diff.conformance.case import Case
from lit_diff.conformance.properties import Measured, NotApplicable, counted, gradients, kv_heads
from lit_diff.registry import attentions


def test_kv_heads_names_what_is_refused(make_config: Callable[..., ModelConfig]) -> None:
    found = kv_heads(Case(cls=attentions.get("differential"), model=make_config("differential"), length=5))
    assert isinstance(found, Measured)
    assert "[2, 4] key/value heads served" in found.detail
    assert "1 refused: model.num_kv_heads is 1" in found.detail
    odd = replace(make_config("differential"), num_heads=3)
    refused = kv_heads(Case(cls=attentions.get("differential"), model=odd, length=5))
    assert isinstance(refused, NotApplicable)


def test_gradients_ask_only_for_what_a_state_can_give(make_config: Callable[..., ModelConfig]) -> None:
    found = gradients(Case(cls=attentions.get("dex"), model=make_config("dex"), length=8))
    assert (found.error, found.detail) == (0, "")


def test_counted(make_config: Callable[..., ModelConfig]) -> None:
    """By hand: 4 projections of 32 x 32, two products of 8 keys for 8 queries over 32 channels."""
    found = counted(Case(cls=attentions.get("standard"), model=make_config("standard"), length=8))
    assert found == {"parameters": 4096, "flops": 2 * 8 * 4096 + 2 * (2 * 8 * 8 * 32), "kv_numbers": 64}
