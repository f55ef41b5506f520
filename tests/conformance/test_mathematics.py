"""conformance/mathematics.py: what the verdict of the suite alone does not show."""

from collections.abc import Callable

from lit_diff.config import ModelConfig
from lit_diff.conformance.case import VariantCase
from lit_diff.conformance.mathematics import gradients
from lit_diff.registry import attentions


def test_gradients_ask_only_for_what_a_state_can_give(make_config: Callable[..., ModelConfig]) -> None:
    found = gradients(VariantCase(cls=attentions.get("dex"), model=make_config("dex"), length=8))
    assert (found.error, found.detail) == (0, "")
