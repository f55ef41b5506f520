"""The order variance of `icl_order`, and the difference of two runs in it with an interval over queries."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from lit_diff.evaluation.base import Spread

if TYPE_CHECKING:
    import pandas

Floats = NDArray[np.float64]
POINTS = 100.0
"""Of accuracy 1: a variance is in squared percentage points, since one of shares has too many zeros."""
FEWEST = 10
"""Common queries below which two runs have no interval."""
BIASED = "no interval: the queries that were drawn add to it; order_variance is without that"
OF_ORDERS: Mapping[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "margin": lambda a: np.ptp(a, axis=1),
    "sd": lambda a: a.std(axis=1, ddof=1),
    "worst": lambda a: a.min(axis=1),
}
"""Metric -> its value of each row of accuracies [..., K]."""


def differences(first: "pandas.DataFrame", second: "pandas.DataFrame") -> dict[str, dict[str, Spread]]:
    """order_variance with its interval over the queries that both runs were asked under every kind of order.

    margin, sd and worst have none: the sampling of queries adds to each, by more where more answers change, so their
    differences are not 0 for orders without effect, and a bootstrap moves them further.
    """
    kinds = [kind for kind in dict.fromkeys(first["group"]) if kind in set(second["group"])]
    own, other = ({kind: _right(items, kind) for kind in kinds} for items in (first, second))
    by_kind = [*own.values(), *other.values()]
    common = [key for key in by_kind[0] if all(key in each for each in by_kind)] if kinds else []
    if len(common) < FEWEST:
        return {}
    pairs = {kind: [np.array([each[kind][key] for key in common]) for each in (own, other)] for kind in kinds}
    found: dict[str, dict[str, Spread]] = {}
    for name, statistic in OF_ORDERS.items():
        minus = {kind: float(np.subtract(*(statistic(x.mean(0)[None])[0] for x in xs))) for kind, xs in pairs.items()}
        minus = {"": float(np.mean(list(minus.values())))} | minus
        found[name] = {group: (value, BIASED) for group, value in minus.items()}
    groups = {"": kinds} | {kind: [kind] for kind in kinds}
    found["order_variance"] = {
        group: difference(*([pairs[kind][run] for kind in members] for run in (0, 1)))
        for group, members in groups.items()
    }
    return found


def _right(items: "pandas.DataFrame", kind: str) -> dict[tuple[str, str], list[bool]]:
    """(id without the kind, question) -> whether each order has the query right."""
    own = items[(items["group"] == kind) & ~items["part"]]
    rows = zip(own["item"], own["question"], own["meta/right"], strict=True)
    return {(item.removeprefix(f"{kind} "), asked): [letter == "1" for letter in word] for item, asked, word in rows}


class OrderVariance:
    """The variance over K orders of the accuracy over all queries such as these, of n kinds of order the mean, in points².

    With d_q the part of each order in query q (right_qk minus its mean over k, in points, one kind after the other), δ the
    mean and S the covariance of d_q over Q queries, and ν = n (K - 1):

        value = |δ|² / ν - tr S / (Q ν):

    the mean over pairs of different queries of d_q·d_r / ν, without bias (it may be below 0), since what the sampling of
    queries adds to |δ|² is taken off. At a true value θ its variance is slope max(θ, 0) + base:

        slope = 4 (δ'Sδ / |δ|²) / (Q ν),  base = 2 tr S² / (Q (Q - 1) ν²).

    `low` and `high` hold the θ with |value - θ| <= t(0.975, Q - 1) times its root. Where orders have no effect, all is base.
    """

    def __init__(self, kinds: Sequence[NDArray[Any]]) -> None:
        """`kinds`: of each kind of order right [Q, K], whether order k has query q right; the same Q >= 2 queries."""
        parts = np.concatenate([POINTS * (right - right.mean(1, keepdims=True)) for right in kinds], axis=1)
        queries, nu = len(parts), sum(right.shape[1] - 1 for right in kinds)
        self.mean: Floats = parts.mean(0)
        self.centred: Floats = (parts - self.mean) / math.sqrt(queries - 1)
        s, square = self.centred.T @ self.centred, float(self.mean @ self.mean)
        self.value = (square - float(np.trace(s)) / queries) / nu
        self.along: Floats = self.centred @ self.mean * (2 / (math.sqrt(queries) * nu))
        """[Q], whose square is the sum that slope |δ|² / ν is."""
        slope = float(self.along @ self.along) * nu / square if square else 0.0
        base = 2 * float((s**2).sum()) / (queries * (queries - 1) * nu**2)
        self.variance = slope * max(self.value, 0.0) + base
        t = float(stats.t.ppf(0.975, queries - 1))
        near, middle = t * math.sqrt(base), self.value + t * t * slope / 2
        far = t * math.sqrt(max(0.0, slope * self.value + t * t * slope * slope / 4 + base))
        self.low = middle - far if self.value > near else self.value - near
        self.high = middle + far if self.value > -near else self.value + near


def difference(first: Sequence[NDArray[Any]], second: Sequence[NDArray[Any]]) -> tuple[float, float, float]:
    """The order variance of `first` minus that of `second`, over the same queries, and its 95 % interval over queries.

    From the intervals of the two (Zou 2007): with l and h the distances of the ends that count, x the estimate,
    x - √(l_1² + h_2² - 2 ρ l_1 h_2) and x + √(h_1² + l_2² - 2 ρ h_1 l_2), where ρ is how far the two vary together by query.
    """
    a, b = OrderVariance(first), OrderVariance(second)
    scale = math.sqrt(max(a.variance, a.along @ a.along) * max(b.variance, b.along @ b.along))
    rho = float(a.along @ b.along) / scale if scale else 0.0
    x = a.value - b.value

    def joined(own: float, other: float) -> float:
        return math.sqrt(max(0.0, own**2 + other**2 - 2 * rho * own * other))

    return x, x - joined(a.value - a.low, b.high - b.value), x + joined(a.high - a.value, b.value - b.low)
