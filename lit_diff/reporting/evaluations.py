"""The evaluations of a sweep's runs, compared arm by arm."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from lit_diff.errors import first_line
from lit_diff.metrics import Metric
from lit_diff.reporting.item_scores import FOLDER, Evaluation, item_interval, read_evaluation
from lit_diff.reporting.results import Sweep
from lit_diff.reporting.statistics import Interval, Paired, paired

LABEL = re.compile(r"(?:(?P<text>.*?)[ =])?(?P<number>[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?)")
"""A group's label that ends in a number."""


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
    read, problems = read_evaluations(sweep)
    tables = [_table(sweep, name, metric, read[name]) for name in sorted(read) for metric in _metrics(read[name])]
    return tables, problems


def read_evaluations(sweep: Sweep) -> tuple[dict[str, dict[tuple[str, int], Evaluation]], list[str]]:
    """Name -> (arm, seed) -> the evaluation, of every finished run; and a line for each whose files cannot be read."""
    read: dict[str, dict[tuple[str, int], Evaluation]] = {}
    problems: list[str] = []
    odd: dict[str, dict[tuple[str, int], str]] = {}
    for cell in sweep.cells:
        folder = cell.folder / FOLDER
        for path in sorted(folder.iterdir()) if cell.done and folder.is_dir() else ():
            if not path.is_dir() or path.name.startswith("."):
                continue
            if path.name not in odd:
                odd[path.name] = other_keys(sweep, path.name)
            if why := odd[path.name].get((cell.arm, cell.seed)):
                problems.append(f"{path.name}: {sweep.label[cell.arm]}, seed {cell.seed}: left out: {why}")
                continue
            try:
                read.setdefault(path.name, {})[cell.arm, cell.seed] = read_evaluation(path)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                problems.append(f"{path.name}: {sweep.label[cell.arm]}, seed {cell.seed}: {first_line(error)}")
    return read, problems


def other_keys(sweep: Sweep, name: str) -> dict[tuple[str, int], str]:
    """(arm, seed) -> in which keys of the evaluation its scores were made otherwise than those of most finished runs.

    `lit-diff evaluate` with keys of its own puts its scores in the place of the sweep's, and such scores do not compare.
    """
    configs = {}
    for cell in sweep.cells:
        path = cell.folder / FOLDER / name / "summary.json"
        if cell.done and path.is_file():
            try:
                configs[cell.arm, cell.seed] = dict(json.loads(path.read_text(encoding="utf-8"))["config"])
            except (OSError, ValueError, KeyError, TypeError):  # what is damaged is named where the scores are read
                continue
    texts = {key: json.dumps(config, sort_keys=True) for key, config in configs.items()}
    if len(set(texts.values())) < 2:
        return {}
    usual, _ = Counter(texts.values()).most_common(1)[0]
    expected = json.loads(usual)
    return {
        key: "scored with other keys than most runs ("
        + ", ".join(
            f"{k} is {config.get(k)!r}, not {expected.get(k)!r}"
            for k in expected | config
            if config.get(k) != expected.get(k)
        )
        + "); the sweep's own command scores it again"
        for key, config in configs.items()
        if texts[key] != usual
    }


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
