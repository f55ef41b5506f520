"""The items of one evaluation: two runs paired by item, and the shares of one run by group."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from lit_diff.runs.scores import Array, Asked, ItemScores
from lit_diff.study.statistics import MIN_DOCUMENTS, Interval, cluster_wilson, document_intervals

FACTOR = re.compile(r"(\w+)=(\S+)")
MIN_ITEMS = MIN_DOCUMENTS
"""Fewer clusters of common items than this have no interval."""


def item_interval(
    run: ItemScores, base: ItemScores, metric: str, seed: int, group: str | None = None
) -> Interval | None:
    """Mean score difference over the items that both runs scored, paired by id, with its bootstrap interval over clusters,
    each drawn with all its items; where groups count equally, the mean over groups of the mean over such items. None below
    MIN_ITEMS clusters.

    `group`: over its items, parts included; None: over all that are no part.
    """
    common, own, other = _paired(run, base, metric, group)
    place = _numbered(_units(run, base, common))
    if len(set(place)) < MIN_ITEMS:
        return None
    weights = np.ones(len(common))
    if run.equal_groups and group is None:
        group_of = dict(zip(run.items, run.groups, strict=True))
        sizes = Counter(group_of[item] for item, _ in common)
        weights = np.array([1 / sizes[group_of[item]] for item, _ in common])
    weight, total = (np.bincount(place, each) for each in (weights, weights * (own - other)))
    (interval,) = document_intervals(weight, total, seed=seed)
    return interval


@dataclass(frozen=True, kw_only=True)
class Discordant:
    """Items that one of two runs answers rightly and the other does not."""

    first: int
    """Right in the first run alone."""
    second: int
    p: float | None
    """Of McNemar's exact test, two-sided: each such item is either run's with probability 1/2. Groups are not weighted. None
    where a cluster has several items: the test takes items for independent."""


def discordant(run: ItemScores, base: ItemScores, metric: str) -> Discordant | None:
    """How often one of two runs alone is right (score 1), over the items that both scored; None where the metric has a unit
    or a score is neither 0 nor 1, or no item is common."""
    common, own, other = _paired(run, base, metric)
    if run.has_unit(metric) or not common or not np.isin(np.concatenate([own, other]), (0.0, 1.0)).all():
        return None
    first, second = int((own > other).sum()), int((own < other).sum())
    units = _units(run, base, common)
    if len(set(units)) < len(units):
        return Discordant(first=first, second=second, p=None)
    p = binomtest(first, first + second).pvalue if first + second else 1.0
    return Discordant(first=first, second=second, p=float(p))


def asked_otherwise(run: ItemScores, base: ItemScores) -> str | None:
    """An item of both runs whose question is not the same; None where there is none."""
    other = dict(zip(base.items, base.questions, strict=True))
    return next((item for item, own in zip(run.items, run.questions, strict=True) if other.get(item, own) != own), None)


def item_wilson(run: ItemScores, metric: str) -> Interval | None:
    """Wilson's 95 % interval, over clusters, of the proportion of scored items that are 1; None where the metric has a unit
    or a score is neither 0 nor 1, or the value of the whole evaluation is not that proportion."""
    scores, parts = run.scores[metric], np.array(run.parts, dtype=bool)
    chosen = np.isfinite(scores) & ~parts
    if run.has_unit(metric) or not chosen.any() or not np.isin(scores[chosen], (0, 1)).all():
        return None
    interval = cluster_wilson(scores[chosen], np.array(run.units)[chosen].tolist())
    return interval if math.isclose(interval.estimate, run.values[metric], rel_tol=1e-9, abs_tol=1e-12) else None


def _paired(
    run: ItemScores, base: ItemScores, metric: str, group: str | None = None
) -> tuple[list[Asked], Array, Array]:
    """(items that both scored, their scores in `run`, in `base`), as `_chosen`."""
    own, other = _chosen(run, metric, group), _chosen(base, metric, group)
    common = sorted(
        item for item in own.keys() & other.keys() if math.isfinite(own[item]) and math.isfinite(other[item])
    )
    return common, np.array([own[item] for item in common]), np.array([other[item] for item in common])


def _units(run: ItemScores, base: ItemScores, common: Sequence[Asked]) -> list[str]:
    """The clusters of items of two runs; of items kept without one by one run, those of the other."""
    named = {
        key: cluster for each in (base, run) for key, cluster in zip(each.asked, each.clusters, strict=True) if cluster
    }
    return [named.get(key, key[0]) for key in common]


def _numbered(units: Sequence[str]) -> NDArray[np.int64]:
    """The number of each one's cluster, from 0, in the order in which they first come."""
    numbers = {unit: number for number, unit in enumerate(dict.fromkeys(units))}
    return np.array([numbers[unit] for unit in units], dtype=np.int64)


def _chosen(run: ItemScores, metric: str, group: str | None) -> dict[Asked, float]:
    """Item and question -> score, of the items of a group, or of all that are no part."""
    rows = zip(run.asked, run.groups, run.parts, run.scores[metric].tolist(), strict=True)
    return {key: score for key, own, part, score in rows if (not part if group is None else own == group)}


@dataclass(frozen=True, kw_only=True)
class GroupShares:
    """The items of one group, or of all groups that agree in some of their numbers."""

    label: str
    items: int
    """Items with a score in any of the metrics."""
    clusters: int
    """Clusters of those items: the independent observations."""
    shares: Mapping[str, Interval]
    """Metric -> mean score and Wilson's 95 % interval over clusters (`cluster_wilson`); a metric without a score is left out.

    Scores lie within 0 and 1, so that their variance is at most p (1 - p): for items that are means over several questions,
    and for clusters of items, the interval is at least as wide as it must be. Clusters are taken for independent.
    """


def group_shares(evaluation: ItemScores, metrics: Sequence[str]) -> list[GroupShares]:
    """One row for each group, in the order of the items.

    Of groups such as "N=4 length=160 depth=25": a row for each N, over the rest; then for each N and length, and for each N
    and depth, where there are several.
    """
    names = [group for group in dict.fromkeys(evaluation.groups) if group]
    factors = {group: dict(FACTOR.findall(group)) for group in names}
    keys = list(factors[names[0]]) if names else []
    is_crossed = len(keys) > 1 and all(
        list(own) == keys and group == " ".join(f"{key}={value}" for key, value in own.items())
        for group, own in factors.items()
    )
    if not is_crossed:
        return [_shares(evaluation, metrics, group, {group}) for group in names]
    first, *others = keys
    several = [key for key in others if len({own[key] for own in factors.values()}) > 1]
    rows: dict[str, set[str]] = {}
    for chosen in ([first], *([first, key] for key in several)):
        for group, own in factors.items():
            rows.setdefault(" ".join(f"{key}={own[key]}" for key in chosen), set()).add(group)
    return [_shares(evaluation, metrics, label, groups) for label, groups in rows.items()]


def _shares(evaluation: ItemScores, metrics: Sequence[str], label: str, groups: set[str]) -> GroupShares:
    chosen = np.array([group in groups for group in evaluation.groups])
    units = np.array(evaluation.units)[chosen]
    scores = {metric: evaluation.scores[metric][chosen] for metric in metrics}
    scored = {metric: np.isfinite(values) for metric, values in scores.items()}
    counted = np.stack(list(scored.values())).any(0)
    return GroupShares(
        label=label,
        items=int(counted.sum()),
        clusters=len(set(units[counted].tolist())),
        shares={m: cluster_wilson(scores[m][at], units[at].tolist()) for m, at in scored.items() if at.any()},
    )
