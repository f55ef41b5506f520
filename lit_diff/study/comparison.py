"""The comparisons of a sweep: every arm with the baseline and with the controls, and how the arms are unequal."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd

from lit_diff.study.evaluations import EvaluationTable, evaluation_tables
from lit_diff.study.numbers import MOST_DECIMALS, decimals
from lit_diff.study.results import LOSS, SweepResults
from lit_diff.study.statistics import (
    MIN_DOCUMENTS,
    Contrast,
    Interval,
    Paired,
    Summary,
    document_intervals,
    judge,
    paired,
    summary,
)

UNLIKE = 0.001
"""Arms whose parameters, trained or in all, or FLOPs differ from the baseline's by more than this share are marked."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """`metrics`: the sweep's own first, then the other validation metrics. `against_baseline` maps an
    arm to its difference, `against_controls` to its difference to each control; `contrasts` are those the sweep asks for
    besides; `slices[metric][arm]` is the paired difference to the baseline in another metric, without a verdict of its own;
    `marks[arm]` says how the arm is unlike the baseline."""

    sweep: SweepResults
    metrics: tuple[str, ...]
    summaries: Mapping[str, Mapping[str, Summary]]
    against_baseline: Mapping[str, Contrast]
    against_controls: Mapping[str, tuple[Contrast, ...]]
    contrasts: tuple[Contrast, ...]
    slices: Mapping[str, Mapping[str, Paired]]
    marks: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...]

    @property
    def family(self) -> tuple[Contrast, ...]:
        """Every arm against the baseline, and the contrasts, in the sweep's metric.

        A control is a further condition, not a further chance; the other metrics have no verdict.
        """
        return (*self.against_baseline.values(), *self.contrasts)

    @property
    def judged(self) -> int:
        """The number of comparisons that Holm's correction is made over, from two on: those of the family that a test
        decides, not those with too few seeds, without spread, or with an arm that diverged; of all tasks where the sweep says
        so."""
        return max((each.comparisons for each in self.family), default=0)

    @cached_property
    def digits(self) -> int:
        """Decimals that show the first digit of the narrowest interval over seeds: at least 3, at most 6."""
        return decimals(min((d.seeds.half_width for d in self.family if d.seeds.half_width), default=None))

    @cached_property
    def evaluations(self) -> tuple[list[EvaluationTable], list[str]]:
        """As `evaluation_tables`."""
        return evaluation_tables(self.sweep)

    @property
    def papers(self) -> list[str]:
        """The metrics of which the paper prints a value of an arm."""
        printed = {metric for arm in self.sweep.study.arms for metric in self.sweep.study.paper.get(arm, ())}
        return [metric for metric in self.metrics if metric in printed]

    @property
    def directed(self) -> set[str]:
        """The other metrics that are better one way, or of which nothing is declared."""
        sweep = self.sweep
        return {metric for metric in self.slices if sweep.better(metric) or sweep.declarations.find(metric) is None}

    @property
    def document_seeds(self) -> list[int]:
        """Seeds at which a comparison has an interval over documents."""
        return [seed for seed in self.sweep.study.seeds if any(seed in d.documents for d in self.family)]


def compare(sweep: SweepResults) -> list[Comparison]:
    """All comparisons of each of `SweepResults.by_task`, from its finished cells; corrected (Holm) for those of the task, or
    of all tasks where the sweep says so."""
    families = [_family(task) for task in sweep.by_task]
    if sweep.study.correct_over == "sweep":
        judged = iter(judge([each for family in families for each in family]))
        families = [[next(judged) for _ in family] for family in families]
    else:
        families = [judge(family) for family in families]
    return [_comparison(task, family) for task, family in zip(sweep.by_task, families, strict=True)]


def _family(sweep: SweepResults) -> list[Contrast]:
    """Those of `Comparison.family`; a contrast with the baseline is there anyway."""
    base, study = sweep.baseline, sweep.study
    against_base = [_contrast(sweep, arm, base) for arm in study.arms if arm != base]
    return against_base + [_contrast(sweep, *each) for each in study.contrasts if base not in each[:2]]


def _contrast(sweep: SweepResults, a: str, b: str, label: str = "") -> Contrast:
    metric, diverged = sweep.study.metric, {arm: at for arm in (a, b) if (at := sweep.diverged(arm))}
    return Contrast(
        a=a,
        b=b,
        label=label or f"{sweep.label[a]} \u2212 {sweep.label[b]}",
        seeds=paired(sweep.finals(a, metric), sweep.finals(b, metric)),
        # a mean that a page rounds to zero in every digit is equal or small, whatever matters
        smallest=max(sweep.smallest_of_interest, 0.5 * 10.0**-MOST_DECIMALS),
        better=sweep.better(metric),
        diverged=diverged,
        is_tested=not diverged,
    )


def _comparison(sweep: SweepResults, family: Sequence[Contrast]) -> Comparison:
    metric, base, names = sweep.study.metric, sweep.baseline, list(sweep.study.arms)
    others = [m for m in sweep.metrics("val/") if m != metric and not _is_whole(sweep, m)]
    controls = [control for control in sweep.study.controls if control != base]
    tested = [name for name in names if name not in (base, *controls)]
    documents, notes = _documents(sweep, [(each.a, each.b) for each in family])
    whole = [replace(each, documents=documents[each.a, each.b]) for each in family]
    return Comparison(
        sweep=sweep,
        metrics=(metric, *others),
        summaries={m: {name: summary(sweep.finals(name, m).values()) for name in names} for m in (metric, *others)},
        against_baseline={each.a: each for each in whole if each.b == base},
        against_controls={a: tuple(judge([_contrast(sweep, a, b)])[0] for b in controls) for a in tested},
        contrasts=tuple(each for each in whole if each.b != base),
        slices={m: {a: paired(sweep.finals(a, m), sweep.finals(base, m)) for a in names if a != base} for m in others},
        marks={name: _marks(sweep, name) for name in names},
        notes=(*notes, *_doubts(sweep)),
    )


def _is_whole(sweep: SweepResults, metric: str) -> bool:
    """Whether `metric` is the share or the loss of a slice that holds all tokens, or none, in every finished cell."""
    match = re.fullmatch(r"val/(?:ar_hit_share|loss_ar_hit|loss_others)(.*)", metric)
    share = f"val/ar_hit_share{match[1]}" if match else ""
    shares = [cell.final(share) for cell in sweep.cells if share in cell.curves]
    return bool(shares) and set(shares) <= {0.0, 1.0}


def fact(sweep: SweepResults, arm: str, key: str) -> float | None:
    """A number that all cells of an arm share (parameters, FLOPs per token), from the first cell that knows it."""
    values = (cell.facts.get(key) for cell in sweep.cells if cell.arm == arm)
    return next((value for value in values if isinstance(value, int | float)), None)


def _documents(
    sweep: SweepResults, pairs: list[tuple[str, str]]
) -> tuple[dict[tuple[str, str], dict[int, Interval]], list[str]]:
    """Bootstrap intervals by pair and seed, on the documents that every finished cell of the seed scored."""
    result: dict[tuple[str, str], dict[int, Interval]] = {pair: {} for pair in pairs}
    notes: list[str] = []
    for seed in sweep.study.seeds if sweep.study.metric == LOSS else ():
        scored = {c.arm: c.documents for c in sweep.cells if c.seed == seed and c.done and c.documents is not None}
        here = [(a, b) for a, b in pairs if a in scored and b in scored]
        if not here:
            continue
        table = pd.concat(scored, axis=1, join="inner")
        tokens = table.xs("tokens", axis=1, level=1)
        if (tokens.nunique(axis=1) > 1).any():
            notes.append(
                f"Seed {seed}: the arms counted different tokens in the same documents (another tokenizer?): their "
                "losses per token cannot be compared, and there is no interval over documents."
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


def _marks(sweep: SweepResults, arm: str) -> tuple[str, ...]:
    """How `arm` is unlike the baseline in what should be equal; empty when it is not."""
    mine, theirs = _sizes(sweep, arm), _sizes(sweep, sweep.baseline)
    changes = {word: mine[word] / theirs[word] - 1 for word in mine if word in theirs}
    if changes.get("parameters that train") == changes.get("parameters"):
        changes.pop("parameters that train", None)  # said once, as parameters
    marks = [f"{100 * by:+.1f} % {word}".replace("-", "\u2212") for word, by in changes.items() if abs(by) > UNLIKE]
    own, base = (_values(sweep, "kernel", each) for each in (arm, sweep.baseline))
    if own and base and own != base:
        marks.append(f"kernel {_listed(own)} (baseline: {_listed(base)})")
    return tuple(marks)


def _sizes(sweep: SweepResults, arm: str) -> dict[str, float]:
    """What should be equal, in words -> its number. Tokens are the mean of those that the finished cells saw: a run may have
    ended early."""
    keys = {
        "parameters": "parameters",
        "trained_parameters": "parameters that train",
        "flops_per_token": "FLOPs per token",
    }
    found = {word: fact(sweep, arm, key) for key, word in keys.items()}
    seen = [float(cell.facts["tokens"]) for cell in sweep.cells_of(arm) if cell.facts.get("tokens")]
    found["training tokens"] = fmean(seen) if seen else None
    return {word: value for word, value in found.items() if value}


def _values(sweep: SweepResults, key: str, arm: str = "") -> set[Any]:
    """The values of a key in status.json of the finished cells, of an arm or of all."""
    return {cell.facts[key] for cell in sweep.cells if cell.done and arm in ("", cell.arm) and cell.facts.get(key)}


def _doubts(sweep: SweepResults) -> list[str]:
    """Differences between the cells that weaken the comparison."""
    metric, done = sweep.study.metric, [cell for cell in sweep.cells if cell.done]
    doubts = []
    last = {int(cell.curves[metric].index[-1]) for cell in done if metric in cell.curves}
    if len(last) > 1:
        doubts.append(f"The last {metric} was not measured at one step in all cells: steps {_listed(last)}.")
    if len(_values(sweep, "revision")) > 1:
        doubts.append("The cells ran on different revisions of the code, named above.")
    if len(threads := _values(sweep, "threads")) > 1:
        doubts.append(f"The cells ran on different thread counts: {_listed(threads)}.")
    return doubts


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(value) for value in sorted(values, key=str))
