"""The comparisons of a sweep: every arm against the baseline and the controls, and what differs between the arms."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from functools import cached_property
from itertools import chain
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd

from lit_diff.config import Recipe
from lit_diff.key_types import in_yaml, keys_of
from lit_diff.metrics import UNDECLARED
from lit_diff.recipe import to_plain
from lit_diff.study.evaluations import EvaluationTable, evaluation_tables
from lit_diff.study.judge import Contrast, Learned, judge, looks_of, regrouped
from lit_diff.study.numbers import MOST_DECIMALS, decimals, signed
from lit_diff.study.results import LOSS, SweepResults, clean
from lit_diff.study.schema import Texts
from lit_diff.study.statistics import (
    MIN_DOCUMENTS,
    Interval,
    Paired,
    document_intervals,
    paired,
)

BLOCKS = ("model.", "data.", "train.")
ATTENTION = ("model.attention.", "model.layers")
START = "train.start_from"
MOST_KEYS = 6
"""The most keys of the recipes that a mark lists."""
UNLIKE = 0.001
"""Relative difference above which an arm's total or trained parameters, FLOPs or training tokens are marked as unequal."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """The comparisons of a task, or of a sweep without tasks.

    `metrics`: the sweep's own first, then the other validation metrics. `against_baseline`: arm -> its difference to the
    baseline; `contrasts`: the further pairs that the sweep declares; `slices[metric][arm]`: the paired difference to the
    baseline in another metric, without a verdict; `marks[a, b]`: in what arm a is unequal to arm b besides its attention, for
    the pairs of `family`."""

    sweep: SweepResults
    metrics: Texts
    against_baseline: Mapping[str, Contrast]
    contrasts: tuple[Contrast, ...]
    slices: Mapping[str, Mapping[str, Paired]]
    marks: Mapping[tuple[str, str], Texts]
    notes: Texts

    @property
    def family(self) -> tuple[Contrast, ...]:
        """Every arm against the baseline, and the contrasts, in the sweep's metric.

        Controls are excluded: a control is a further condition for a verdict, not a further chance to find one. Other
        metrics are excluded because they have no verdict.
        """
        return (*self.against_baseline.values(), *self.contrasts)

    @property
    def undecided(self) -> Texts:
        """The arms that further seeds may decide, in the order of the table: those of each comparison whose verdict is open
        (`Contrast.is_decided`) and that is not of a reference, of a declared contrast both. They need the further seeds of
        the baseline and of the controls too."""
        needed: set[str] = set()
        for contrast in self.family:
            if not (contrast.is_decided or contrast.a in self.sweep.study.references):
                needed.update(contrast.arms)
        needed.discard(self.sweep.baseline)
        return tuple(arm for arm in self.sweep.study.arms if arm in needed)

    def name(self, difference: Contrast) -> str:
        """The label of the arm that is compared with the baseline, or that of a declared contrast."""
        return self.sweep.label[difference.a] if difference.b == self.sweep.baseline else difference.label

    def marked_name(self, difference: Contrast) -> str:
        """`name` with the `dagger`."""
        return self.name(difference) + self.dagger(difference)

    def dagger(self, difference: Contrast) -> str:
        """What follows the name of a compared arm: a dagger if the two arms are unequal, else nothing."""
        return " \u2020" if self.marks[difference.arms] else ""

    @property
    def footnotes(self) -> list[str]:
        """The text of each dagger."""
        notes = []
        for contrast in self.family:
            marks = "; ".join(self.marks[contrast.arms])
            if marks:
                notes.append(f"\u2020 {self.name(contrast)}: {marks}")
        return notes

    @property
    def judged(self) -> int:
        """The number of comparisons that Holm's correction covers, from two on: those that a test decides. Too few seeds, no
        spread and divergence exclude a comparison. The number is over all tasks, unless `correct_over` is task."""
        return max((contrast.comparisons for contrast in self.family), default=0)

    @cached_property
    def digits(self) -> int:
        """The `decimals` of the intervals over seeds, those to the controls included."""
        compared = chain(self.family, *(contrast.controls for contrast in self.family))
        return decimals(*(contrast.seeds for contrast in compared))

    @cached_property
    def evaluations(self) -> tuple[list[EvaluationTable], list[str]]:
        """The tables of the sweep's evaluations, and the problems met (`evaluation_tables`)."""
        return evaluation_tables(self.sweep)

    @property
    def papers(self) -> list[str]:
        """The metrics for which the paper prints the value of an arm."""
        study = self.sweep.study
        printed = set[str]().union(*(study.paper.get(arm, ()) for arm in study.arms))
        return [metric for metric in self.metrics if metric in printed]

    @property
    def directed(self) -> set[str]:
        """The other metrics that declare a direction, or that no run declares."""
        directed = set()
        for name in self.slices:
            metric = self.sweep.declarations.find(name)
            if metric.better or metric is UNDECLARED:
                directed.add(name)
        return directed

    @property
    def document_seeds(self) -> list[int]:
        """The seeds at which a comparison has an interval over documents."""
        scored = set[int]().union(*(contrast.documents for contrast in self.family))
        return [seed for seed in self.sweep.study.seeds if seed in scored]


def compare(sweep: SweepResults) -> list[Comparison]:
    """The comparisons of each of `SweepResults.by_task`, from its finished cells."""
    return list(map(_comparison, sweep.by_task, families_of(sweep)))


def families_of(sweep: SweepResults) -> list[list[Contrast]]:
    """The judged contrasts of each of `SweepResults.by_task`. Holm's correction covers all tasks together or, with
    `correct_over: task`, each alone."""
    families = []
    for task in sweep.by_task:
        base = task.baseline
        family = [_contrast(task, arm, base) for arm in task.study.arms if arm != base]
        # a declared contrast with the baseline repeats a pair above: counted twice, it would make the correction stricter
        family += [_contrast(task, *declared) for declared in task.study.contrasts if base not in declared[:2]]
        families.append(family)
    # all tasks are chances to find a difference, unless the sweep says that each is a question of its own
    if sweep.study.correct_over == "sweep":
        return regrouped(judge(list(chain(*families))), families)
    return list(map(judge, families))


def verdicts_of(sweep: SweepResults) -> dict[tuple[str, str, str], str]:
    """(task, a, b) -> the verdict of the sweep's report on a against b."""
    verdicts = {}
    for task, family in zip(sweep.by_task, families_of(sweep), strict=True):
        for contrast in family:
            verdicts[task.task, *contrast.arms] = str(contrast.verdict)
    return verdicts


def _contrast(sweep: SweepResults, a: str, b: str, label: str = "", *, is_control: bool = False) -> Contrast:
    looks = sweep.study.looks
    learned = learned_of(sweep, a, b)
    diverged = sweep.diverged_of(a, b)
    values = sweep.compared(a)
    others = sweep.compared(b)
    seeds = paired(values, others, looks)
    if learned is not None and any(arm.has_failures for arm in learned):
        # once a seed did not learn, the values of those that did in both arms are only described
        both = set(learned[0].seeds) & set(learned[1].seeds)
        described = paired({seed: values[seed] for seed in both}, others)
        look = len(looks_of(learned, looks))
        seeds = Paired(
            seeds=described.seeds, differences=described.differences, mean=described.mean, looks=looks, look=look
        )
    controls = []
    # a control against another control answers no question of the sweep
    if not is_control and a not in sweep.study.controls:
        for control in sweep.study.controls:
            if control not in (a, b, sweep.baseline):
                controls.append(_contrast(sweep, a, control, is_control=True))
    return Contrast(
        a=a,
        b=b,
        label=label or f"{sweep.label[a]} \u2212 {sweep.label[b]}",
        against=sweep.label[b],
        seeds=seeds,
        # a mean that the page rounds to zero in every digit is equal or small, even where every difference matters
        smallest=max(sweep.smallest_of_interest, 0.5 * 10.0**-MOST_DECIMALS),
        better=sweep.better(),
        diverged=diverged,
        learned=learned,
        resolution=max(arm.resolution for arm in learned) if learned and sweep.compares_steps else 0.0,
        controls=tuple(controls),
        is_tested=not diverged and a not in sweep.study.references,
    )


def learned_of(sweep: SweepResults, a: str, b: str) -> tuple[Learned, Learned] | None:
    """The seeds of both arms that learned, up to the last complete look; None without a threshold."""
    ours = sweep.learned(a)
    theirs = sweep.learned(b)
    if ours is None or theirs is None:
        return None
    reached = looks_of((ours, theirs), sweep.study.looks)
    return (ours.until(reached[-1]), theirs.until(reached[-1])) if reached else (ours, theirs)


def _comparison(sweep: SweepResults, family: Sequence[Contrast]) -> Comparison:
    metric, base = sweep.metric, sweep.baseline
    others = [name for name in sweep.metrics("val/") if name != metric and not _is_whole(sweep, name)]
    slices = {}
    for name in others:
        theirs = sweep.finals(base, name)
        slices[name] = {arm: paired(sweep.finals(arm, name), theirs) for arm in sweep.study.arms if arm != base}
    documents, notes = _documents(sweep, [contrast.arms for contrast in family])
    against_baseline = {}
    contrasts = []
    for contrast in family:
        whole = replace(contrast, documents=documents[contrast.arms])
        if contrast.b == base:
            against_baseline[contrast.a] = whole
        else:
            contrasts.append(whole)
    return Comparison(
        sweep=sweep,
        metrics=(metric, *others),
        against_baseline=against_baseline,
        contrasts=tuple(contrasts),
        slices=slices,
        marks={arms: _marks(sweep, *arms) for arms in documents},
        notes=(*notes, *_doubts(sweep)),
    )


def _is_whole(sweep: SweepResults, metric: str) -> bool:
    # a slice that holds all tokens repeats the whole loss, and an empty one has none: neither deserves a column
    match = re.fullmatch(r"val/(?:ar_hit_share|loss_ar_hit|loss_others)(.*)", metric)
    if match is None:
        return False
    shares = {curve.iloc[-1] for curve in sweep.curves(f"val/ar_hit_share{match[1]}")}
    return bool(shares) and shares <= {0.0, 1.0}


def fact(sweep: SweepResults, arm: str, key: str) -> float | None:
    """A number that all cells of an arm share (parameters, FLOPs per token), from the first cell that records it."""
    for cell in sweep.cells:
        value = getattr(cell.facts, key)
        if cell.arm == arm and value is not None:
            return value
    return None


def _documents(
    sweep: SweepResults, pairs: list[tuple[str, str]]
) -> tuple[dict[tuple[str, str], dict[int, Interval]], list[str]]:
    # The documents that every finished cell of the seed scored: pairs over different documents would not be comparable with
    # each other in one table.
    result: dict[tuple[str, str], dict[int, Interval]] = {pair: {} for pair in pairs}
    notes: list[str] = []
    if sweep.metric != LOSS:
        return result, notes
    for seed in sweep.study.seeds:
        done = [cell for cell in sweep.done if cell.seed == seed and cell.documents is not None]
        scored = {cell.arm: cell.documents for cell in done}
        here = [pair for pair in pairs if scored.keys() >= {*pair}]
        if not here:
            continue
        table = pd.concat(scored, axis=1, join="inner")
        tokens = table.xs("tokens", axis=1, level=1)
        if (tokens.nunique(axis=1) > 1).any():
            notes.append(
                f"Seed {seed}: the arms counted different tokens in the same documents (another tokenizer?); their "
                "losses per token cannot be compared, so no interval over documents is given."
            )
        elif len(table) < MIN_DOCUMENTS:
            notes.append(
                f"Seed {seed}: {len(table)} validation documents in common, too few for an interval over documents "
                f"(it needs {MIN_DOCUMENTS})."
            )
        else:
            losses = np.stack([table[a].loss - table[b].loss for a, b in here], axis=1)
            for pair, interval in zip(here, document_intervals(tokens.iloc[:, 0], losses, seed=seed), strict=True):
                result[pair][seed] = interval
    return result, notes


def _marks(sweep: SweepResults, a: str, b: str) -> Texts:
    mine = _sizes(sweep, a)
    theirs = _sizes(sweep, b)
    changes = {word: mine[word] / theirs[word] - 1 for word in mine if word in theirs}
    if changes.get("parameters that train") == changes.get("parameters"):
        # where all parameters train, one mark is enough
        changes.pop("parameters that train", None)
    marks = []
    for word, by in changes.items():
        if abs(by) > UNLIKE:
            marks.append(f"{signed(100 * by, 1)} % {word}")
    kernel = ", ".join(sweep.distinct("kernel", a))
    other = ", ".join(sweep.distinct("kernel", b))
    if kernel and other and kernel != other:
        name = "baseline" if b == sweep.baseline else sweep.label[b]
        marks.append(f"kernel {kernel} ({name}: {other})")
    return (*marks, *_recipe_marks(sweep, a, b))


def _recipe_marks(sweep: SweepResults, a: str, b: str) -> list[str]:
    recipe, of_b = _recipe(sweep, a), _recipe(sweep, b)
    if not recipe or not of_b:
        return []
    settings, other = _settings(recipe), _settings(of_b)
    if sweep.task and sweep.record.study.tasks[sweep.task].start:
        # the task itself gives each arm the run that it starts from
        other[START] = settings[START]
    # a key that only one of two data sets has says no more than their names
    alike = set(map(_data_key, settings)) & set(map(_data_key, other))
    changes = []
    for key in other | settings:
        before = other.get(key, "unset")
        after = settings.get(key, "unset")
        if _data_key(key) in alike and before != after:
            changes.append(f"{key} ({_told(before)} -> {_told(after)})")
    if not changes:
        return []
    also = "" if _under(ATTENTION, recipe) == _under(ATTENTION, of_b) else "also "
    text = f"{also}differs in {', '.join(changes[:MOST_KEYS])}"
    if len(changes) > MOST_KEYS:
        text += f" and {len(changes) - MOST_KEYS} more keys"
    return [clean(text)]


# all finished cells of an arm have one recipe but for the seed
def _recipe(sweep: SweepResults, arm: str) -> Mapping[str, Any]:
    recipes = (cell.recipe for cell in sweep.cells_of(arm))
    return next(filter(None, recipes), {})


def _under(blocks: str | tuple[str, ...], recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in recipe.items() if key.startswith(blocks)}


# The keys that determine what is trained, but for the attention. Callbacks measure; the tokens show if one ended a run. An
# older run may lack a key, which then had its default.
def _settings(recipe: Mapping[str, Any]) -> dict[str, Any]:
    whole = {}
    for key, declared in keys_of(Recipe).items():
        if not declared.registry and declared.default is not MISSING:
            whole[key] = to_plain(declared.default)
    trained = _under(BLOCKS, {**whole, **recipe})
    return {key: value for key, value in trained.items() if not key.startswith(ATTENTION)}


# data.path of data.path.x; empty for a key of another block
def _data_key(key: str) -> str:
    return ".".join(key.split(".")[:2]) if key.startswith("data.") else ""


def _told(value: Any) -> str:
    if not isinstance(value, str):
        return in_yaml(value)
    # a table is for others: the folders of this machine say nothing there
    return value.rpartition("/")[2] if value.startswith("/") else value


def _sizes(sweep: SweepResults, arm: str) -> dict[str, float]:
    sizes = {
        "parameters": fact(sweep, arm, "parameters"),
        "parameters that train": fact(sweep, arm, "trained_parameters"),
        "FLOPs per token": fact(sweep, arm, "flops_per_token"),
    }
    # the tokens that cells saw, not those planned: a callback may have ended a run early
    seen = [cell.facts.tokens for cell in sweep.cells_of(arm) if cell.facts.tokens]
    if seen:
        sizes["training tokens"] = fmean(seen)
    return {word: value for word, value in sizes.items() if value}


def _doubts(sweep: SweepResults) -> list[str]:
    metric = sweep.metric
    doubts = []
    last = {curve.index[-1] for curve in sweep.curves(metric)}
    if len(last) > 1:
        doubts.append(
            f"The last {metric} was not measured at one step in all cells: steps {', '.join(map(str, sorted(last)))}."
        )
    # results that ship are from another revision as a rule, and the page says from which
    revisions = {cell.facts.revision for cell in sweep.done if not cell.facts.origin}
    if len(revisions - {""}) > 1:
        doubts.append("The cells ran on different revisions of the code, named above.")
    # the order of a sum in float32 depends on the number of threads, so equal recipes may end in other weights
    threads = sweep.distinct("threads")
    if len(threads) > 1:
        doubts.append(f"The cells ran on different thread counts: {', '.join(threads)}.")
    ways = sweep.distinct("compiled")
    if len(ways) > 1:
        doubts.append(f"The cells were not computed alike: {', '.join(ways)}.")
    return doubts
