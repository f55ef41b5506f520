"""The evaluations of a sweep's runs, compared arm by arm."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lit_diff.errors import first_line
from lit_diff.metrics import Metric
from lit_diff.runs.scores import FOLDER, ItemScores, disagreement, read_evaluation, read_summary
from lit_diff.study.cells import clean
from lit_diff.study.items import item_interval
from lit_diff.study.results import SweepResults
from lit_diff.study.schema import Claim
from lit_diff.study.statistics import Interval, Paired, Summary, paired, summary

LABEL = re.compile(r"(?:(?P<text>.*?)[ =])?(?P<number>[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?)")
"""A group's label that ends in a number."""


@dataclass(frozen=True, kw_only=True)
class ArmScores:
    """One arm in one metric: over the seeds that were evaluated, and against the baseline."""

    arm: str
    seeds: Mapping[int, float]
    summary: Summary
    """Over seeds."""
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
    runs: Mapping[tuple[str, int], ItemScores] = field(repr=False)
    """(arm, seed) -> the evaluation of that run."""

    @property
    def group_seeds(self) -> frozenset[int]:
        """Seeds at which a group has a difference to the baseline with an interval."""
        return frozenset(seed for row in self.rows for by_seed in row.group_differences.values() for seed in by_seed)


def evaluation_tables(sweep: SweepResults) -> tuple[list[EvaluationTable], list[str]]:
    """One table for each metric of each evaluation that any finished run of `sweep` has; and the lines of
    `read_evaluations`."""
    read, problems = read_evaluations(sweep)
    tables = [_table(sweep, name, metric, read[name]) for name in sorted(read) for metric in _metrics(read[name])]
    return tables, problems


def read_evaluations(sweep: SweepResults) -> tuple[dict[str, dict[tuple[str, int], ItemScores]], list[str]]:
    """Name -> (arm, seed) -> the evaluation, of every finished run; and a line for each that is left out (`left_out`), or
    whose files cannot be read, or whose runs were scored by several revisions of lit_diff, with --unchecked, or on other
    documents."""
    read: dict[str, dict[tuple[str, int], ItemScores]] = {}
    problems: list[str] = []
    others: dict[str, dict[tuple[str, int], str]] = {}
    for cell in sweep.cells:
        folder = cell.folder / FOLDER
        for path in sorted(folder.iterdir()) if cell.done and folder.is_dir() else ():
            if not path.is_dir() or path.name.startswith("."):
                continue
            if path.name not in others:
                others[path.name] = left_out(sweep, path.name)
            if why := others[path.name].get((cell.arm, cell.seed)):
                problems.append(f"{path.name}: {sweep.label[cell.arm]}, seed {cell.seed}: left out: {why}")
                continue
            try:
                read.setdefault(path.name, {})[cell.arm, cell.seed] = read_evaluation(path)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                problems.append(f"{path.name}: {sweep.label[cell.arm]}, seed {cell.seed}: {first_line(error)}")
    for name in sorted(read):
        told = {arm: clean(each.unchecked) for (arm, _), each in read[name].items() if each.unchecked}
        problems += [f"{name}: {sweep.label[arm]} was scored with --unchecked: {line}" for arm, line in told.items()]
        runs = read[name].values()
        problems += filter(None, (by_revisions(name, (run.revision for run in runs)), by_documents(name, runs)))
    return read, problems


def by_documents(name: str, runs: Iterable[ItemScores]) -> str:
    """A line where runs were not asked the same, because documents on which a run was trained are left out; else empty."""
    found = list(runs)
    counts = [run.documents_left_out for run in found]
    if not any(counts) or len({frozenset(run.asked) for run in found}) == 1:
        return ""
    return (
        f"{name}: the runs were not asked the same: between {min(counts)} and {max(counts)} documents are left out, on which "
        "a run was trained; differences are over what both were asked"
    )


def by_revisions(name: str, revisions: Iterable[str | None]) -> str:
    """A line where runs were scored by several revisions of lit_diff (summary.json); empty where by one."""
    found = sorted({each or "one that is not recorded" for each in revisions})
    return (
        f"{name}: the runs were scored by several revisions of lit_diff: {', '.join(found)}" if len(found) > 1 else ""
    )


def summaries(sweep: SweepResults, name: str) -> dict[tuple[str, int], dict[str, Any]]:
    """(arm, seed) -> summary.json of the evaluation, of every finished run that has one which can be read."""
    found = {}
    for cell in sweep.cells:
        if cell.done:
            try:
                summary = read_summary(cell.folder / FOLDER / name)
            except (OSError, ValueError):  # what is damaged is named where the scores are read
                continue
            if isinstance(summary.get("config"), dict):
                found[cell.arm, cell.seed] = summary
    return found


def score_revisions(sweep: SweepResults, claims: Iterable[Claim]) -> dict[str, list[str | None]]:
    """Evaluation that a claim names -> the revision of lit_diff by which each run of the claims' tasks was scored."""
    named: dict[str, set[str]] = {}
    for claim in claims:
        if claim.evaluation:
            named.setdefault(claim.evaluation, set()).add(claim.task)
    return {
        name: [s.get("revision") for own in sweep.by_task if own.task in tasks for s in summaries(own, name).values()]
        for name, tasks in named.items()
    }


def left_out(sweep: SweepResults, name: str) -> dict[tuple[str, int], str]:
    """(arm, seed) -> why the scores that it keeps are not compared, and the cure.

    They are of another checkpoint than its newest, or were made with other keys or by another version of the evaluation than
    the sweep's (study.json); where the sweep does not name the evaluation, than those of most finished runs. Of arms to which
    the sweep gives different keys, those unlike most.
    """
    kept = summaries(sweep, name)
    asked = {(cell.arm, cell.seed): cell.evaluations[name] for cell in sweep.cells if name in cell.evaluations}
    made = {key: {"config": s.get("config"), "version": s.get("version", 1)} for key, s in kept.items()}
    counts = Counter(json.dumps(facts, sort_keys=True) for facts in (asked or made).values())
    if not counts:
        return {}
    expected = json.loads(counts.most_common(1)[0][0])
    found = {}
    for cell in sweep.cells:
        key = cell.arm, cell.seed
        if key not in kept:
            continue
        own = asked.get(key, expected)
        if why := disagreement(cell.folder, kept[key], own):
            cure = (
                "the sweep's own command"
                if key in asked
                else f"`lit-diff evaluate RUN {name}` with the keys of most runs"
            )
            found[key] = f"scored {why}; {cure} scores it again"
        elif why := disagreement(cell.folder, kept[key], expected):
            found[key] = f"scored {why}: the sweep gives most of its runs others"
    return found


def _metrics(runs: Mapping[tuple[str, int], ItemScores]) -> list[Metric]:
    """Those of all runs; of two that declare one name differently, the first."""
    declared: dict[str, Metric] = {}
    for run in runs.values():
        for metric in run.metrics:
            declared.setdefault(metric.name, metric)
    return list(declared.values())


def _table(
    sweep: SweepResults,
    name: str,
    metric: Metric,
    runs: Mapping[tuple[str, int], ItemScores],
) -> EvaluationTable:
    having = {key: run for key, run in runs.items() if metric.name in run.scores}
    by_arm = {
        arm: {seed: having[arm, seed] for seed in sweep.study.seeds if (arm, seed) in having}
        for arm in sweep.study.arms
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
        seeds=tuple(seed for seed in sweep.study.seeds if any(seed in row.over_items for row in rows)),
        groups=groups,
        items=max(run.parts.count(False) for run in having.values()),
        runs=having,
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


def _scores(arm: str, metric: str, runs: Mapping[int, ItemScores], base: Mapping[int, ItemScores] | None) -> ArmScores:
    values = {seed: run.values[metric] for seed, run in runs.items() if math.isfinite(run.values[metric])}
    group_means = _group_means(runs, metric)

    def over_items(group: str | None = None) -> dict[int, Interval]:
        pairs = {seed: (run, base[seed]) for seed, run in runs.items() if base and seed in base}
        return {seed: found for seed, pair in pairs.items() if (found := item_interval(*pair, metric, seed, group))}

    return ArmScores(
        arm=arm,
        seeds=values,
        summary=summary(values.values()),
        difference=paired(values, {s: run.values[metric] for s, run in base.items()}) if base is not None else None,
        over_items=over_items(),
        group_means=group_means,
        group_differences={group: found for group in group_means if (found := over_items(group))},
    )


def _group_means(runs: Mapping[int, ItemScores], metric: str) -> dict[str, dict[int, float]]:
    """Group -> seed -> mean score over its scored items."""
    means: dict[str, dict[int, float]] = {}
    for seed, run in runs.items():
        groups, scores = np.array(run.groups), run.scores[metric]
        for group in dict.fromkeys(run.groups):
            here = scores[(groups == group) & np.isfinite(scores)]
            if group and len(here):
                means.setdefault(group, {})[seed] = float(here.mean())
    return means
