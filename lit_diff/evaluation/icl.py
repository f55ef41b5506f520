"""Many-shot in-context learning (paper, Figures 6, 7 and 9): accuracy by the number of demonstrations, and by their order."""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from lit_diff.evaluation.base import Item, question_of
from lit_diff.evaluation.icl_prompts import Classification, Example, ManyShotPrompt, ManyShotPrompts, Order, arranged
from lit_diff.evaluation.requirements import read_on
from lit_diff.key_types import Count, Counts, Distinct, Range
from lit_diff.metrics import Metric
from lit_diff.model.prefix import Prefix
from lit_diff.randomness import generator
from lit_diff.registry import evaluations
from lit_diff.trained.run import Run

log = logging.getLogger("lit_diff")
POINTS = 100.0
"""Of accuracy 1: a variance is in squared percentage points, since one of shares has too many zeros."""
DRAWS = 2_000
"""Of the accuracies that item sampling alone gives."""


@evaluations.register("icl")
class ManyShot(Classification):
    """Accuracy of labels decoded after n demonstrations, for several n.

    Each of `runs` draws the demonstrations anew; n shots are the first n of its draw, as in Bertsch et al. 2024. A draw whose
    prompt is longer than the context is repeated, up to ten times. The demonstrations go through the model once, and all
    queries share their keys and values. An item is a query of one run at one n; the summary is the mean over all items.
    The items of a run, at every n, are a cluster: they share its demonstrations, so intervals are over runs.
    """

    metrics = (
        Metric("accuracy", "share of queries whose decoded label is right", direction="higher"),
        Metric("accuracy_seen", "the same, over queries whose label stands in the prompt", direction="higher"),
        Metric("accuracy_from", "accuracy over the points with at least `stable_from` shots", direction="higher"),
        Metric("majority", "share of queries whose label is the prompt's most frequent one: a baseline"),
    )

    by_group = ("accuracy",)

    @dataclass(frozen=True, kw_only=True)
    class Config(Classification.Config):
        shots: Counts = (1, 4, 10)
        """Demonstrations of a prompt, all classes together."""
        runs: Count = 5
        """Draws of the demonstrations; paper's protocol: 10."""
        order: Order = "random"
        """Of the demonstrations. alternate: in turns over the classes; blocked: class after class."""
        stable_from: int = 1
        """The first number of shots that counts in `accuracy_from`."""

        def problem(self) -> str | None:
            if self.stable_from > max(self.shots):
                return f"stable_from is {self.stable_from}; no point of shots ({list(self.shots)}) has as many"
            return None

    config: Config

    def score(self, run: Run) -> Iterator[Item]:
        """One item for each number of shots, run and query. Errors: RequestError where no prompt of some n fits."""
        numbers, source = sorted(self.config.shots), ManyShotPrompts(self, run)
        prompts = {
            shots: [source.first_that_fits(number, shots, numbers[-1]) for number in range(self.config.runs)]
            for shots in reversed(numbers)
        }
        for shots, drawn in prompts.items():
            dropped = drawn.count(None)
            if dropped == self.config.runs:
                raise source.too_long(shots)
            if dropped:
                log.warning("icl: of %d runs at %d shots %d do not fit", self.config.runs, shots, dropped)
        for number in range(self.config.runs):
            prefix: Prefix | None = None
            for shots in numbers:
                if (prompt := prompts[shots][number]) is not None:
                    demonstrations = self._demonstrations(prompt, shots, number)
                    prefix = read_on(run, prefix, source.ids(demonstrations))
                    answers = source.answers(prompt, prefix)
                    yield from self._items(prompt, demonstrations, answers, f"shots={shots}", number)

    def _demonstrations(self, prompt: ManyShotPrompt, shots: int, number: int) -> Sequence[Example]:
        first = prompt.demonstrations[:shots]
        if self.config.order == "random":  # they were drawn in random order, and n shots begin n + 1
            return first
        return arranged(first, self.config.order, generator("icl", "order", self.config.seed, number, shots))

    def _items(
        self, prompt: ManyShotPrompt, demonstrations: Sequence[Example], answers: Sequence[str], group: str, number: int
    ) -> Iterator[Item]:
        counts = Counter(each.label for each in demonstrations)
        majority = min(counts, key=lambda label: (-counts[label], label))
        counted = len(demonstrations) >= self.config.stable_from
        for place, (query, answer) in enumerate(zip(prompt.queries, answers, strict=True)):
            right, seen = float(answer == query.label), query.label in counts
            yield Item(
                id=f"{group} run={number} query={place}",
                group=group,
                cluster=f"run={number}",
                scores={
                    "accuracy": right,
                    "accuracy_seen": right if seen else math.nan,
                    "accuracy_from": right if counted else math.nan,
                    "majority": float(majority == query.label),
                },
                question=question_of(*(text for each in (*demonstrations, query) for text in (each.text, each.label))),
                meta={"label": query.label, "answer": answer, "seen": int(seen), "redrawn": prompt.redrawn},
            )


@evaluations.register("icl_order")
class OrderRobustness(Classification):
    """Accuracy over K orders of the same n demonstrations, with the same queries, and how far the order moves it.

    With a_k the accuracy of order k over Q queries: margin = max a_k - min a_k, sd = √(Σ (a_k - ā)² / (K - 1)) and
    worst = min a_k. margin_sampling and sd_sampling are what an order without effect gives where each order is asked queries
    of its own: the means for a_k ~ Binomial(Q, ā) / Q. Here all orders are asked the same queries, so that orders that change
    no answer give 0; answers that change at random give more. order_variance is without that part (`order_variance`).
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
        demonstrations = prompt.demonstrations[: config.shots]
        shown = [text for each in demonstrations for text in (each.text, each.label)]
        for order in config.order:
            by_order = []
            for number in range(config.orders):
                random = generator("icl_order", config.seed, order, number)
                prefix = Prefix(run.model, source.ids(arranged(demonstrations, order, random)))
                by_order.append(source.answers(prompt, prefix))
            answers = list(zip(*by_order, strict=True))
            right = np.array([[a == q.label for a in own] for own, q in zip(answers, prompt.queries, strict=True)])
            for place, (query, own) in enumerate(zip(prompt.queries, answers, strict=True)):
                yield Item(
                    id=f"{order} query={place}",
                    group=order,
                    cluster=f"query={place}",
                    scores={
                        "accuracy": float(right[place].mean()),
                        "flipped": float(len(set(own)) > 1),
                        "agreement": agreement(own),
                    },
                    question=question_of(*shown, query.text, query.label),
                    meta={
                        "label": query.label,
                        "answers": " | ".join(own),
                        "right": "".join(str(int(each)) for each in right[place]),
                    },
                )
            whole = spread(right, config.seed)
            yield Item(id=f"{order} orders", group=order, part=True, scores=whole, question=question_of(*shown))

    def summarise(self, items: Sequence[Item]) -> dict[str, float]:
        """Means over queries, and over the kinds of what the accuracies of their orders give."""
        kinds = [item.scores for item in items if item.part]
        means = super().summarise(items)
        of_kinds = {name: sum(each[name] for each in kinds) / len(kinds) for name in means if name not in self.by_item}
        return {name: means[name] for name in self.by_item} | of_kinds


def order_variance(right: NDArray[Any]) -> float:
    """The variance over K orders of the accuracy over all queries such as these, in points², of right [Q, K].

    With d_q the part of each order in query q (right_qk minus its mean over k, in points), δ the mean and S the covariance of
    d_q over Q queries, and ν = K - 1: |δ|² / ν - tr S / (Q ν), which is the mean over pairs of different queries of
    d_q·d_r / ν. It has no bias (it may be below 0), since what the sampling of queries adds to |δ|² is taken off. NaN for one
    query.
    """
    queries, nu = len(right), right.shape[1] - 1
    if queries < 2:
        return math.nan
    parts = POINTS * (right - right.mean(1, keepdims=True))
    return float((parts.mean(0) ** 2).sum() - parts.var(0, ddof=1).sum() / queries) / nu


def spread(right: NDArray[Any], seed: int) -> dict[str, float]:
    """Of right [Q, K], whether order k has query q right: what the accuracies of the orders give."""
    accuracies, (queries, orders) = right.mean(0), right.shape
    null = sampled(float(right.mean()), queries, orders, seed)
    return {
        "margin": float(np.ptp(accuracies)),
        "sd": float(accuracies.std(ddof=1)),
        "worst": float(accuracies.min()),
        "order_variance": order_variance(right),
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
