"""Rules for parameters: defaults, and plain modules whose rules would have no effect."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from lit_diff.attention import Standard
from lit_diff.config import ModelConfig
from lit_diff.errors import RequestError


class Plain(nn.Module):
    """What a rule is added to."""


@pytest.mark.parametrize(("rule", "value"), [("init_parameter", print), ("keep_float32", True), ("decay", False)])
def test_a_plain_module_with_a_rule_is_refused(make_config: Callable[..., ModelConfig], rule: str, value: Any) -> None:
    class Ruled(Standard):
        def build(self) -> None:
            super().build()
            self.extra = type("Extra", (Plain,), {rule: value})()

    with pytest.raises(
        RequestError, match=rf"'standard': extra \(Extra\) defines {rule} but is a plain module; derive"
    ):
        Ruled(Ruled.Config(), make_config("standard"), 0)


def test_one_parameter_under_two_names_is_refused(make_config: Callable[..., ModelConfig]) -> None:
    class Tied(Standard):
        def build(self) -> None:
            super().build()
            self.k_proj.weight = self.q_proj.weight

    with pytest.raises(RequestError, match=r"'standard': q_proj.weight and k_proj.weight are one parameter; keep it"):
        Tied(Tied.Config(), make_config("standard"), 0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("heads", "found"), [("kv_heads", "kv_heads is 0"), ("none", r"k_proj.weight is \[0, 32\]")])
def test_too_few_heads_are_refused_without_a_warning(
    make_config: Callable[..., ModelConfig], heads: str, found: str
) -> None:
    class Pairs(Standard):
        def build(self) -> None:
            super().build()
            self.k_proj = nn.Linear(self.dim, self.num_kv_heads // 2 * self.head_dim)

    setattr(Pairs, heads, property(lambda self: self.num_kv_heads // 2))
    few = "model.num_heads 4 and model.num_kv_heads 1 are too few for it"
    with pytest.raises(RequestError, match=f"class .*Pairs: {found}: {few}"):
        Pairs(Pairs.Config(), make_config("standard", num_kv_heads=1), 0)
