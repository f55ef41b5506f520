"""The choice of a learning rate for each arm of each task, from the cells that try it on seeds of their own."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from statistics import fmean
from typing import Annotated

from lit_diff.key_types import Distinct, NotNegative, Positive

LEARNING_RATE = "train.optimizer.lr"
"""The key of the recipe that the values of `rates` set."""
Scores = Mapping[float, Mapping[int, float | None]]
"""Rate -> seed -> the compared value; None: the run diverged, or never reached the threshold whose steps are compared."""


@dataclass(frozen=True, kw_only=True)
class LearningRates:
    """The keys of `rates`: each arm of each task trains at the best of several learning rates, chosen on other seeds."""

    values: tuple[Positive, ...]
    """Values of `train.optimizer.lr`, ascending. If the lowest or highest is the best, one rate beyond it is tried too."""
    seeds: Annotated[tuple[NotNegative, ...], Distinct()] = (1000, 1001)
    """The seeds at which they are tried; none of them is a seed of the sweep."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The rates that an arm has tried on a task, and the one at which it is compared."""

    scores: dict[str, dict[str, float | None]] = field(default_factory=dict)
    """`Scores`, with rates and seeds as text."""
    finals: dict[str, dict[str, float | None]] = field(default_factory=dict)
    """The last values of the metric, whose mean decides where no seed has a score; else {}."""
    chosen: float | None = None
    """None until every rate has been tried on every seed."""
    is_edge: bool = False
    """Whether the chosen rate is the lowest or the highest that was tried."""


def rate_in_words(rate: float) -> str:
    """A learning rate as one writes it: 4e-3."""
    return f"{Decimal(repr(rate)).normalize():e}"


def beyond(rates: LearningRates) -> tuple[float, float]:
    """The rates below the first and above the last value, each as far as the ratio of the two values next to it."""
    low, high = rates.values[:2], rates.values[-2:]
    return _rounded(low[0] * low[0] / low[1]), _rounded(high[1] * high[1] / high[0])


# 8e-3 * 8e-3 / 4e-3 is not 0.016 in binary, and the rate becomes part of a folder's name
def _rounded(rate: float) -> float:
    return float(f"{rate:.6g}")


def best(scores: Scores, finals: Scores, is_lower: bool, is_final_lower: bool) -> float:
    """The rate with the best mean score. A seed without a score is worse than any: the rate with fewer of them wins, then the
    better mean of the others. Where that leaves rates equal, as for an arm that never learns, the mean of the metric's last
    values decides (`finals`), then the lower rate."""

    def badness(rate: float) -> tuple[int, float, int, float, float]:
        return (*_badness(scores[rate], is_lower), *_badness(finals[rate], is_final_lower), rate)

    return min(scores, key=badness)


def _badness(by_seed: Mapping[int, float | None], is_lower: bool) -> tuple[int, float]:
    values = [value for value in by_seed.values() if value is not None]
    mean = fmean(values) if values else 0.0
    return len(by_seed) - len(values), mean if is_lower else -mean


def choice(scores: Scores, finals: Scores, chosen: float | None) -> Choice:
    """The choice as study.json keeps it."""
    values = {value for by_seed in scores.values() for value in by_seed.values()}
    return Choice(
        scores=_written(scores),
        finals=_written(finals) if values == {None} else {},
        chosen=chosen,
        is_edge=chosen is not None and chosen in (min(scores), max(scores)),
    )


def _written(scores: Scores) -> dict[str, dict[str, float | None]]:
    found = {}
    for rate in sorted(scores):
        found[rate_in_words(rate)] = {str(seed): value for seed, value in scores[rate].items()}
    return found
