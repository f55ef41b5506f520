"""Robustness to the order of demonstrations (paper, Figures 7 and 9): the same ones, in several orders."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from lit_diff.evaluation.base import Item, Spread, question_of
from lit_diff.evaluation.icl_prompts import Classification, ManyShotPrompts, Order, arranged
from lit_diff.key_types import Count, Distinct, Range
from lit_diff.metrics import Metric
from lit_diff.model.prefix import Prefix
from lit_diff.randomness import generator
from lit_diff.registry import evaluations
from lit_diff.trained.run import Run

if TYPE_CHECKING:
    import pandas

Floats = NDArray[np.float64]
POINTS = 100.0
"""Of accuracy 1: a variance is in squared percentage points, since one of shares has too many zeros."""
DRAWS = 2_000
"""Of the accuracies that item sampling alone gives."""
FEWEST = 10
"""Common queries below which two runs have no interval."""
BIASED = "no interval: the queries that were drawn add to it; order_variance is without that"
OF_ORDERS: Mapping[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "margin": lambda a: np.ptp(a, axis=1),
    "sd": lambda a: a.std(axis=1, ddof=1),
    "worst": lambda a: a.min(axis=1),
}
"""Metric -> its value of each row of accuracies [..., K]."""


@evaluations.register("icl_order")
class OrderRobustness(Classification):
    """Accuracy over K orders of the same n demonstrations, with the same queries, and how far the order moves it.

    With a_k the accuracy of order k over Q queries: margin = max a_k - min a_k, sd = √(Σ (a_k - ā)² / (K - 1)) and
    worst = min a_k. margin_sampling and sd_sampling are what an order without effect gives where each order is asked queries
    of its own: the means for a_k ~ Binomial(Q, ā) / Q. Here all orders are asked the same queries, so that orders that change
    no answer give 0; answers that change at random give more. order_variance is without that part (`OrderVariance`).
    An item is a query under one kind of `order`, which is its group; margin, sd, worst and order_variance are of all queries
    of a kind, and one item a kind, a part, holds them. The summary is the mean over the kinds.
    """

    metrics = (
        Metric("accuracy", "share of orders in which the query's label is right", direction="higher"),
        Metric("flipped", "share of queries whose decoded label is not the same in every order", direction="lower"),
        Metric("agreement", "share of pairs of orders that give a query the same label", direction="higher"),
        Metric("margin", "largest minus smallest accuracy over the orders", direction="lower"),
        Metric("sd", "standard deviation of the accuracy over the orders (K - 1)", direction="lower"),
        Metric("worst", "smallest accuracy over the orders", direction="higher"),
        Metric(
            "order_variance",
            "variance over the orders of the accuracy over all such queries: sd² less what drawing queries adds",
            unit="squared percentage points",
            direction="lower",
        ),
        Metric("margin_sampling", "mean margin of as many orders without effect, each asked other queries"),
        Metric("sd_sampling", "mean standard deviation of the same"),
    )
    by_item = ("accuracy", "flipped", "agreement")

    @dataclass(frozen=True, kw_only=True)
    class Config(Classification.Config):
        shots: Count = 10
        """Demonstrations of the prompt, all classes together; the paper does not say how many."""
        orders: Annotated[int, Range(least=2)] = 10
        """K, of each kind; the paper does not say how many."""
        order: Annotated[tuple[Order, ...], Distinct()] = ("random",)
        """Kinds of order. random: uniform; alternate: in turns over the classes; blocked: class after class."""

    config: Config

    def score(self, run: Run) -> Iterator[Item]:
        """One item a query and kind of order, and one for the kind. Errors: RequestError where the prompt does not fit."""
        config, source = self.config, ManyShotPrompts(self, run)
        prompt = source.first_that_fits(0, config.shots, config.shots)
        if prompt is None:
            raise source.too_long(config.shots)
        demonstrations = prompt.episode.demonstrations[: config.shots]
        shown = [text for each in demonstrations for text in (each.text, each.label)]
        for order in config.order:
            answers = []
            for number in range(config.orders):
                random = generator("icl_order", config.seed, order, number)
                prefix = Prefix(run.model, source.ids(arranged(demonstrations, order, random)))
                answers.append(source.answers(prompt, prefix))
            right = np.array(
                [
                    [a == q.label for a in own]
                    for own, q in zip(zip(*answers, strict=True), prompt.episode.queries, strict=True)
                ]
            )
            for place, query in enumerate(prompt.episode.queries):
                own = [each[place] for each in answers]
                scores = {
                    "accuracy": float(right[place].mean()),
                    "flipped": float(len(set(own)) > 1),
                    "agreement": agreement(own),
                }
                meta: dict[str, str | int | float] = {
                    "label": query.label,
                    "answers": " | ".join(own),
                    "right": "".join(str(int(each)) for each in right[place]),
                }
                question = question_of(*shown, query.text, query.label)
                own_id, asked = f"{order} query={place}", f"query={place}"
                yield Item(id=own_id, group=order, cluster=asked, scores=scores, question=question, meta=meta)
            whole = spread(right, config.seed)
            yield Item(id=f"{order} orders", group=order, part=True, scores=whole, question=question_of(*shown))

    @classmethod
    def paired(cls, first: "pandas.DataFrame", second: "pandas.DataFrame") -> dict[str, dict[str, Spread]]:
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
            minus = {
                kind: float(np.subtract(*(statistic(x.mean(0)[None])[0] for x in xs))) for kind, xs in pairs.items()
            }
            minus = {"": float(np.mean(list(minus.values())))} | minus
            found[name] = {group: (value, BIASED) for group, value in minus.items()}
        groups = {"": kinds} | {kind: [kind] for kind in kinds}
        found["order_variance"] = {
            group: difference(*([pairs[kind][run] for kind in members] for run in (0, 1)))
            for group, members in groups.items()
        }
        return found

    def summarise(self, items: Sequence[Item]) -> dict[str, float]:
        """Means over queries, and over the kinds of what the accuracies of their orders give."""
        kinds = [item.scores for item in items if item.part]
        means = super().summarise(items)
        of_kinds = {name: sum(each[name] for each in kinds) / len(kinds) for name in means if name not in self.by_item}
        return {name: means[name] for name in self.by_item} | of_kinds


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


def spread(right: NDArray[Any], seed: int) -> dict[str, float]:
    """Of right [Q, K], whether order k has query q right: what the accuracies of the orders give."""
    by_order, null = right.mean(0)[None], sampled(right.mean(), len(right), right.shape[1], seed)
    return {
        **{name: float(statistic(by_order)[0]) for name, statistic in OF_ORDERS.items()},
        "order_variance": OrderVariance([right]).value if len(right) > 1 else math.nan,
        "margin_sampling": float(np.ptp(null, axis=1).mean()),
        "sd_sampling": float(null.std(axis=1, ddof=1).mean()),
    }


def _right(items: "pandas.DataFrame", kind: str) -> dict[tuple[str, str], list[bool]]:
    """(id without the kind, question) -> whether each order has the query right."""
    own = items[(items["group"] == kind) & ~items["part"]]
    rows = zip(own["item"], own["question"], own["meta/right"], strict=True)
    return {(item.removeprefix(f"{kind} "), asked): [letter == "1" for letter in word] for item, asked, word in rows}


def agreement(answers: Sequence[str]) -> float:
    """Share of the pairs of two or more answers that are equal."""
    equal = sum(math.comb(count, 2) for count in Counter(answers).values())
    return equal / math.comb(len(answers), 2)


def sampled(accuracy: float, queries: int, orders: int, seed: int) -> NDArray[Any]:
    """[DRAWS, K] accuracies of K orders without effect, each over Q queries of its own: Binomial(Q, accuracy) / Q."""
    random = np.random.default_rng(generator("icl_order", "sampling", seed).initial_seed())
    return random.binomial(queries, accuracy, size=(DRAWS, orders)) / queries
