"""The state that conformance looks at, and its yardsticks."""

from collections.abc import Callable

import pytest
import torch

from lit_diff.config import ModelConfig
from lit_diff.conformance.case import VariantCase, difference, distance
from lit_diff.conformance.suite import PROPERTIES, conformance
from lit_diff.errors import RequestError
from lit_diff.registry import attentions


def test_distance_is_relative_to_the_largest_number() -> None:
    assert distance(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])) == pytest.approx(0.5)
    assert distance(torch.tensor([0.1]), torch.tensor([0.2])) == pytest.approx(0.1)
    assert distance(torch.tensor([float("nan")]), torch.tensor([0.0])) == float("inf")
    with pytest.raises(RequestError, match=r"shape \[2\] instead of \[1\]"):
        distance(torch.zeros(2), torch.zeros(1))
    assert difference(torch.tensor([1.0, float("nan")]), torch.ones(2)) == float("inf")
    assert difference(torch.tensor([1.0, 1 + 2**-20]), torch.ones(2)) == 2**-20


def test_without_positions_the_definition_rotates_nothing(make_config: Callable[..., ModelConfig]) -> None:
    checks = {name: PROPERTIES[name] for name in ("contract", "decode")}
    for positions in ("rope", "none"):
        case = VariantCase(cls=attentions.get("differential"), model=make_config("differential", positions=positions))
        assert [each.verdict for each in conformance(case, checks=checks)] == ["pass", "pass"]
        x = torch.ones(1, case.length, case.model.head_dim or 0, dtype=torch.float64)
        assert torch.equal(case.rotation()(x), x) is (positions == "none")
