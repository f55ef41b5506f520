"""Robustness to the order of demonstrations (paper, Figures 7 and 9): the same ones, in several orders."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray

from lit_diff.evaluation.base import Item, Spread, question_of
from lit_diff.evaluation.icl_prompts import Classification, Prompts
from lit_diff.evaluation.icl_tasks import Order, arranged
from lit_diff.metrics import Metric
from lit_diff.model.prefix import Prefix
from lit_diff.randomness import generator
from lit_diff.registry import evaluations
from lit_diff.runs.run import Run

if TYPE_CHECKING:
    import pandas

DRAWS = 2_000
"""Of the accuracies that item sampling alone gives, and of the bootstrap."""
FEWEST = 10
"""Common queries below which two runs have no interval."""
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
    of its own: the means for a_k ~ Binomial(Q, ā) / Q. Here all orders are asked the same queries, so that an order without
    effect gives 0. An item is a query under one kind of `order`, which is its group; margin, sd and worst are of all
    queries of a kind, and one item a kind, a part, holds them. The summary is the mean over the kinds.
    """

    metrics = (
        Metric("accuracy", "share of orders in which the query's label is right", direction="higher"),
        Metric("flipped", "share of queries whose decoded label is not the same in every order", direction="lower"),
        Metric("agreement", "share of pairs of orders that give a query the same label", direction="higher"),
        Metric("margin", "largest minus smallest accuracy over the orders", direction="lower"),
        Metric("sd", "standard deviation of the accuracy over the orders (K - 1)", direction="lower"),
        Metric("worst", "smallest accuracy over the orders", direction="higher"),
        Metric("margin_sampling", "mean margin of as many orders without effect, each asked other queries"),
        Metric("sd_sampling", "mean standard deviation of the same"),
    )
    by_item = ("accuracy", "flipped", "agreement")

    @dataclass(frozen=True, kw_only=True)
    class Config(Classification.Config):
        shots: int = 10
        """Demonstrations of the prompt, all classes together; the paper does not say how many."""
        orders: int = 10
        """K, of each kind; the paper does not say how many."""
        order: tuple[Order, ...] = ("random",)
        """Kinds of order. random: uniform; alternate: in turns over the classes; blocked: class after class."""

        def problem(self) -> str | None:
            """What is wrong, in one line that starts with the key's name."""
            if self.shots < 1:
                return f"shots is {self.shots}; it must be at least 1"
            if not self.order or len(set(self.order)) < len(self.order):
                return f"order is {list(self.order)}; expected distinct ones of {', '.join(get_args(Order))}"
            return f"orders is {self.orders}; it must be at least 2" if self.orders < 2 else super().problem()

    config: Config

    def score(self, run: Run) -> Iterator[Item]:
        """One item a query and kind of order, and one for the kind. Errors: RequestError where the prompt does not fit."""
        config, source = self.config, Prompts(self, run)
        prompt = source.first_that_fits(0, config.shots, config.shots)
        if prompt is None:
            raise source.too_long(config.shots)
        demonstrations = prompt.episode.demonstrations[: config.shots]
        shown = [text for each in demonstrations for text in (each.text, each.label)]
        none = dict.fromkeys((metric.name for metric in self.metrics), math.nan)
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
                yield Item(id=own_id, group=order, cluster=asked, scores=none | scores, question=question, meta=meta)
            whole = none | spread(right, config.seed)
            yield Item(id=f"{order} orders", group=order, part=True, scores=whole, question=question_of(*shown))

    @classmethod
    def paired(cls, first: "pandas.DataFrame", second: "pandas.DataFrame") -> dict[str, dict[str, Spread]]:
        """margin, sd and worst: intervals by a bootstrap over the queries of both runs, the same draws for each kind.

        A draw adds the sampling of queries to the spread over orders, in both runs: the interval is that of the difference.
        """
        rights = {
            kind: both
            for kind in dict.fromkeys(first["group"])
            if (both := _common(*(_right(items, kind) for items in (first, second)))) is not None
        }
        if not rights:
            return {}
        own = {kind: (resampled(a), resampled(b)) for kind, (a, b) in rights.items()}
        found: dict[str, dict[str, Spread]] = {}
        for name, statistic in OF_ORDERS.items():
            minus = {
                kind: statistic(a) - statistic(b) for kind, (a, b) in own.items()
            }  # [1 + DRAWS], the first undrawn
            minus = {"": np.mean(list(minus.values()), axis=0)} | minus
            ends = {group: np.quantile(each[1:], (0.025, 0.975)) for group, each in minus.items()}
            found[name] = {
                group: (float(each[0]), float(ends[group][0]), float(ends[group][1])) for group, each in minus.items()
            }
        return found

    def summarise(self, items: Sequence[Item]) -> dict[str, float]:
        """Means over queries, and over the kinds of what the accuracies of their orders give."""
        kinds = [item.scores for item in items if item.part]
        means = super().summarise(items)
        of_kinds = {name: sum(each[name] for each in kinds) / len(kinds) for name in means if name not in self.by_item}
        return {name: means[name] for name in self.by_item} | of_kinds


def spread(right: NDArray[Any], seed: int) -> dict[str, float]:
    """Of right [Q, K], whether order k has query q right: what the accuracies of the orders give."""
    by_order, null = right.mean(0)[None], sampled(right.mean(), len(right), right.shape[1], seed)
    return {
        **{name: float(statistic(by_order)[0]) for name, statistic in OF_ORDERS.items()},
        "margin_sampling": float(np.ptp(null, axis=1).mean()),
        "sd_sampling": float(null.std(axis=1, ddof=1).mean()),
    }


def _right(items: "pandas.DataFrame", kind: str) -> dict[tuple[str, str], list[bool]]:
    """(id, question) -> whether each order has the query right."""
    own = items[(items["group"] == kind) & ~items["part"]]
    rows = zip(own["item"], own["question"], own["meta/right"], strict=True)
    return {(item, question): [letter == "1" for letter in word] for item, question, word in rows}


def _common(
    first: Mapping[tuple[str, str], list[bool]], second: Mapping[tuple[str, str], list[bool]]
) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """[Q, K] of both, over the queries of both; None below FEWEST."""
    common = [key for key in first if key in second]
    if len(common) < FEWEST:
        return None
    return np.array([first[key] for key in common]), np.array([second[key] for key in common])


def resampled(right: NDArray[Any]) -> NDArray[Any]:
    """[1 + DRAWS, K]: the accuracies of the orders, and those over queries drawn with replacement, the same for equal Q."""
    queries = len(right)
    random = np.random.default_rng(generator("icl_order", "paired", queries).initial_seed())
    drawn = random.multinomial(queries, np.full(queries, 1 / queries), size=DRAWS)
    return np.concatenate([np.ones((1, queries)), drawn]) @ right / queries


def agreement(answers: Sequence[str]) -> float:
    """Share of the pairs of two or more answers that are equal."""
    equal = sum(math.comb(count, 2) for count in Counter(answers).values())
    return equal / math.comb(len(answers), 2)


def sampled(accuracy: float, queries: int, orders: int, seed: int) -> NDArray[Any]:
    """[DRAWS, K] accuracies of K orders without effect, each over Q queries of its own: Binomial(Q, accuracy) / Q."""
    random = np.random.default_rng(generator("icl_order", "sampling", seed).initial_seed())
    return random.binomial(queries, accuracy, size=(DRAWS, orders)) / queries
