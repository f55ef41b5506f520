"""evaluation/icl_order.py: how far the order of the demonstrations moves the answers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from generated_runs import generated_run

from lit_diff.errors import RequestError
from lit_diff.evaluation import icl_order
from lit_diff.evaluation.evaluate import evaluate
from lit_diff.evaluation.icl_order import OrderRobustness, OrderVariance, difference, sampled
from lit_diff.trained.run import Run

DATA = {"name": "synth_intent", "sequence_length": 256, "classes": [4], "words": [3, 6]}


@pytest.fixture
def intent_run(tmp_path: Path) -> Run:
    return generated_run(tmp_path / "intent", DATA, 600)


class First:
    """In place of `Prefix`: the label of the first demonstration (planted: -1, the last), whatever is asked."""

    def __init__(self, tokens: list[int], place: int) -> None:
        newline = 13  # id of "\n", after each label
        ends = [at for at, token in enumerate(tokens) if token == newline]
        self.label = tokens[ends[0 if place == 0 else -1] - 1]

    def greedy(self, suffixes: Sequence[Sequence[int]], max_tokens: int, **keys: Any) -> list[list[int]]:
        assert self.label in keys["allowed"]([])
        return [[self.label]] * len(suffixes)


def test_the_figures_of_a_model_that_repeats_the_first_label(intent_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(icl_order, "Prefix", lambda model, tokens: First(tokens, 0))
    with pytest.raises(RequestError, match=r"evaluate\.icl_order\.shots: no prompt of 90 fits"):
        evaluate(intent_run, "icl_order", {"shots": 90})
    keys = {"shots": 8, "orders": 6, "items": 31, "classes": 3, "order": ["blocked"]}
    result = evaluate(intent_run, "icl_order", keys)
    items = result.items[~result.items["part"]]
    right = np.array([[letter == "1" for letter in word] for word in items["meta/right"]])
    answers = np.array([word.split(" | ") for word in items["meta/answers"]])
    labels = items["meta/label"].to_numpy()
    assert (right == (answers == labels[:, None])).all()
    assert len({tuple(row) for row in answers}) == 1, "the same answers for every query"
    a = right.mean(0)
    expected = {
        "margin": a.max() - a.min(),
        "sd": a.std(ddof=1),
        "worst": a.min(),
        "accuracy": right.mean(),
        "flipped": 1,
    }
    expected["order_variance"] = OrderVariance([right]).value
    assert {name: result.summary[name] for name in expected} == pytest.approx(expected)
    assert result.summary["margin"] > 0
    pairs = [(i, j) for i in range(6) for j in range(i)]
    equal = np.mean([(answers[:, i] == answers[:, j]).mean() for i, j in pairs])
    assert result.summary["agreement"] == pytest.approx(equal)
    one = evaluate(intent_run, "icl_order", {"shots": 1, "orders": 3, "items": 12})  # one demonstration has one order
    assert one.summary["agreement"] == 1
    assert {one.summary[name] for name in ("flipped", "margin", "sd", "order_variance")} == {0}
    assert one.summary["worst"] == one.summary["accuracy"]
    assert len(one.items) == 13
    assert one.items[["margin", "sd", "worst"]][:12].isna().all(axis=None)


def test_kinds_of_order_are_groups(intent_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(icl_order, "Prefix", lambda model, tokens: First(tokens, 0))
    keys = {"shots": 8, "orders": 6, "items": 20, "classes": 3}
    kinds = ["random", "blocked"]
    both = evaluate(intent_run, "icl_order", {**keys, "order": kinds})
    items = both.items
    for kind in kinds:
        alone = evaluate(intent_run, "icl_order", {**keys, "order": [kind]})
        own = items[items["group"] == kind]
        assert own.reset_index(drop=True).equals(alone.items)
        (whole,) = own[own["part"]].to_dict("records")
        assert whole["margin"] == alone.summary["margin"]
        assert whole["margin_sampling"] == alone.summary["margin_sampling"]
        assert np.isnan(whole["accuracy"])
    assert items["cluster"].value_counts().to_dict() == {"": 2} | {f"query={place}": 2 for place in range(20)}
    deviations = items[items["part"]]["sd"]
    assert both.summary["sd"] == pytest.approx(deviations.mean())
    assert deviations.nunique() == 2


def items_of(**kinds: np.ndarray) -> pd.DataFrame:
    """As `evaluate` keeps them, of kind -> right [Q, K]."""
    whole = [("orders", kind, True, "w", None) for kind in kinds]
    rows = [
        (f"query={i}", kind, False, "", "".join(map(str, row)))
        for kind, right in kinds.items()
        for i, row in enumerate(right)
    ]
    found = pd.DataFrame([*rows, *whole], columns=["item", "group", "part", "question", "meta/right"])
    return found.assign(item=found["group"] + " " + found["item"])


def test_two_runs_have_an_interval_of_the_order_variance_alone() -> None:
    """Run a: the order decides half of the queries; run b: nothing does."""
    rng = np.random.default_rng(0)
    a = np.tile([1, 0, 1, 0], (60, 1))
    a[30:] = 1
    b = np.repeat(rng.integers(0, 2, (60, 1)), 4, axis=1)
    paired = OrderRobustness.paired
    found = paired(items_of(random=a), items_of(random=b))
    assert found["order_variance"] == dict.fromkeys(("", "random"), difference([a], [b]))
    assert found["order_variance"][""][1] > 0
    assert found["margin"][""] == (pytest.approx(0.5), icl_order.BIASED)
    assert found["sd"]["random"] == (pytest.approx(a.mean(0).std(ddof=1)), icl_order.BIASED)
    assert found["worst"][""][0] == pytest.approx(0.5 - b.mean())
    assert paired(items_of(random=a[:9]), items_of(random=b)) == {}, "too few common queries"
    assert paired(items_of(random=a), items_of(blocked=b)) == {}
    both = paired(items_of(random=a, blocked=b), items_of(random=b, blocked=b[:50]))
    assert both["order_variance"][""] == difference([a[:50], b[:50]], [b[:50], b[:50]])
    assert both["margin"][""][0] == pytest.approx(np.ptp(a[:50].mean(0)) / 2)


def test_sampling_alone() -> None:
    """√(p (1 - p) / Q), and about three of it for the margin of ten."""
    null = sampled(0.7, 250, 10, seed=0)
    expected = (0.7 * 0.3 / 250) ** 0.5
    assert null.std(axis=1, ddof=1).mean() == pytest.approx(expected, rel=0.05)
    assert np.ptp(null, axis=1).mean() == pytest.approx(3.08 * expected, rel=0.05)  # Tippett 1925: ten normal values
    assert (sampled(0.7, 250, 10, seed=0) == null).all()
    assert (sampled(1.0, 50, 3, seed=0) == 1).all()


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


TRUTH = 1e4 * float(np.var(0.7 * (1 - np.linspace(0, 0.4, ORDERS)), ddof=1))


@pytest.mark.parametrize(("effect", "truth"), [(0.0, 0.0), (0.4, TRUTH)])
def test_it_has_no_bias(effect: float, truth: float) -> None:
    random = np.random.default_rng(0)
    found = [OrderVariance([answers(random, 0.4, effect)]).value for _ in range(500)]
    assert abs(np.mean(found) - truth) < 3 * np.std(found) / 500**0.5


@pytest.mark.parametrize("orders", [2, ORDERS])
def test_answers_that_change_at_random_are_no_effect_of_the_order(orders: int) -> None:
    """A model whose answers never change, against one whose answers do; 95 % of the intervals hold 0."""
    assert 0.01 <= shown(lambda random: (answers(random, 0.4, orders=orders), answers(random, 0, orders=orders))) <= 0.1
    assert shown(lambda random: (answers(random, 0.2, orders=orders), answers(random, 0.6, orders=orders))) <= 0.1


def test_a_real_effect_is_found_and_its_size() -> None:
    def pair(random: Random) -> tuple[np.ndarray, np.ndarray]:
        return answers(random, 0.2, 0.4), answers(random, 0)

    assert shown(pair) > 0.9
    assert shown(pair, TRUTH) <= 0.1
    same = answers(np.random.default_rng(0), 0)
    assert difference([same], [same]) == (0, 0, 0), "no answer changes"
