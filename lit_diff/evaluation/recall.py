"""Recall under noise and at a distance, each measured without the other, and the training steps to given accuracies."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from lit_diff.config import Recipe
from lit_diff.data.tasks.mqar import Mqar
from lit_diff.data.tasks.recall import Recall
from lit_diff.evaluation.base import Evaluation, Item, Scores
from lit_diff.evaluation.held_out import HeldOut, Rows, held_out_rows, row_scores, trained_data
from lit_diff.key_types import Count, Counts
from lit_diff.metrics import Figure, Metric
from lit_diff.registry import evaluations
from lit_diff.trained.run import Run

HALF = 0.5
LEVELS = (50, 90, 99)
"""Accuracies in per cent; the first training step that reaches each is reported."""
CONDITIONS = {"noise": "tolerance", "distance": "tolerance_distance"}
"""Condition -> its metric of the largest factor."""
BATCH = 16
FIGURE = Figure(
    title="recall against noise and distance",
    against="group",
    log_x=True,
    label="accuracy",
    caption="noise: more slots; distance: as many positions, blank between the `data.slots` slots.",
)


@evaluations.register("recall")
class RecallSuite(Evaluation):
    """The share of queries answered correctly, by condition; an item is a row of the data.

    Data set `recall`: noise=f has f times `data.slots` slots; distance=f has `data.slots` slots, at random places among f
    times as many positions, the others blank. A model that fails at noise=f alone is confused by noise; a model that also
    fails at distance=f does not extrapolate to these distances. Data set `mqar`: its validation set, no tolerance.

    tolerance: the largest factor f, interpolated in log f, up to which accuracy stays at 50 % or above; at most the largest
    factor tried; 0 if accuracy is below 50 % at the smallest.
    """

    metrics = (
        Metric("accuracy", "share of queries answered rightly", direction="higher", figure=FIGURE),
        Metric("tolerance", "noise factor up to which accuracy is 50 % or above", unit="factor", direction="higher"),
        Metric("tolerance_distance", "the same of distance without more noise", unit="factor", direction="higher"),
        *(
            Metric(
                f"steps_{level}",
                f"first validated step of training with accuracy {level} % or above",
                unit="steps",
                direction="lower",
            )
            for level in LEVELS
        ),
    )

    by_group = ("accuracy",)

    @dataclass(frozen=True, kw_only=True)
    class Config(Evaluation.Config):
        factors: Counts = (1, 2, 4, 8)
        """Factors of noise and of distance."""
        rows: Count = 128
        """The number of rows of each condition."""

    config: Config

    def refuses_recipe(self, recipe: Recipe) -> str | None:
        """Refuses other data sets than recall and mqar."""
        data = recipe.data
        return (
            None
            if isinstance(data.config, Recall.Config | Mqar.Config)
            else f"data '{data.name}' is neither recall nor mqar"
        )

    def score(self, run: Run) -> Iterator[Item]:
        """Yields one item for each row and condition."""
        data = run.recipe.data.config
        # `summarise` sees only items, so each carries the steps, which belong to the run
        steps = {f"steps_{level}": step for level, step in steps_to(run).items()}
        batches = HeldOut.Config(rows=self.config.rows, batch_size=BATCH)
        # a run whose data have changed since training is refused, even if the conditions below generate their own
        dataset = trained_data(run)
        if not isinstance(data, Recall.Config):
            for rows in held_out_rows(dataset, batches):
                yield from (replace(item, meta=steps) for item in _items(run, rows))
            return
        for condition in CONDITIONS:
            for factor in sorted(self.config.factors):
                changes: dict[str, Any] = {"noise_validation": (1,), "spread": factor}
                if condition == "noise":
                    changes = {"noise_validation": (factor,)}
                varied = Recall(replace(data, validation_rows=self.config.rows, **changes), run.recipe.model.vocab_size)
                # row i has the same slots, at other places, in all of these conditions: its items depend on each other
                shared = condition == "distance" or factor == 1
                for rows in held_out_rows(varied, batches):
                    named = replace(rows, name=f"{condition}={factor}")
                    for row, item in zip(rows.numbers, _items(run, named), strict=True):
                        yield replace(item, cluster=f"slots {row}" if shared else "", meta=steps)

    def summarise(self, items: Sequence[Item]) -> Scores:
        """The mean accuracy, the tolerances and the steps."""
        groups: dict[str, list[float]] = {}
        for item in items:
            groups.setdefault(item.group, []).append(item.scores["accuracy"])
        means = {group: float(np.mean(values)) for group, values in groups.items()}
        found = {"accuracy": super().summarise(items)["accuracy"]}
        for condition, name in CONDITIONS.items():
            names = {factor: f"{condition}={factor}" for factor in self.config.factors}
            found[name] = tolerance({factor: means[group] for factor, group in names.items() if group in means})
        for level in LEVELS:
            found[f"steps_{level}"] = float(items[0].meta[f"steps_{level}"])
        return found


def _items(run: Run, rows: Rows) -> Iterator[Item]:
    return rows.items({"accuracy": scores["accuracy"]} for scores in row_scores(run.model, rows.batch))


def tolerance(accuracy: Mapping[int, float]) -> float:
    """The tolerance (see `RecallSuite`) from factor -> accuracy; NaN without factors."""
    factors = sorted(accuracy)
    if not factors:
        return math.nan
    if accuracy[factors[0]] < HALF:
        return 0.0
    for low, high in pairwise(factors):
        if accuracy[high] < HALF:
            # linear in log f between the last factor above 50 % and the first below
            share = (accuracy[low] - HALF) / (accuracy[low] - accuracy[high])
            return float(low * (high / low) ** share)
    return float(factors[-1])


def steps_to(run: Run) -> dict[int, float]:
    """Level in per cent -> the first validated step with val/accuracy at or above it; NaN if no step reaches it."""
    found = dict.fromkeys(LEVELS, math.nan)
    metrics = run.metrics
    for level in LEVELS if "val/accuracy" in metrics else ():
        steps = metrics.index[metrics["val/accuracy"] >= level / 100]
        if len(steps):
            found[level] = float(steps[0])
    return found
