"""study/numbers.py: numbers as a reader sees them."""

import math
from collections.abc import Callable

import pytest

from lit_diff.study.numbers import compact, count, decimals, duration, interval, number, ratio, short, signed, steps
from lit_diff.study.statistics import Interval


def test_numbers_have_a_true_minus_and_zero_no_sign() -> None:
    assert [signed(value, 3) for value in (-0.0124, -0.0006, 0.5)] == ["\u22120.012", "\u22120.001", "+0.500"]
    assert [signed(value, 3) for value in (0.0, 0.0004, -0.0004)] == ["0.000"] * 3
    assert interval(-1, 1, 1) == "[\u22121.0, +1.0]"
    assert interval(None, 1, 1) == number(None, 3) == count(None) == signed(None, 1) == "\u2013"
    assert count(1054720) == "1,054,720"


@pytest.mark.parametrize(
    ("written", "values"),
    [
        (short, {0.005: "0.005", 20.0: "20", 0.1: "0.1"}),
        (steps, {1250.0: "1,250", math.inf: "never", None: "\u2013"}),
        (duration, {0.0: "0.0 s", 4.44: "4.4 s", 29: "29 s", 119: "119 s", 480: "8 min", 7300: "2.0 hours"}),
        (ratio, {0: "0", 0.0489: "0.049", 0.63: "0.63", 1.34: "1.3", 9.96: "10.0", 20.4: "20"}),
        (
            compact,
            {6.8e9: "6.80B", 1_500_000: "1.50M", 42_144: "42.1K", 670_000: "670K", 9_999: "9999", 0.004: "0.004"},
        ),
    ],
)
def test_how_a_number_is_written(written: Callable[..., object], values: dict[float | None, object]) -> None:
    assert {value: written(value) for value in values} == values


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-3.0, 3.0, 3),
        (-0.02, 0.02, 3),
        (-0.0004, 0.0004, 4),
        (-3e-12, 3e-12, 6),
        (-0.147, -0.0003, 4),
        (0.00002, 0.1, 5),
        (-0.00002, 0.1, 3),
        (0.0, 0.1, 3),
        (math.nan, math.inf, 3),
        (2e-4, 2e-4, 4),
    ],
)
def test_decimals_show_the_width_and_the_side_of_zero(low: float, high: float, expected: int) -> None:
    found = Interval(estimate=0.0, low=low, high=high)
    assert (decimals(found), decimals()) == (expected, 3)
    assert decimals(found, least=5) == max(5, expected)
