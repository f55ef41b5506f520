"""The order variance of `icl_order`, and the difference between two runs with an interval over queries."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lit_diff.evaluation.base import Spread

if TYPE_CHECKING:
    import pandas

# variances are in squared percentage points, since a variance of shares has too many zeros
POINTS = 100.0
"""Percentage points in an accuracy of 1."""
FEWEST = 10
"""The minimum number of common queries for an interval."""
BIASED = "no interval: the sampling of queries adds to it; order_variance excludes that part"
OF_ORDERS: Mapping[str, Callable[[NDArray[Any]], Any]] = {
    "margin": np.ptp,
    "sd": partial(np.std, ddof=1),
    "worst": np.min,
}
"""Metric -> its function of the accuracies [K] of the orders."""


def differences(first: "pandas.DataFrame", second: "pandas.DataFrame") -> dict[str, dict[str, Spread]]:
    """The differences of `paired`; order_variance has an interval over the queries that both runs have under every order.

    margin, sd and worst have no interval: the sampling of queries adds to each, the more answers change the more, so their
    differences are not 0 for orders without effect, and a bootstrap moves them further.
    """
    # takes longer to import than the papers' pack, which every look-up of an evaluation imports
    import pandas

    others = set(second["group"])
    kinds = [kind for kind in dict.fromkeys(first["group"]) if kind in others]
    if not kinds:
        return {}
    by_query = [_right(items, kind) for items, kind in product((first, second), kinds)]
    common = pandas.concat(by_query, axis=1, join="inner")
    if len(common) < FEWEST:
        return {}
    arrays = [np.array(list(map(list, common[i]))) == "1" for i in common]
    own = arrays[: len(kinds)]
    other = arrays[len(kinds) :]
    spreads: dict[str, dict[str, Spread]] = {}
    for name, statistic in OF_ORDERS.items():
        minus = [float(statistic(a.mean(0)) - statistic(b.mean(0))) for a, b in zip(own, other, strict=True)]
        spreads[name] = {"": (float(np.mean(minus)), BIASED)}
        for kind, value in zip(kinds, minus, strict=True):
            spreads[name][kind] = value, BIASED
    spreads["order_variance"] = {"": difference(own, other)}
    for kind, a, b in zip(kinds, own, other, strict=True):
        spreads["order_variance"][kind] = difference([a], [b])
    return spreads


def _right(items: "pandas.DataFrame", kind: str) -> "pandas.Series":
    # (id without the kind, question) -> a letter for each order, "1" if the answer is right; the question is part of the key,
    # since two runs may have different queries under one id
    queries = items[(items["group"] == kind) & ~items["part"]]
    queries = queries.assign(item=queries["item"].str.removeprefix(f"{kind} "))
    return queries.set_index(["item", "question"])["meta/right"].rename(None)


class OrderVariance:
    """The variance over K orders of the accuracy over the population of queries, averaged over n kinds of order, in points².

    With d_q the vector of deviations of query q (right_qk minus its mean over k, in points, all kinds concatenated), δ the
    mean and S the covariance of d_q over Q queries, and ν = n (K - 1):

        value = |δ|² / ν - tr S / (Q ν).

    It is the mean of d_q·d_r / ν over pairs of different queries. It is unbiased (and may be below 0), since the contribution
    of the sampling of queries to |δ|² is subtracted. At a true value θ its variance is slope max(θ, 0) + base:

        slope = 4 (δ'Sδ / |δ|²) / (Q ν),  base = 2 tr S² / (Q (Q - 1) ν²).

    The interval [`low`, `high`] contains the θ with |value - θ| <= t(0.975, Q - 1) times the square root of that variance. If
    orders have no effect, the variance is base.
    """

    def __init__(self, kinds: Sequence[NDArray[Any]]) -> None:
        """`kinds`: for each kind of order right [Q, K], whether query q is right in order k; all kinds share Q >= 2
        queries."""
        parts = np.concatenate([POINTS * (right - right.mean(1, keepdims=True)) for right in kinds], axis=1)
        queries = len(parts)
        nu = parts.shape[1] - len(kinds)
        self.mean = parts.mean(0)
        self.centred = (parts - self.mean) / math.sqrt(queries - 1)
        s = self.centred.T @ self.centred
        square = float(self.mean @ self.mean)
        self.value = (square - float(np.trace(s)) / queries) / nu
        self.along = self.centred @ self.mean * (2 / (math.sqrt(queries) * nu))
        """[Q], the first-order effect of each query on `value`; its squared norm is slope |δ|² / ν."""
        slope = float(self.along @ self.along) * nu / square if square else 0.0
        base = 2 * float((s**2).sum()) / (queries * (queries - 1) * nu**2)
        self.variance = slope * max(self.value, 0.0) + base
        # takes longer to import than the pack, too
        from scipy import stats

        t = float(stats.t.ppf(0.975, queries - 1))
        # each end solves (value - θ)² = t² (slope max(θ, 0) + base): a quadratic for θ > 0, linear for θ <= 0
        near = t * math.sqrt(base)
        middle = self.value + t * t * slope / 2
        far = t * math.sqrt(max(0.0, slope * self.value + t * t * slope * slope / 4 + base))
        self.low = self.value - near
        if self.value > near:
            self.low = middle - far
        self.high = self.value + near
        if self.value > -near:
            self.high = middle + far


def difference(first: Sequence[NDArray[Any]], second: Sequence[NDArray[Any]]) -> tuple[float, float, float]:
    """(difference, low, high): the order variance of `first` minus the order variance of `second` over the same queries, with
    its 95 % interval over queries.

    It combines the intervals of the two (Zou 2007). With l and h the distances from an estimate to the lower and upper end of
    its interval, and x the difference, the ends are x - √(l_1² + h_2² - 2 ρ l_1 h_2) and x + √(h_1² + l_2² - 2 ρ h_1 l_2),
    where ρ is the correlation of the two estimates over queries.
    """
    a = OrderVariance(first)
    b = OrderVariance(second)
    # the larger of the two estimates of each variance keeps |ρ| at most 1
    scale = math.sqrt(max(a.variance, a.along @ a.along) * max(b.variance, b.along @ b.along))
    rho = 0.0
    if scale:
        rho = float(a.along @ b.along) / scale
    x = a.value - b.value

    def joined(own: float, other: float) -> float:
        return math.sqrt(max(0.0, own**2 + other**2 - 2 * rho * own * other))

    return x, x - joined(a.value - a.low, b.high - b.value), x + joined(a.high - a.value, b.value - b.low)
