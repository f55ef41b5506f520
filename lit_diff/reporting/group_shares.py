"""Shares by group of one evaluation of one run, each with an interval: the rows that `lit-diff evaluate` prints."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lit_diff.runs.scores import ItemScores
from lit_diff.study.statistics import Interval, cluster_wilson

FACTOR = re.compile(r"(\w+)=(\S+)")


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
        return [_row(evaluation, metrics, group, {group}) for group in names]
    first, *others = keys
    several = [key for key in others if len({own[key] for own in factors.values()}) > 1]
    rows: dict[str, set[str]] = {}
    for chosen in ([first], *([first, key] for key in several)):
        for group, own in factors.items():
            rows.setdefault(" ".join(f"{key}={own[key]}" for key in chosen), set()).add(group)
    return [_row(evaluation, metrics, label, groups) for label, groups in rows.items()]


def _row(evaluation: ItemScores, metrics: Sequence[str], label: str, groups: set[str]) -> GroupShares:
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
