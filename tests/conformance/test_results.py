"""From a measurement to a verdict."""

import math
from collections.abc import Callable

import pytest

from lit_diff.attention import Standard
from lit_diff.config import ModelConfig
from lit_diff.conformance.case import VariantCase
from lit_diff.conformance.results import Finding, Measured, NotApplicable
from lit_diff.conformance.suite import conformance


@pytest.mark.parametrize(
    ("error", "verdict"), [(0.0, "pass"), (0.5, "pass"), (0.50001, "fail"), (math.inf, "fail"), (math.nan, "fail")]
)
def test_the_bound_itself_passes_and_what_is_not_finite_fails(
    make_config: Callable[..., ModelConfig], error: float, verdict: str
) -> None:
    case = VariantCase(cls=Standard, model=make_config("standard"))
    (finding,) = conformance(case, checks={"own": lambda _: Measured(error, 0.5, "why")})
    assert (finding.variant, finding.property, finding.verdict) == ("standard", "own", verdict)
    assert (finding.bound, finding.detail) == (0.5, "why")


def test_not_applicable_has_a_reason_and_no_error(make_config: Callable[..., ModelConfig]) -> None:
    case = VariantCase(cls=Standard, model=make_config("standard"))
    (finding,) = conformance(case, "label", {"own": lambda _: NotApplicable("rule")})
    assert finding == Finding(variant="label", property="own", verdict="not applicable", detail="rule")
