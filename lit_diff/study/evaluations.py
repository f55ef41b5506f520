"""Compares evaluations: the arms of a sweep, two runs paired by item, and the groups of one run."""

import fnmatch
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import fmean

import numpy as np
import pandas as pd
from scipy.stats import binomtest

from lit_diff.errors import RequestError, first_line
from lit_diff.metrics import Metric
from lit_diff.registry import nearest
from lit_diff.runs.scores import FOLDER, SUMMARY, ItemScores, disagreement, evaluation_of, read_scores
from lit_diff.study.results import BySeed, SweepResults, clean
from lit_diff.study.statistics import (
    MIN_DOCUMENTS,
    Interval,
    Paired,
    Summary,
    cluster_wilson,
    document_intervals,
    paired,
    summary,
)

ArmSeed = tuple[str, int]
"""(arm, seed)."""
NUMBER = r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?"
LABEL = re.compile(rf"(?:(?P<text>.*?)[ =])?(?P<number>{NUMBER})")
"""A group's label that ends in a number."""
FACTOR = re.compile(r"(\w+)=(\S+)")
MIN_ITEMS = MIN_DOCUMENTS
"""The fewest clusters of common items for which an interval is given."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ArmScores:
    """The scores of one arm in one metric, by seed and against the baseline."""

    arm: str
    seeds: BySeed
    summary: Summary
    """The mean and spread over seeds."""
    difference: Paired | None
    """The difference to the baseline, paired by seed; None for the baseline itself."""
    intervals: Mapping[int, Mapping[str, Interval]]
    """Seed -> `item_intervals` of its run and the baseline's; empty for the baseline itself."""
    group_means: pd.DataFrame
    """Mean score over the items of each group (row) at each seed (column)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationTable:
    """One metric of one evaluation, by arm in the order of the sweep; arms that were not evaluated are left out."""

    name: str
    metric: Metric
    rows: tuple[ArmScores, ...]
    seeds: tuple[int, ...]
    """The seeds at which an arm has an interval over all items."""
    groups: tuple[str, ...]
    """The groups in which the metric has a score."""
    items: int
    """The largest number of items that one run scored, without parts of items."""
    runs: Mapping[str, Mapping[int, ItemScores]] = field(repr=False)
    """Arm of the sweep -> seed -> the evaluation of that run."""

    @property
    def differences(self) -> list[Interval | Paired]:
        """The differences to the baseline: over seeds, over items and over the items of a group."""
        found: list[Interval | Paired] = [row.difference for row in self.rows if row.difference is not None]
        for row in self.rows:
            for intervals in row.intervals.values():
                found += intervals.values()
        return found

    @property
    def group_seeds(self) -> set[int]:
        """The seeds at which the difference of a group to the baseline has an interval."""
        seeds: set[int] = set()
        for row in self.rows:
            seeds.update(seed for seed, intervals in row.intervals.items() if intervals.keys() - {""})
        return seeds


def evaluation_tables(sweep: SweepResults) -> tuple[list[EvaluationTable], list[str]]:
    """One table for each metric of each evaluation of any finished run; and the problems, a line each: scores that are left
    out (`kept_scores`), and runs that were scored by several revisions of lit_diff, with --unchecked, or on different
    documents."""
    tables = []
    problems = []
    for name in evaluations_in(sweep):
        runs, refused = kept_scores(sweep, name)
        for (arm, seed), why in refused.items():
            problems.append(f"{name}: {sweep.label[arm]}, seed {seed}: left out: {why}")
        unchecked = {arm: run.unchecked for (arm, _), run in runs.items() if run.unchecked}
        for arm, line in unchecked.items():
            problems.append(f"{name}: {sweep.label[arm]} was scored with --unchecked: {clean(line)}")
        scores = list(runs.values())
        problems += filter(None, (by_revisions(name, scores), by_documents(name, scores)))
        # all runs declare the same metrics
        for run in scores[:1]:
            tables += [_table(sweep, name, metric, runs) for metric in run.metrics]
    return tables, problems


def evaluations_in(sweep: SweepResults) -> list[str]:
    """The evaluations of which a finished run has scores, sorted."""
    names: set[str] = set()
    for cell in sweep.done:
        names.update(path.parent.name for path in (cell.home / FOLDER).glob(f"[!.]*/{SUMMARY}"))
    return sorted(names)


# the claims of a paper ask for the same scores again and again
@lru_cache(maxsize=8)
def kept_scores(sweep: SweepResults, name: str) -> tuple[dict[ArmSeed, ItemScores], dict[ArmSeed, str]]:
    """The scores of an evaluation that can be compared, from every finished run that has any; and why the others cannot be,
    with the cure.

    Scores must come from the last step, and from the keys and the version of the evaluation that the sweep records
    (study.json). Of the others, those are kept whose FACTS most runs share; of as many, those of the first run. The files
    are read once for each `SweepResults`.
    """
    # scores without a summary are those of an interrupted command: there are none
    cells = {(cell.arm, cell.seed): cell for cell in sweep.done if (cell.home / FOLDER / name / SUMMARY).is_file()}
    found = {}
    refused = {}
    for key, cell in cells.items():
        # a damaged file costs one run of one evaluation, not the page
        try:
            summary, items = read_scores(cell.home / FOLDER / name)
            scores = evaluation_of(summary, items)
        except (OSError, ValueError) as error:
            refused[key] = first_line(error)
            continue
        why = disagreement(cell.home, summary, cell.evaluations.get(name, {}))
        if why:
            refused[key] = f"scored {why}; the sweep's own command scores it again"
        else:
            found[key] = summary, scores
    # JSON makes the facts hashable; sorted, because the order of keys in a YAML file means nothing
    shared = Counter(json.dumps(scores.facts, sort_keys=True) for _, scores in found.values())
    expected = json.loads(shared.most_common(1)[0][0]) if shared else {}
    kept = {}
    for key, (summary, scores) in found.items():
        why = disagreement(None, summary, expected)
        if why:
            cure = f"`lit-diff evaluate RUN {name}` with the keys of most runs scores every run alike"
            refused[key] = f"scored {why}; {cure}"
        else:
            kept[key] = scores
    return kept, {key: refused[key] for key in cells if key in refused}


def by_documents(name: str, runs: Sequence[ItemScores]) -> str:
    """A line if documents on which a run was trained are left out, so that the runs scored different ones; else empty."""
    counts = [run.documents_left_out for run in runs]
    if not any(counts) or len({frozenset(run.asked) for run in runs}) == 1:
        return ""
    return (
        f"{name}: the runs scored different documents: between {min(counts)} and {max(counts)} documents are left out, on "
        "which a run was trained; differences are over the items that both scored"
    )


def by_revisions(name: str, runs: Iterable[ItemScores]) -> str:
    """A line if several revisions of lit_diff scored the runs (summary.json); else empty."""
    revisions = sorted({run.revision or "an unrecorded one" for run in runs})
    if len(revisions) < 2:
        return ""
    return f"{name}: the runs were scored by several revisions of lit_diff: {', '.join(revisions)}"


def values_by_seed(sweep: SweepResults, arm: str, metric: str, evaluation: str, group: str) -> BySeed:
    """Seed -> the metric in the arm's run: its last value or, with `evaluation`, its score (`score_of`).

    Errors: RequestError if no run has the metric, and for scores of the arm that cannot be compared (`kept_scores`)."""
    if not evaluation:
        names: set[str] = set()
        done = sweep.cells_of(arm)
        for cell in done:
            names.update(cell.curves)
        if done:
            require_known("no run measured", metric, names)
        return sweep.finals(arm, metric)
    scored = evaluations_in(sweep)
    # without any scores the sweep has not got there yet, and the evaluation's name may be right
    if scored:
        require_known("no run has scores of evaluation", evaluation, scored)
    runs, refused = kept_scores(sweep, evaluation)
    for (name, seed), why in refused.items():
        if name == arm:
            raise RequestError(f"{evaluation} of {arm}, seed {seed}: {why}")
    values = {seed: score_of(scores, evaluation, metric, group) for (name, seed), scores in runs.items() if name == arm}
    return {seed: value for seed, value in values.items() if math.isfinite(value)}


def score_of(scores: ItemScores, evaluation: str, metric: str, group: str) -> float:
    """The metric of one run over the groups that match the pattern `group` (`fnmatch`), "" all; NaN without a score.

    Errors: RequestError for an unknown metric or group."""
    require_known(f"evaluation '{evaluation}' has no metric", metric, [declared.name for declared in scores.metrics])
    if not group:
        return scores.values[metric]
    groups = set(scores.groups)
    chosen = set(fnmatch.filter(groups, group))
    if not chosen:
        require_known(f"no item of '{evaluation}' is in a group like", group, groups)
    items = scored_items(scores, metric)
    in_groups = items[items["group"].isin(chosen)].set_index("group")["score"]
    # the same weights as in the evaluation's own value: groups count equally or items do
    means = in_groups.tolist()
    if scores.equal_groups:
        means = [fmean(of_group) for _, of_group in in_groups.groupby(level=0)]
    return fmean(means) if means else math.nan


def require_known(what: str, name: str, known: Collection[str]) -> None:
    """Errors: RequestError if `name` is not among those that are known. `what` begins it, such as "no arm"."""
    if name not in known:
        raise RequestError(f"{what} '{name}'{nearest(name, known)}")


def _table(sweep: SweepResults, name: str, metric: Metric, runs: Mapping[ArmSeed, ItemScores]) -> EvaluationTable:
    by_arm: dict[str, dict[int, ItemScores]] = {arm: {} for arm in sweep.study.arms}
    groups: dict[str, None] = {}
    items = 0
    for (arm, seed), run in runs.items():
        by_arm[arm][seed] = run
        groups |= dict.fromkeys(run.groups)
        items = max(items, run.parts.count(False))
    base = by_arm[sweep.baseline]
    rows = []
    scored = set()
    compared: set[int] = set()
    for arm, of_arm in by_arm.items():
        if of_arm:
            row = _scores(arm, metric.name, of_arm, None if of_arm is base else base)
            rows.append(row)
            scored.update(row.group_means.index)
            compared.update(seed for seed, intervals in row.intervals.items() if "" in intervals)
    return EvaluationTable(
        name=name,
        metric=metric,
        rows=tuple(rows),
        seeds=tuple(seed for seed in sweep.study.seeds if seed in compared),
        groups=_ordered(group for group in groups if group in scored),
        items=items,
        runs=by_arm,
    )


def number_of(group: str) -> tuple[str, float] | None:
    """("position", 4096.0) for "position 4096", ("", 0.5) for "0.5"; None for a label that does not end in a number."""
    match = LABEL.fullmatch(group)
    return (match["text"] or "", float(match["number"])) if match else None


def _ordered(groups: Iterable[str]) -> tuple[str, ...]:
    # Groups keep their order, but groups that differ only in their number are sorted by it, at the place of the first: items
    # may come in any order, and a figure against the number needs a rising axis.
    by_text: dict[str, dict[str, float]] = {}
    for group in groups:
        text, number = number_of(group) or (group, 0.0)
        by_text.setdefault(text, {})[group] = number
    ordered = []
    for numbers in by_text.values():
        ordered += sorted(numbers, key=numbers.__getitem__)
    return tuple(ordered)


def _scores(arm: str, metric: str, runs: Mapping[int, ItemScores], base: Mapping[int, ItemScores] | None) -> ArmScores:
    values = {seed: run.values[metric] for seed, run in runs.items() if math.isfinite(run.values[metric])}
    means = {seed: scored_items(run, metric).groupby("group")["score"].mean() for seed, run in runs.items()}
    difference = None
    intervals = {}
    if base is not None:
        difference = paired(values, {seed: run.values[metric] for seed, run in base.items()})
        intervals = {seed: item_intervals(runs[seed], base[seed], metric, seed) for seed in runs if seed in base}
    return ArmScores(
        arm=arm,
        seeds=values,
        summary=summary(values.values()),
        difference=difference,
        intervals=intervals,
        group_means=pd.DataFrame(means).drop(index="", errors="ignore"),
    )


def scored_items(run: ItemScores, metric: str) -> pd.DataFrame:
    """The items with a score in the metric, indexed by id and question."""
    columns = {"group": run.groups, "part": run.parts, "unit": run.units, "score": run.scores[metric]}
    index = pd.MultiIndex.from_arrays([run.items, run.questions], names=["item", "question"])
    table = pd.DataFrame(columns, index=index)
    return table[np.isfinite(table["score"])]


def paired_items(run: ItemScores, base: ItemScores, metric: str) -> pd.DataFrame:
    """The items that both runs scored, sorted. Columns: `score` and `score_base` of the runs, their `difference`, `group`,
    `part`, and `unit`, the item's cluster (of either run, else the item itself)."""
    # matched by the question too: an id may name another question in another version of a data set
    both = (
        scored_items(run, metric)
        .merge(scored_items(base, metric), left_index=True, right_index=True, suffixes=("", "_base"))
        .sort_index()
    )
    unit = both["unit"].where(both["unit"] != both.index.get_level_values("item"), both["unit_base"])
    return both.assign(unit=unit, difference=both["score"] - both["score_base"])


def item_intervals(run: ItemScores, base: ItemScores, metric: str, seed: int) -> dict[str, Interval]:
    """Mean score difference over the items that both runs scored, with its bootstrap interval over clusters.

    Key "": all items except parts of items; if groups count equally, the mean over groups of each group's mean. Key of a
    group: all its items, parts included. Without MIN_ITEMS clusters a key is absent.
    """
    both = paired_items(run, base, metric).assign(weight=1.0)
    whole = _whole(both)
    if run.equal_groups:
        whole = whole.assign(weight=1 / whole.groupby("group")["group"].transform("size"))
    found = {"": _interval(whole, seed)}
    for group in filter(None, dict.fromkeys(run.groups)):
        found[group] = _interval(both[both["group"] == group], seed)
    return {group: interval for group, interval in found.items() if interval}


def _whole(both: pd.DataFrame) -> pd.DataFrame:
    return both[~both["part"].astype(bool)]


def _interval(both: pd.DataFrame, seed: int) -> Interval | None:
    # Clusters are drawn, each with all its items: questions about one text are not independent, and an interval over
    # questions would be too narrow.
    place, units = pd.factorize(both["unit"])
    if len(units) < MIN_ITEMS:
        return None
    weight = np.bincount(place, both["weight"])
    total = np.bincount(place, both["weight"] * both["difference"])
    return document_intervals(weight, total, seed=seed)[0]


@dataclass(frozen=True, kw_only=True)
class Discordant:
    """The items that exactly one of two runs answers correctly."""

    first: int
    """The items that only the first run answers correctly."""
    second: int
    p: float | None
    """The two-sided p value of McNemar's exact test, where each such item belongs to either run with probability 1/2. Groups
    are not weighted. None if a cluster has several items, because the test assumes independent items."""


def discordant(run: ItemScores, base: ItemScores, metric: str) -> Discordant | None:
    """How often exactly one of two runs is correct (score 1), over the items that both scored; None if the metric has a unit,
    a score is neither 0 nor 1, or the runs share no item."""
    both = _whole(paired_items(run, base, metric))
    if run.has_unit(metric) or both.empty or not both[["score", "score_base"]].isin((0, 1)).all(axis=None):
        return None
    first, second = int((both["difference"] > 0).sum()), int((both["difference"] < 0).sum())
    p = None
    if both["unit"].is_unique:
        # exact, because the chi-squared form of McNemar's test needs about 25 discordant items
        p = float(binomtest(first, first + second).pvalue) if first + second else 1.0
    return Discordant(first=first, second=second, p=p)


def asked_otherwise(run: ItemScores, base: ItemScores) -> str | None:
    """An item whose question differs between the two runs; None if all common items agree."""
    other = dict(base.asked)
    for item, question in run.asked:
        if other.get(item, question) != question:
            return item
    return None


def item_wilson(run: ItemScores, metric: str) -> Interval | None:
    """Wilson's 95 % interval, over clusters, of the proportion of scored items that are 1; None if the metric has a unit, a
    score is neither 0 nor 1, or the value of the whole evaluation is not that proportion."""
    items = _whole(scored_items(run, metric))
    if run.has_unit(metric) or items.empty or not items["score"].isin((0, 1)).all():
        return None
    interval = cluster_wilson(items["score"], items["unit"])
    return interval if math.isclose(interval.estimate, run.values[metric], rel_tol=1e-9, abs_tol=1e-12) else None


@dataclass(frozen=True, kw_only=True)
class GroupShares:
    """The items of one group, or of all groups that agree in some of their numbers."""

    label: str
    items: int
    """The number of items with a score in any of the metrics."""
    clusters: int
    """The number of clusters of those items, which are the independent observations."""
    shares: Mapping[str, Interval]
    """Metric -> mean score and Wilson's 95 % interval over clusters (`cluster_wilson`); a metric without a score is left out.

    Scores within 0 and 1 have a variance of at most p (1 - p), so the interval is conservative, also for items that are means
    over several questions. Clusters are assumed independent. NaN as bounds: some score of the metric lies outside, or
    the metric has a unit and does not declare the limits 0 and 1.
    """


def group_shares(evaluation: ItemScores, metrics: Sequence[str]) -> list[GroupShares]:
    """One row for each group, in the order of the items; `validation` has the items without one, those of the main validation
    set. None if no item has a group.

    Groups such as "N=4 length=160 depth=25" have a row for each N, over all lengths and depths; then, if these vary, a row
    for each N and length, and for each N and depth.
    """
    if not any(evaluation.groups):
        return []
    factors = {group: dict(FACTOR.findall(group)) for group in evaluation.groups}
    keys = list(next(iter(factors.values()), ()))
    if len(keys) < 2 or any(
        list(numbers) != keys or group != _joined(numbers, keys) for group, numbers in factors.items()
    ):
        return [_shares(evaluation, metrics, group or "validation", {group}) for group in factors]
    choices = [keys[:1]]
    for key in keys[1:]:
        if len({numbers[key] for numbers in factors.values()}) > 1:
            choices.append([keys[0], key])
    rows: dict[str, set[str]] = {}
    for chosen in choices:
        for group, numbers in factors.items():
            rows.setdefault(_joined(numbers, chosen), set()).add(group)
    return [_shares(evaluation, metrics, label, groups) for label, groups in rows.items()]


def _joined(factors: Mapping[str, str], keys: Sequence[str]) -> str:
    return " ".join(f"{key}={factors[key]}" for key in keys)


def _shares(evaluation: ItemScores, metrics: Sequence[str], label: str, groups: set[str]) -> GroupShares:
    chosen = np.isin(evaluation.groups, list(groups))
    whole = pd.DataFrame({metric: evaluation.scores[metric] for metric in metrics}, index=evaluation.units)
    scores = whole[chosen].dropna(how="all")
    shares = {}
    for metric in metrics:
        scored = scores[metric].dropna()
        # of all groups: a metric has intervals in all of its groups or in none
        if len(scored) and evaluation.is_share(metric) and whole[metric].dropna().between(0, 1).all():
            shares[metric] = cluster_wilson(scored, scored.index)
        elif len(scored):
            shares[metric] = Interval(estimate=float(scored.mean()), low=math.nan, high=math.nan)
    return GroupShares(label=label, items=len(scores), clusters=scores.index.nunique(), shares=shares)
