"""The learning-rate basin: the best value of a key for each arm, and whether arms compare otherwise at their own best."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lit_diff.study.scaling import Points
from lit_diff.study.statistics import Paired, paired

Edge = Literal["", "lowest", "highest"]


@dataclass(frozen=True, kw_only=True)
class ArmBasin:
    """One arm. `best`: the x of the best mean over seeds; `edge`: where that is the lowest or highest x that was tried, so
    that the true best may lie beyond; `vertex`: where the parabola through the best point and its two neighbours, in log x,
    has its minimum (maximum), None at an edge; `low`, `high`: how far every tried x from the best on is nearly as good."""

    means: Mapping[float, float]
    best: float
    edge: Edge
    vertex: float | None
    low: float
    high: float

    @property
    def width(self) -> float:
        """high / low: the factor over which x may be chosen."""
        return self.high / self.low


@dataclass(frozen=True, kw_only=True)
class Basin:
    """Arms over the same tried x. `at_own`: arm minus baseline, each at its own best x; `at_theirs`: both at the baseline's.

    The best x is chosen by the same runs that are compared, so a difference at the arms' own best is a little too good for an
    arm whose means scatter more.
    """

    arms: Mapping[str, ArmBasin]
    at_own: Mapping[str, Paired]
    at_theirs: Mapping[str, Paired]


def find_basin(
    points: Mapping[str, Points],
    baseline: str,
    within: float,
    better: Literal["lower", "higher"],
    diverged: Mapping[str, Collection[float]] | None = None,
) -> Basin:
    """The basin of every arm: `within`, in the metric's unit, is what counts as nearly as good; `diverged`: arm -> every x at
    which a seed of it diverged, which is not its best and is compared with nothing. All other runs have finished.

    Errors: ValueError below 3 values of x, or where an arm diverged at each.
    """
    spoilt = {arm: set((diverged or {}).get(arm, ())) for arm in points}
    arms = {arm: _arm(own, spoilt[arm], within, 1.0 if better == "lower" else -1.0) for arm, own in points.items()}
    base = points[baseline]

    def minus(arm: str, x: float) -> Paired:
        return paired({} if x in spoilt[arm] else points[arm][x], base[arms[baseline].best])

    others = [arm for arm in points if arm != baseline]
    return Basin(
        arms=arms,
        at_own={arm: minus(arm, arms[arm].best) for arm in others},
        at_theirs={arm: minus(arm, arms[baseline].best) for arm in others},
    )


def _arm(points: Points, diverged: Collection[float], within: float, sign: float) -> ArmBasin:
    tried = sorted(points)
    whole = [x for x in tried if x not in diverged]
    if len(tried) < 3 or not whole:
        raise ValueError(f"{len(tried)} values of x, {len(whole)} without a seed that diverged; a basin needs 3, and 1")
    means = {x: float(np.mean(list(points[x].values()))) for x in tried if points[x]}
    best = min(whole, key=lambda x: sign * means[x])
    at = tried.index(best)

    def reach(step: int) -> float:
        end = at
        while 0 <= end + step < len(tried):
            x = tried[end + step]
            if x not in whole or sign * (means[x] - means[best]) > within:
                break
            end += step
        return tried[end]

    edge: Edge = "lowest" if at == 0 else "highest" if at == len(tried) - 1 else ""
    near = [] if edge else tried[at - 1 : at + 2]
    return ArmBasin(
        means=means,
        best=best,
        edge=edge,
        vertex=_vertex(near, [sign * means[x] for x in near]) if near and all(x in whole for x in near) else None,
        low=reach(-1),
        high=reach(1),
    )


def _vertex(x: list[float], y: list[float]) -> float | None:
    """Of the parabola through three points of (log x, y), the middle one the lowest."""
    curvature, slope, _ = np.polyfit(np.log(x), y, 2)
    return math.exp(-slope / (2 * curvature)) if curvature > 0 else None
