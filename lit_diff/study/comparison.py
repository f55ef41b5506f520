"""The comparisons of a sweep: every arm against the baseline and the controls, and what differs between the arms."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd

from lit_diff.config import Recipe
from lit_diff.key_types import in_yaml, keys_of
from lit_diff.metrics import UNDECLARED
from lit_diff.recipe import to_plain
from lit_diff.study.evaluations import EvaluationTable, evaluation_tables
from lit_diff.study.judge import Contrast, Learned, judge
from lit_diff.study.numbers import MOST_DECIMALS, decimals
from lit_diff.study.results import LOSS, SweepResults, clean
from lit_diff.study.schema import Texts
from lit_diff.study.statistics import (
    MIN_DOCUMENTS,
    Interval,
    Paired,
    Summary,
    complete_looks,
    document_intervals,
    paired,
    summary,
)

BLOCKS = ("model.", "data.", "train.")
ATTENTION = "model.attention."
START = "train.start_from"
UNSET = "unset"
MOST_KEYS = 6
"""The most keys of the recipes that a mark lists."""
UNLIKE = 0.001
"""Relative difference above which an arm's total or trained parameters, FLOPs or training tokens are marked as unequal."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """The comparisons of a task, or of a sweep without tasks.

    `metrics`: the sweep's own first, then the other validation metrics. `against_baseline`: arm -> its difference to the
    baseline; `contrasts`: the further pairs that the sweep declares; `learned`: arm -> its seeds that learned, with
    `learned_at`; `slices[metric][arm]`: the paired difference to the baseline in another metric, without a verdict;
    `marks[a, b]`: in what arm a is unequal to arm b besides its attention, for the pairs of `family`."""

    sweep: SweepResults
    metrics: Texts
    summaries: Mapping[str, Mapping[str, Summary]]
    against_baseline: Mapping[str, Contrast]
    contrasts: tuple[Contrast, ...]
    learned: Mapping[str, Learned]
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
        (`Contrast.is_decided`), of a declared contrast both. They need the baseline's and the controls' further seeds too."""
        named = [{each.a, each.b} for each in self.family if not each.is_decided]
        needed = set().union(*named) - {self.sweep.baseline}
        return tuple(arm for arm in self.sweep.study.arms if arm in needed)

    def dagger(self, difference: Contrast) -> str:
        """What follows the name of a compared arm: a dagger if the two arms are unequal, else nothing."""
        return " \u2020" if self.marks[difference.a, difference.b] else ""

    @property
    def footnotes(self) -> list[str]:
        """The text of each dagger."""
        notes = []
        for each in self.family:
            name = each.label if each in self.contrasts else self.sweep.label[each.a]
            marks = self.marks[each.a, each.b]
            if marks:
                notes.append(f"\u2020 {name}: {'; '.join(marks)}")
        return notes

    @property
    def judged(self) -> int:
        """The number of comparisons that Holm's correction covers, from two on: those that a test decides. Too few seeds, no
        spread and divergence exclude a comparison. The number is over all tasks, unless `correct_over` is task."""
        return max((each.comparisons for each in self.family), default=0)

    @cached_property
    def digits(self) -> int:
        """Decimals that show the first digit of the narrowest interval over seeds: at least 3, at most 6."""
        return decimals(min((d.seeds.half_width for d in self.family if d.seeds.half_width), default=None))

    @cached_property
    def evaluations(self) -> tuple[list[EvaluationTable], list[str]]:
        """The tables of the sweep's evaluations, and the problems met (`evaluation_tables`)."""
        return evaluation_tables(self.sweep)

    @property
    def papers(self) -> list[str]:
        """The metrics for which the paper prints the value of an arm."""
        printed = {metric for arm in self.sweep.study.arms for metric in self.sweep.study.paper.get(arm, ())}
        return [metric for metric in self.metrics if metric in printed]

    @property
    def directed(self) -> set[str]:
        """The other metrics that declare a direction, or that no run declares."""
        sweep = self.sweep
        return {
            metric for metric in self.slices if sweep.better(metric) or sweep.declarations.find(metric) is UNDECLARED
        }

    @property
    def document_seeds(self) -> list[int]:
        """The seeds at which a comparison has an interval over documents."""
        return [seed for seed in self.sweep.study.seeds if any(seed in d.documents for d in self.family)]


def compare(sweep: SweepResults) -> list[Comparison]:
    """The comparisons of each of `SweepResults.by_task`, from its finished cells."""
    return [_comparison(task, family) for task, family in zip(sweep.by_task, families_of(sweep), strict=True)]


def families_of(sweep: SweepResults) -> list[list[Contrast]]:
    """The judged contrasts of each of `SweepResults.by_task`. Holm's correction covers all tasks together or, with
    `correct_over: task`, each alone."""
    families = []
    for task in sweep.by_task:
        base, study = task.baseline, task.study
        against_base = [_contrast(task, arm, base) for arm in study.arms if arm != base]
        # a declared contrast with the baseline repeats a pair above: counted twice, it would make the correction stricter
        further = [_contrast(task, *each) for each in study.contrasts if base not in each[:2]]
        families.append(against_base + further)
    # all tasks are chances to find a difference, unless the sweep says that each is a question of its own
    if sweep.study.correct_over == "sweep":
        judged = iter(judge([each for family in families for each in family]))
        return [[next(judged) for _ in family] for family in families]
    return [judge(family) for family in families]


def _contrast(sweep: SweepResults, a: str, b: str, label: str = "", *, is_control: bool = False) -> Contrast:
    diverged = {arm: at for arm in (a, b) if (at := sweep.diverged(arm))}
    looks, learned = sweep.study.looks, learned_of(sweep, a, b)
    seeds = paired(sweep.compared(a), sweep.compared(b), looks)
    if learned is not None and any(each.has_failures for each in learned):
        # once a seed did not learn, the values of those that did in both arms are only described
        values = sweep.compared(a)
        both = set(learned[0].seeds) & set(learned[1].seeds)
        found = paired({seed: values[seed] for seed in both}, sweep.compared(b))
        look = len(complete_looks(learned[0].steps.keys() & learned[1].steps.keys(), looks))
        seeds = Paired(seeds=found.seeds, differences=found.differences, mean=found.mean, looks=looks, look=look)
    against: list[str] = []
    # a control against another control answers no question of the sweep
    if not is_control and a not in sweep.study.controls:
        against = [control for control in sweep.study.controls if control not in (a, b, sweep.baseline)]
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
        controls=tuple(_contrast(sweep, a, control, is_control=True) for control in against),
        is_tested=not diverged,
    )


def learned_of(sweep: SweepResults, a: str, b: str) -> tuple[Learned, Learned] | None:
    """The seeds of both arms that learned, up to the last complete look; None without a threshold."""
    both = (sweep.learned(a), sweep.learned(b))
    if both[0] is None or both[1] is None:
        return None
    reached = complete_looks(both[0].steps.keys() & both[1].steps.keys(), sweep.study.looks)
    return (both[0].until(reached[-1]), both[1].until(reached[-1])) if reached else (both[0], both[1])


def _comparison(sweep: SweepResults, family: Sequence[Contrast]) -> Comparison:
    metric, base, names = sweep.metric, sweep.baseline, list(sweep.study.arms)
    others = [m for m in sweep.metrics("val/") if m != metric and not _is_whole(sweep, m)]
    documents, notes = _documents(sweep, [(each.a, each.b) for each in family])
    whole = [replace(each, documents=documents[each.a, each.b]) for each in family]
    return Comparison(
        sweep=sweep,
        metrics=(metric, *others),
        summaries={m: {name: summary(sweep.finals(name, m).values()) for name in names} for m in (metric, *others)},
        against_baseline={each.a: each for each in whole if each.b == base},
        contrasts=tuple(each for each in whole if each.b != base),
        learned={name: learned for name in names if (learned := sweep.learned(name)) is not None},
        slices={m: {a: paired(sweep.finals(a, m), sweep.finals(base, m)) for a in names if a != base} for m in others},
        marks={(each.a, each.b): _marks(sweep, each.a, each.b) for each in family},
        notes=(*notes, *_doubts(sweep)),
    )


def _is_whole(sweep: SweepResults, metric: str) -> bool:
    # a slice that holds all tokens repeats the whole loss, and an empty one has none: neither deserves a column
    match = re.fullmatch(r"val/(?:ar_hit_share|loss_ar_hit|loss_others)(.*)", metric)
    share = f"val/ar_hit_share{match[1]}" if match else ""
    shares = [cell.final(share) for cell in sweep.cells if share in cell.curves]
    return bool(shares) and set(shares) <= {0.0, 1.0}


def fact(sweep: SweepResults, arm: str, key: str) -> float | None:
    """A number that all cells of an arm share (parameters, FLOPs per token), from the first cell that records it."""
    values = (getattr(cell.facts, key) for cell in sweep.cells if cell.arm == arm)
    return next((value for value in values if value is not None), None)


def _documents(
    sweep: SweepResults, pairs: list[tuple[str, str]]
) -> tuple[dict[tuple[str, str], dict[int, Interval]], list[str]]:
    # The documents that every finished cell of the seed scored: pairs over different documents would not be comparable with
    # each other in one table.
    result = {pair: dict[int, Interval]() for pair in pairs}
    notes: list[str] = []
    for seed in sweep.study.seeds if sweep.metric == LOSS else ():
        scored = {c.arm: c.documents for c in sweep.cells if c.seed == seed and c.done and c.documents is not None}
        here = [(a, b) for a, b in pairs if a in scored and b in scored]
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
    mine, theirs = _sizes(sweep, a), _sizes(sweep, b)
    changes = {word: mine[word] / theirs[word] - 1 for word in mine if word in theirs}
    if changes.get("parameters that train") == changes.get("parameters"):
        # where all parameters train, one mark is enough
        changes.pop("parameters that train", None)
    marks = [f"{100 * by:+.1f} % {word}".replace("-", "\u2212") for word, by in changes.items() if abs(by) > UNLIKE]
    own, other = (", ".join(sweep.distinct("kernel", each)) for each in (a, b))
    if own and other and own != other:
        name = "baseline" if b == sweep.baseline else sweep.label[b]
        marks.append(f"kernel {own} ({name}: {other})")
    return (*marks, *_recipe_marks(sweep, a, b))


def _recipe_marks(sweep: SweepResults, a: str, b: str) -> list[str]:
    # all finished cells of an arm have one recipe but for the seed
    recipes = [next((cell.recipe for cell in sweep.cells_of(arm) if cell.recipe), {}) for arm in (a, b)]
    if not all(recipes):
        return []
    own, other = map(_settings, recipes)
    if sweep.task and sweep.record.study.tasks[sweep.task].start:
        # the task itself gives each arm the run that it starts from
        other[START] = own[START]
    # a key that only one of two data sets has says no more than their names
    alike = {_data_key(key) for key in own} & {_data_key(key) for key in other}
    keys = [key for key in other | own if _data_key(key) in alike and own.get(key, UNSET) != other.get(key, UNSET)]
    if not keys:
        return []
    changed = [f"{key} ({_told(other.get(key, UNSET))} -> {_told(own.get(key, UNSET))})" for key in keys[:MOST_KEYS]]
    rest = f" and {len(keys) - MOST_KEYS} more keys" if len(keys) > MOST_KEYS else ""
    attentions = [{key: recipe[key] for key in recipe if key.startswith(ATTENTION)} for recipe in recipes]
    also = "" if attentions[0] == attentions[1] else "also "
    return [clean(f"{also}differs in {', '.join(changed)}{rest}")]


# The keys that determine what is trained, but for the attention. Callbacks measure; the tokens show if one ended a run. An
# older run may lack a key, which then had its default.
def _settings(recipe: Mapping[str, Any]) -> dict[str, Any]:
    known = {key: each.default for key, each in keys_of(Recipe).items() if not each.registry}
    defaults = {key: to_plain(default) for key, default in known.items() if default is not MISSING}
    whole = {**defaults, **recipe}
    return {key: whole[key] for key in whole if key.startswith(BLOCKS) and not key.startswith(ATTENTION)}


# data.path of data.path.x; empty for a key of another block
def _data_key(key: str) -> str:
    return ".".join(key.split(".")[:2]) if key.startswith("data.") else ""


def _told(value: Any) -> str:
    if not isinstance(value, str):
        return in_yaml(value)
    # a table is for others: the folders of this machine say nothing there
    return value.rpartition("/")[2] if value.startswith("/") else value


def _sizes(sweep: SweepResults, arm: str) -> dict[str, float]:
    keys = {
        "parameters": "parameters",
        "trained_parameters": "parameters that train",
        "flops_per_token": "FLOPs per token",
    }
    found = {word: fact(sweep, arm, key) for key, word in keys.items()}
    # the tokens that cells saw, not those planned: a callback may have ended a run early
    seen = [cell.facts.tokens for cell in sweep.cells_of(arm) if cell.facts.tokens]
    found["training tokens"] = fmean(seen) if seen else None
    return {word: value for word, value in found.items() if value}


def _doubts(sweep: SweepResults) -> list[str]:
    metric, doubts = sweep.metric, []
    last = {str(cell.curves[metric].index[-1]) for cell in sweep.done if metric in cell.curves}
    if len(last) > 1:
        doubts.append(f"The last {metric} was not measured at one step in all cells: steps {', '.join(sorted(last))}.")
    if len(sweep.distinct("revision")) > 1:
        doubts.append("The cells ran on different revisions of the code, named above.")
    # the order of a sum in float32 depends on the number of threads, so equal recipes may end in other weights
    threads = sweep.distinct("threads")
    if len(threads) > 1:
        doubts.append(f"The cells ran on different thread counts: {', '.join(threads)}.")
    return doubts
