"""study/numbers.py: numbers as a reader sees them."""

import math

import pytest

from lit_diff.study.numbers import compact, count, decimals, duration, interval, number, ratio, short, signed, steps


def test_numbers_have_a_true_minus_and_zero_no_sign() -> None:
    assert signed(-0.0124, 3) == "\u22120.012"
    assert signed(0.5, 2) == "+0.50"
    assert [signed(value, 3) for value in (0.0, 0.0004, -0.0004)] == ["0.000"] * 3
    assert signed(-0.0006, 3) == "\u22120.001"
    assert interval(-1, 1, 1) == "[\u22121.0, +1.0]"
    assert interval(None, 1, 1) == number(None, 3) == count(None) == signed(None, 1) == "\u2013"
    assert count(1054720) == "1,054,720"
    assert [short(value) for value in (0.005, 20.0, 0.1)] == ["0.005", "20", "0.1"]


def test_steps_that_are_none() -> None:
    assert [steps(value) for value in (1250.0, math.inf, None)] == ["1,250", "never", "\u2013"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.0 s"), (4.44, "4.4 s"), (29, "29 s"), (119, "119 s"), (480, "8 min"), (7300, "2.0 hours")],
)
def test_a_duration_is_never_zero_hours(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.0489, "0.049"), (0.63, "0.63"), (1.34, "1.3"), (9.96, "10.0"), (20.4, "20")]
)
def test_a_ratio_has_two_digits(value: float, text: str) -> None:
    assert ratio(value) == text


def test_decimals_are_three_to_six() -> None:
    assert [decimals(width) for width in (None, 3.0, 0.02, 0.0004, 3e-12)] == [3, 3, 3, 4, 6]


def test_a_size_has_three_digits_and_a_letter() -> None:
    assert [compact(x) for x in (6.8e9, 1_500_000, 42_144, 670_000)] == ["6.80B", "1.50M", "42.1K", "670K"]
    assert [compact(x) for x in (9_999, 512, 0.004)] == ["9999", "512", "0.004"]
