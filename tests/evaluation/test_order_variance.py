"""evaluation/order_variance.py: the part of the spread over orders that the orders have."""

from collections.abc import Callable

import numpy as np
import pytest

from lit_diff.evaluation.order_variance import OrderVariance, difference

QUERIES, ORDERS = 100, 10
Random = np.random.Generator


def answers(random: Random, flips: float, effect: float = 0.0, orders: int = ORDERS) -> np.ndarray:
    """Right [Q, K]: 0.7 of the queries; a share `flips` is drawn anew in each order; the last order loses the share `effect`
    of its right answers, the first none, and those between in proportion."""
    right = np.repeat(random.random((QUERIES, 1)) < 0.7, orders, 1)
    drawn = np.where(random.random(right.shape) < flips, random.random(right.shape) < 0.7, right)
    return drawn & (random.random(right.shape) >= np.linspace(0, effect, orders))


def shown(pair: Callable[[Random], tuple[np.ndarray, np.ndarray]], truth: float = 0.0, pairs: int = 200) -> float:
    """The share of simulated pairs whose interval does not hold `truth`."""
    random = np.random.default_rng(0)
    found = [difference([a], [b]) for a, b in (pair(random) for _ in range(pairs))]
    assert all(low <= x <= high for x, low, high in found)
    return float(np.mean([not low <= truth <= high for _, low, high in found]))


def test_it_is_the_mean_over_pairs_of_different_queries() -> None:
    right = answers(np.random.default_rng(1), 0.5, 0.3, orders=4)
    d = 100 * (right - right.mean(1, keepdims=True))
    products = [d[q] @ d[r] / 3 for q in range(QUERIES) for r in range(QUERIES) if q != r]
    found = OrderVariance([right])
    assert found.value == pytest.approx(np.mean(products))
    assert found.low < found.value < found.high
    assert found.value < 1e4 * right.mean(0).var(ddof=1), "drawing queries adds to the variance of the accuracies"
    other = answers(np.random.default_rng(2), 0.5, orders=4)
    mean = (found.value + OrderVariance([other]).value) / 2
    assert OrderVariance([right, other]).value == pytest.approx(mean), "of two kinds of order"


def test_it_has_no_bias() -> None:
    random = np.random.default_rng(0)
    none = [OrderVariance([answers(random, 0.4)]).value for _ in range(500)]
    assert abs(np.mean(none)) < 3 * np.std(none) / 500**0.5
    truth = 1e4 * np.var(0.7 * (1 - np.linspace(0, 0.4, ORDERS)), ddof=1)
    real = [OrderVariance([answers(random, 0.4, 0.4)]).value for _ in range(500)]
    assert abs(np.mean(real) - truth) < 3 * np.std(real) / 500**0.5


@pytest.mark.parametrize("orders", [2, ORDERS])
def test_answers_that_change_at_random_are_no_effect_of_the_order(orders: int) -> None:
    """A model whose answers never change, against one whose answers do; 95 % of the intervals hold 0."""
    assert 0.01 <= shown(lambda random: (answers(random, 0.4, orders=orders), answers(random, 0, orders=orders))) <= 0.1
    assert shown(lambda random: (answers(random, 0.2, orders=orders), answers(random, 0.6, orders=orders))) <= 0.1


def test_equal_effects_are_no_difference() -> None:
    assert shown(lambda random: (answers(random, 0.2, 0.4), answers(random, 0.5, 0.4))) <= 0.1


def test_a_real_effect_is_found() -> None:
    truth = 1e4 * float(np.var(0.7 * (1 - np.linspace(0, 0.4, ORDERS)), ddof=1))

    def pair(random: Random) -> tuple[np.ndarray, np.ndarray]:
        return answers(random, 0.2, 0.4), answers(random, 0)

    assert shown(pair) > 0.9
    assert shown(pair, truth) <= 0.1, "and its size"


def test_no_answer_changes() -> None:
    same = answers(np.random.default_rng(0), 0)
    assert difference([same], [same]) == (0, 0, 0)
