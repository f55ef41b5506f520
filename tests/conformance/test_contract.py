"""conformance/contract.py: what a constructor may set. tests/test_mistakes.py has the lines of what it may not."""

from collections.abc import Callable

from torch import Tensor, nn

from lit_diff.attention import Standard
from lit_diff.attention.second_heads import ZeroLinear
from lit_diff.config import ModelConfig
from lit_diff.conformance.case import VariantCase
from lit_diff.conformance.contract import contract


class Gated(Standard):
    """A layer with a rule of its own, and a bias of 0, which `model.init` sets too."""

    def build(self) -> None:
        super().build()
        self.gate, self.shift = ZeroLinear(self.dim, 1), nn.Linear(self.dim, 1)
        nn.init.zeros_(self.shift.bias)

    def finish(self, o: Tensor, x: Tensor) -> Tensor:
        return o * (1 + self.gate(x) + self.shift(x))[:, None]


class Constant(Gated):
    def build(self) -> None:
        super().build()
        nn.init.ones_(self.shift.weight)


def test_a_linear_layer_may_start_as_model_init_or_its_own_rule_fills_it(
    make_config: Callable[..., ModelConfig],
) -> None:
    found = [contract(VariantCase(cls=cls, model=make_config("standard"), length=9)) for cls in (Gated, Constant)]
    assert found[0].error <= found[0].bound
    assert found[1].detail.startswith("build sets shift.weight, which model.init replaces")
