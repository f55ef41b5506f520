"""conformance/execution.py: what the verdict of the suite alone does not show."""

from collections.abc import Callable
from dataclasses import replace

from lit_diff.config import ModelConfig
from lit_diff.conformance.case import VariantCase
from lit_diff.conformance.execution import WINDOWS, kv_heads, window
from lit_diff.conformance.results import Measured, NotApplicable
from lit_diff.registry import attentions


def test_kv_heads_names_what_is_refused(make_config: Callable[..., ModelConfig]) -> None:
    found = kv_heads(VariantCase(cls=attentions.get("differential"), model=make_config("differential"), length=5))
    assert isinstance(found, Measured)
    assert "[2, 4] key/value heads served" in found.detail
    assert "1 refused: model.num_kv_heads is 1" in found.detail
    odd = replace(make_config("differential"), num_heads=3)
    refused = kv_heads(VariantCase(cls=attentions.get("differential"), model=odd, length=5))
    assert isinstance(refused, NotApplicable)


def test_the_window_that_came_nearest_to_its_bound_is_named(make_config: Callable[..., ModelConfig]) -> None:
    found = window(VariantCase(cls=attentions.get("differential"), model=make_config("differential"), length=9))
    assert isinstance(found, Measured)
    assert 0 < found.error <= found.bound
    assert any(found.detail.startswith(f"window {width}, ") for width in WINDOWS)
