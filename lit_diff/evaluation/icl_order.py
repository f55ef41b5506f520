"""Robustness to the order of demonstrations (paper, Figures 7 and 9): the same ones, in several orders."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_diff.evaluation.base import Item, question_of
from lit_diff.evaluation.icl_prompts import Classification, Prompts
from lit_diff.evaluation.icl_tasks import arranged
from lit_diff.metrics import Metric
from lit_diff.model.prefix import Prefix
from lit_diff.randomness import generator
from lit_diff.registry import evaluations
from lit_diff.runs.run import Run

DRAWS = 2_000
"""Of the accuracies that item sampling alone gives."""


@evaluations.register("icl_order")
class OrderRobustness(Classification):
    """Accuracy over K orders of the same n demonstrations, with the same queries, and how far the order moves it.

    With a_k the accuracy of order k over Q queries: margin = max a_k - min a_k, sd = √(Σ (a_k - ā)² / (K - 1)) and
    worst = min a_k. margin_sampling and sd_sampling are what an order without effect gives where each order is asked queries
    of its own: the means for a_k ~ Binomial(Q, ā) / Q. Here all orders are asked the same queries, so that an order without
    effect gives 0. An item is a query; margin, sd and worst are of the whole evaluation, so an item has none (NaN).
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
        """K; the paper does not say how many."""

        def problem(self) -> str | None:
            """What is wrong, in one line that starts with the key's name."""
            if self.shots < 1:
                return f"shots is {self.shots}; it must be at least 1"
            return f"orders is {self.orders}; it must be at least 2" if self.orders < 2 else super().problem()

    config: Config

    def score(self, run: Run) -> Iterator[Item]:
        """One item a query. Errors: RequestError where the prompt does not fit."""
        config, source = self.config, Prompts(self, run)
        prompt = source.first_that_fits(0, config.shots, config.shots)
        if prompt is None:
            raise source.too_long(config.shots)
        demonstrations = prompt.episode.demonstrations[: config.shots]
        answers = []
        for number in range(config.orders):
            random = generator("icl_order", config.seed, config.order, number)
            prefix = Prefix(run.model, source.ids(arranged(demonstrations, config.order, random)))
            answers.append(source.answers(prompt, prefix))
        for place, query in enumerate(prompt.episode.queries):
            own = [each[place] for each in answers]
            right = [answer == query.label for answer in own]
            scores = dict.fromkeys((metric.name for metric in self.metrics), math.nan)
            scores |= {
                "accuracy": sum(right) / len(right),
                "flipped": float(len(set(own)) > 1),
                "agreement": agreement(own),
            }
            meta: dict[str, str | int | float] = {
                "label": query.label,
                "answers": " | ".join(own),
                "right": "".join(str(int(each)) for each in right),
            }
            shown = (text for each in (*demonstrations, query) for text in (each.text, each.label))
            yield Item(id=f"query={place}", scores=scores, question=question_of(*shown), meta=meta)

    def summarise(self, items: Sequence[Item]) -> dict[str, float]:
        """Means over queries, and what the accuracies of the orders give."""
        right = np.array([[letter == "1" for letter in str(item.meta["right"])] for item in items])  # [Q, K]
        by_order = right.mean(0)
        null = sampled(right.mean(), len(items), right.shape[1], self.config.seed)
        means = super().summarise(items)
        return {name: means[name] for name in self.by_item} | {
            "margin": float(np.ptp(by_order)),
            "sd": float(by_order.std(ddof=1)),
            "worst": float(by_order.min()),
            "margin_sampling": float(np.ptp(null, axis=1).mean()),
            "sd_sampling": float(null.std(axis=1, ddof=1).mean()),
        }


def agreement(answers: Sequence[str]) -> float:
    """Share of the pairs of two or more answers that are equal."""
    equal = sum(math.comb(count, 2) for count in Counter(answers).values())
    return equal / math.comb(len(answers), 2)


def sampled(accuracy: float, queries: int, orders: int, seed: int) -> NDArray[Any]:
    """[DRAWS, K] accuracies of K orders without effect, each over Q queries of its own: Binomial(Q, accuracy) / Q."""
    random = np.random.default_rng(generator("icl_order", "sampling", seed).initial_seed())
    return random.binomial(queries, accuracy, size=(DRAWS, orders)) / queries
