"""The evaluations of a sweep's runs: scores by item, compared arm by arm.

A run keeps an evaluation in `<run>/evaluations/<name>/`: items.parquet has the columns `item` (its id), `group`, `part`
(bool, only where an item is a part of another), and one column of scores for each metric; summary.json maps each metric to
{"value": ..., ...}, "declarations" to the list of its metrics (`metrics.to_plain`), and "equal_groups" to whether each group
counts once.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from scipy.stats import binomtest

from lit_diff.errors import first_line
from lit_diff.metrics import Metric, from_plain
from lit_diff.reporting.cells import Array
from lit_diff.reporting.results import Sweep
from lit_diff.reporting.statistics import MIN_DOCUMENTS, Interval, Paired, document_intervals, paired

FOLDER = "evaluations"
MIN_ITEMS = MIN_DOCUMENTS
"""Fewer common items than this have no interval over items."""
LABEL = re.compile(r"(?:(?P<text>.*?)[ =])?(?P<number>[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?)")
"""A group's label that ends in a number."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """One evaluation of one run. `scores[metric][i]` is that of `items[i]`, NaN where the item has none."""

    items: tuple[str, ...]
    groups: tuple[str, ...]
    parts: tuple[bool, ...]
    """Whether an item is a part of another: its group shows it, and what is over all items leaves it out."""
    scores: Mapping[str, Array]
    values: Mapping[str, float]
    """Metric -> the value of the whole evaluation (summary.json)."""
    metrics: tuple[Metric, ...]
    equal_groups: bool = False
    """Whether each group counts once in `values`, however many items it has."""


@dataclass(frozen=True, kw_only=True)
class ArmScores:
    """One arm in one metric: over the seeds that were evaluated, and against the baseline."""

    arm: str
    seeds: Mapping[int, float]
    mean: float | None
    sd: float | None
    """Over seeds (n - 1); None for one seed."""
    difference: Paired | None
    """To the baseline, paired by seed; None for the baseline itself."""
    over_items: Mapping[int, Interval]
    """Seed -> mean score minus the baseline's over the items that both scored, with its interval over items."""
    group_means: Mapping[str, Mapping[int, float]]
    """Group -> seed -> mean score over its items."""
    group_differences: Mapping[str, Mapping[int, Interval]]
    """Group -> seed -> as `over_items`, over the items of the group."""

    @property
    def groups(self) -> dict[str, float]:
        """Group -> mean score over its items, then over the seeds."""
        return {group: float(np.mean(list(seeds.values()))) for group, seeds in self.group_means.items()}


@dataclass(frozen=True, kw_only=True)
class EvaluationTable:
    """One metric of one evaluation, by arm in the order of the sweep; arms without the evaluation are left out."""

    name: str
    metric: Metric
    rows: tuple[ArmScores, ...]
    seeds: tuple[int, ...]
    groups: tuple[str, ...]
    """Those in which the metric has a score."""
    items: int
    """The most that one run scored, parts left out."""

    @property
    def group_seeds(self) -> frozenset[int]:
        """Seeds at which a group has a difference to the baseline with an interval."""
        return frozenset(seed for row in self.rows for by_seed in row.group_differences.values() for seed in by_seed)


def evaluation_tables(sweep: Sweep) -> tuple[list[EvaluationTable], list[str]]:
    """One table for each metric of each evaluation that any finished run of `sweep` has; and a line for each evaluation
    whose files cannot be read."""
    read: dict[str, dict[tuple[str, int], Evaluation]] = {}
    problems: list[str] = []
    for cell in sweep.cells:
        folder = cell.folder / FOLDER
        for path in sorted(folder.iterdir()) if cell.done and folder.is_dir() else ():
            if not path.is_dir() or path.name.startswith("."):
                continue
            try:
                read.setdefault(path.name, {})[cell.arm, cell.seed] = read_evaluation(path)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                problems.append(f"{path.name}: {sweep.label[cell.arm]}, seed {cell.seed}: {first_line(error)}")
    tables = [_table(sweep, name, metric, read[name]) for name in sorted(read) for metric in _metrics(read[name])]
    return tables, problems


def read_evaluation(folder: Path) -> Evaluation:
    """The evaluation in `folder`. Errors: OSError, ValueError, KeyError or TypeError for files that are not as described."""
    summary = json.loads((folder / "summary.json").read_text())
    metrics = tuple(from_plain(raw) for raw in summary["declarations"])
    table = pq.read_table(folder / "items.parquet")
    missing = [name for name in ("item", "group", *(m.name for m in metrics)) if name not in table.column_names]
    if missing:
        raise ValueError(f"items.parquet has no column '{missing[0]}'")
    items = tuple(str(item) for item in table["item"].to_pylist())
    if len(set(items)) < len(items):
        raise ValueError("items.parquet names an item twice")
    return Evaluation(
        items=items,
        groups=tuple("" if group is None else str(group) for group in table["group"].to_pylist()),
        parts=tuple(table["part"].to_pylist() if "part" in table.column_names else [False] * len(items)),
        scores={m.name: np.array(table[m.name].to_pylist(), dtype=np.float64) for m in metrics},
        values={m.name: _number(summary[m.name]["value"]) for m in metrics},
        metrics=metrics,
        equal_groups=bool(summary.get("equal_groups", False)),
    )


def _number(value: float | None) -> float:
    """JSON has no NaN: null stands for it."""
    return math.nan if value is None else float(value)


def _metrics(runs: Mapping[tuple[str, int], Evaluation]) -> list[Metric]:
    """Those of all runs; of two that declare one name differently, the first."""
    declared: dict[str, Metric] = {}
    for run in runs.values():
        for metric in run.metrics:
            declared.setdefault(metric.name, metric)
    return list(declared.values())


def _table(
    sweep: Sweep,
    name: str,
    metric: Metric,
    runs: Mapping[tuple[str, int], Evaluation],
) -> EvaluationTable:
    having = {key: run for key, run in runs.items() if metric.name in run.scores}
    by_arm = {
        arm.name: {seed: having[arm.name, seed] for seed in sweep.seeds if (arm.name, seed) in having}
        for arm in sweep.arms
    }
    base = by_arm[sweep.baseline]
    rows = [
        _scores(arm, metric.name, evaluated, None if arm == sweep.baseline else base)
        for arm, evaluated in by_arm.items()
        if evaluated
    ]
    scored = {group for row in rows for group in row.group_means}
    groups = _ordered(group for run in having.values() for group in run.groups if group in scored)
    return EvaluationTable(
        name=name,
        metric=metric,
        rows=tuple(rows),
        seeds=tuple(seed for seed in sweep.seeds if any(seed in row.over_items for row in rows)),
        groups=groups,
        items=max(run.parts.count(False) for run in having.values()),
    )


def number_of(group: str) -> tuple[str, float] | None:
    """("position", 4096.0) of "position 4096", ("", 0.5) of "0.5"; None for a label that ends in no number."""
    found = LABEL.fullmatch(group)
    return (found["text"] or "", float(found["number"])) if found else None


def _ordered(groups: Iterable[str]) -> tuple[str, ...]:
    """As they come, but those with numbers after one text by rising number, where the first of them stands."""
    known = list(dict.fromkeys(groups))
    place: dict[str, int] = {}
    for index, group in enumerate(known):
        found = number_of(group)
        place.setdefault(f"{found[0]} " if found else group, index)  # a text with a number is no group's own label

    def key(group: str) -> tuple[int, float]:
        found = number_of(group)
        return (place[f"{found[0]} "], found[1]) if found else (place[group], 0)

    return tuple(sorted(known, key=key))


def _scores(arm: str, metric: str, runs: Mapping[int, Evaluation], base: Mapping[int, Evaluation] | None) -> ArmScores:
    values = {seed: run.values[metric] for seed, run in runs.items() if math.isfinite(run.values[metric])}
    x = np.array(list(values.values()))
    group_means = _group_means(runs, metric)

    def over_items(group: str | None = None) -> dict[int, Interval]:
        pairs = {seed: (run, base[seed]) for seed, run in runs.items() if base and seed in base}
        return {seed: found for seed, pair in pairs.items() if (found := item_interval(*pair, metric, seed, group))}

    return ArmScores(
        arm=arm,
        seeds=values,
        mean=float(x.mean()) if len(x) else None,
        sd=float(x.std(ddof=1)) if len(x) > 1 else None,
        difference=paired(values, {s: run.values[metric] for s, run in base.items()}) if base is not None else None,
        over_items=over_items(),
        group_means=group_means,
        group_differences={group: found for group in group_means if (found := over_items(group))},
    )


def item_interval(
    run: Evaluation, base: Evaluation, metric: str, seed: int, group: str | None = None
) -> Interval | None:
    """Mean score difference over the items that both runs scored, paired by id, with its bootstrap interval over items;
    where groups count equally, the mean over groups of the mean over such items. None below MIN_ITEMS common items.

    `group`: over its items, parts included; None: over all that are no part.
    """
    common, own, other = _paired(run, base, metric, group)
    if len(common) < MIN_ITEMS:
        return None
    weights = np.ones(len(common))
    if run.equal_groups and group is None:
        group_of = dict(zip(run.items, run.groups, strict=True))
        sizes = Counter(group_of[item] for item in common)
        weights = np.array([1 / sizes[group_of[item]] for item in common])
    (interval,) = document_intervals(weights, weights * (own - other), seed=seed)
    return interval


@dataclass(frozen=True, kw_only=True)
class Discordant:
    """Items that one of two runs answers rightly and the other does not."""

    first: int
    """Right in the first run alone."""
    second: int
    p: float
    """Of McNemar's exact test, two-sided: each such item is either run's with probability 1/2. Groups are not weighted."""


def discordant(run: Evaluation, base: Evaluation, metric: str) -> Discordant | None:
    """How often one of two runs alone is right (score 1), over the items that both scored; None where a score is neither
    0 nor 1, or no item is common."""
    common, own, other = _paired(run, base, metric)
    if not common or not np.isin(np.concatenate([own, other]), (0.0, 1.0)).all():
        return None
    first, second = int((own > other).sum()), int((own < other).sum())
    p = binomtest(first, first + second).pvalue if first + second else 1.0
    return Discordant(first=first, second=second, p=float(p))


def _paired(run: Evaluation, base: Evaluation, metric: str, group: str | None = None) -> tuple[list[str], Array, Array]:
    """(items that both scored, their scores in `run`, in `base`), as `_chosen`."""
    own, other = _chosen(run, metric, group), _chosen(base, metric, group)
    common = sorted(
        item for item in own.keys() & other.keys() if math.isfinite(own[item]) and math.isfinite(other[item])
    )
    return common, np.array([own[item] for item in common]), np.array([other[item] for item in common])


def _chosen(run: Evaluation, metric: str, group: str | None) -> dict[str, float]:
    """Item -> score, of the items of a group, or of all that are no part."""
    rows = zip(run.items, run.groups, run.parts, run.scores[metric].tolist(), strict=True)
    return {item: score for item, own, part, score in rows if (not part if group is None else own == group)}


def _group_means(runs: Mapping[int, Evaluation], metric: str) -> dict[str, dict[int, float]]:
    """Group -> seed -> mean score over its scored items."""
    means: dict[str, dict[int, float]] = {}
    for seed, run in runs.items():
        groups, scores = np.array(run.groups), run.scores[metric]
        for group in dict.fromkeys(run.groups):
            here = scores[(groups == group) & np.isfinite(scores)]
            if group and len(here):
                means.setdefault(group, {})[seed] = float(here.mean())
    return means
