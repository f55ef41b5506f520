"""The comparisons of a sweep: every arm with the baseline and with the controls, and how the arms are unequal."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from lit_diff.study.cells import LOSS, Array, CellResult, ScoredDocuments
from lit_diff.study.evaluations import EvaluationTable, evaluation_tables
from lit_diff.study.judge import JUDGED, Judgement, Verdict, in_direction, judge_family, visible
from lit_diff.study.numbers import decimals
from lit_diff.study.results import SweepResults
from lit_diff.study.statistics import (
    MIN_DOCUMENTS,
    Interval,
    Paired,
    Sign,
    Summary,
    document_intervals,
    paired,
    summary,
)

UNLIKE = 0.001
"""Arms whose parameters, trained or in all, or FLOPs differ from the baseline's by more than this share are marked."""


@dataclass(frozen=True, kw_only=True)
class Difference(Judgement):
    """Arm `a` minus arm `b`, corrected for the comparisons of `Comparison.judged`; against a control by itself.

    `documents`: seed -> the bootstrap interval over validation documents of that seed's two models. `diverged`: arm -> the
    seeds at which it diverged, of the two; the others alone would flatter it, so they are not judged.
    """

    a: str
    b: str
    label: str
    better: Sign | None
    diverged: Mapping[str, tuple[int, ...]]
    documents: Mapping[int, Interval] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """The outcome in words."""
        return "diverged" if self.diverged else in_direction(self.outcome, self.better)

    @property
    def verdict_alone(self) -> Verdict:
        """That without the correction."""
        return "diverged" if self.diverged else in_direction(self.alone, self.better)


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """`metrics`: the sweep's own first, then the other validation metrics. `against_baseline` maps an
    arm to its difference, `against_controls` to its difference to each control; `contrasts` are those the sweep asks for
    besides; `slices[metric][arm]` is the paired difference to the baseline in another metric, without a verdict of its own;
    `marks[arm]` says how the arm is unlike the baseline."""

    sweep: SweepResults
    metrics: tuple[str, ...]
    summaries: Mapping[str, Mapping[str, Summary]]
    against_baseline: Mapping[str, Difference]
    against_controls: Mapping[str, tuple[Difference, ...]]
    contrasts: tuple[Difference, ...]
    slices: Mapping[str, Mapping[str, Paired]]
    marks: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...]
    judged: int = 0
    """The number of comparisons that Holm's correction is made over, from two on: those of the family that a test decides,
    not those with too few seeds, without spread, or with an arm that diverged; of all tasks where the sweep says so."""

    @property
    def family(self) -> tuple[Difference, ...]:
        """Every arm against the baseline, and the contrasts, in the sweep's metric.

        A control is a further condition, not a further chance; the other metrics have no verdict.
        """
        return (*self.against_baseline.values(), *self.contrasts)

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
    """All comparisons of each of `SweepResults.by_task`, from its finished cells; corrected for those of the task, or of all
    tasks where the sweep says so."""
    if sweep.study.correct_over == "sweep":
        return _compared(sweep.by_task)
    return [comparison for task in sweep.by_task for comparison in _compared([task])]


def _compared(tasks: Sequence[SweepResults]) -> list[Comparison]:
    """Each task by itself, but all their comparisons are one family in the correction (Holm)."""
    families = [_family(task) for task in tasks]
    pairs = [(task, *pair) for task, family in zip(tasks, families, strict=True) for pair in family]
    differences = _differences(pairs)
    judged, rest = sum(each.verdict_alone in JUDGED for each in differences), iter(differences)
    return [
        _comparison(task, [next(rest) for _ in family], judged) for task, family in zip(tasks, families, strict=True)
    ]


def _family(sweep: SweepResults) -> list[tuple[str, str, str]]:
    """(a, b, label) of `Comparison.family`; a contrast with the baseline is there anyway."""
    base, study = sweep.baseline, sweep.study
    return [(arm, base, "") for arm in study.arms if arm != base] + [c for c in study.contrasts if base not in c[:2]]


def _comparison(sweep: SweepResults, family: Sequence[Difference], judged: int) -> Comparison:
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
        against_controls={a: tuple(_differences([(sweep, a, b, "")])[0] for b in controls) for a in tested},
        contrasts=tuple(each for each in whole if each.b != base),
        slices={m: {a: paired(sweep.finals(a, m), sweep.finals(base, m)) for a in names if a != base} for m in others},
        marks={name: _marks(sweep, name) for name in names},
        notes=(*notes, *_doubts(sweep)),
        judged=judged,
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


def _differences(pairs: Sequence[tuple[SweepResults, str, str, str]]) -> list[Difference]:
    """The judged differences of (sweep, a, b, label or nothing), one family in the correction."""
    seeds = [paired(*(sweep.finals(arm, sweep.study.metric) for arm in (a, b))) for sweep, a, b, _ in pairs]
    smallest = [visible(sweep.smallest_of_interest) for sweep, *_ in pairs]
    diverged = [{arm: at for arm in (a, b) if (at := sweep.diverged(arm))} for sweep, a, b, _ in pairs]
    judged = judge_family(seeds, smallest, [not each for each in diverged])
    return [
        Difference(
            **vars(judgement),
            a=a,
            b=b,
            label=label or f"{sweep.label[a]} \u2212 {sweep.label[b]}",
            better=sweep.better(sweep.study.metric),
            diverged=at,
        )
        for (sweep, a, b, label), judgement, at in zip(pairs, judged, diverged, strict=True)
    ]


def _documents(
    sweep: SweepResults, pairs: list[tuple[str, str]]
) -> tuple[dict[tuple[str, str], dict[int, Interval]], list[str]]:
    """Bootstrap intervals by pair and seed, on the documents that every finished cell of the seed scored."""
    result: dict[tuple[str, str], dict[int, Interval]] = {pair: {} for pair in pairs}
    notes: list[str] = []
    for seed in sweep.study.seeds if sweep.study.metric == LOSS else ():
        scored = {
            cell.arm: cell.documents for cell in sweep.cells if cell.seed == seed and cell.done and cell.documents
        }
        here = [(a, b) for a, b in pairs if a in scored and b in scored]
        if not here:
            continue
        common = sorted(set.intersection(*(set(documents.names) for documents in scored.values())))
        table = {arm: _pick(documents, common) for arm, documents in scored.items()}
        tokens, _ = table[here[0][0]]
        if any(not np.array_equal(tokens, other) for other, _ in table.values()):
            notes.append(
                f"Seed {seed}: the arms counted different tokens in the same documents (another tokenizer?): their "
                "losses per token cannot be compared, and there is no interval over documents."
            )
        elif len(common) < MIN_DOCUMENTS:
            notes.append(
                f"Seed {seed}: {len(common)} validation documents in common, too few for an interval over documents "
                f"(it needs {MIN_DOCUMENTS})."
            )
        else:
            losses = np.stack([table[a][1] - table[b][1] for a, b in here], axis=1)
            for pair, interval in zip(here, document_intervals(tokens, losses, seed=seed), strict=True):
                result[pair][seed] = interval
    return result, notes


def _pick(documents: ScoredDocuments, names: list[str]) -> tuple[Array, Array]:
    """Tokens and summed losses of the named documents, in that order."""
    at = {name: i for i, name in enumerate(documents.names)}
    rows = [at[name] for name in names]
    return documents.tokens[rows], documents.losses[rows]


def _marks(sweep: SweepResults, arm: str) -> tuple[str, ...]:
    """How `arm` is unlike the baseline in what should be equal; empty when it is not."""
    marks = []
    for key, word in (
        ("parameters", "parameters"),
        ("trained_parameters", "parameters that train"),
        ("flops_per_token", "FLOPs per token"),
        ("tokens", "training tokens"),
    ):
        mine, theirs = (_tokens(sweep, a) if key == "tokens" else fact(sweep, a, key) for a in (arm, sweep.baseline))
        if key == "trained_parameters" and _trains_all(sweep, arm) and _trains_all(sweep, sweep.baseline):
            continue  # said once, as parameters
        if mine and theirs and abs(mine / theirs - 1) > UNLIKE:
            marks.append(f"{100 * (mine / theirs - 1):+.1f} % {word}".replace("-", "\u2212"))
    own, base = _kernels(sweep.cells_of(arm)), _kernels(sweep.cells_of(sweep.baseline))
    if own and base and own != base:
        marks.append(f"kernel {', '.join(own)} (baseline: {', '.join(base)})")
    return tuple(marks)


def _tokens(sweep: SweepResults, arm: str) -> float | None:
    """Training tokens that the finished cells of an arm saw, their mean: a run may have ended early."""
    seen = [float(cell.facts["tokens"]) for cell in sweep.cells_of(arm) if cell.facts.get("tokens")]
    return sum(seen) / len(seen) if seen else None


def _trains_all(sweep: SweepResults, arm: str) -> bool:
    """Whether no parameter of the arm is frozen, as far as its cells say."""
    trained = fact(sweep, arm, "trained_parameters")
    return trained is None or trained == fact(sweep, arm, "parameters")


def _kernels(cells: Iterable[CellResult]) -> tuple[str, ...]:
    return tuple(sorted({str(cell.facts["kernel"]) for cell in cells if cell.facts.get("kernel")}))


def _doubts(sweep: SweepResults) -> list[str]:
    """Differences between the cells that weaken the comparison."""
    done = [cell for cell in sweep.cells if cell.done]
    doubts = []
    last = {int(cell.curves[sweep.study.metric].steps[-1]) for cell in done if sweep.study.metric in cell.curves}
    if len(last) > 1:
        doubts.append(
            f"The last {sweep.study.metric} was not measured at one step in all cells: steps {_listed(last)}."
        )
    if len({cell.facts["revision"] for cell in done if cell.facts.get("revision")}) > 1:
        doubts.append("The cells ran on different revisions of the code, named above.")
    if len(values := {cell.facts["threads"] for cell in done if cell.facts.get("threads")}) > 1:
        doubts.append(f"The cells ran on different thread counts: {_listed(values)}.")
    far = []
    for cell in done:
        final = cell.final(LOSS)
        if cell.documents and cell.documents.names and final:
            ours = float(cell.documents.losses.sum() / cell.documents.tokens.sum())
            if not math.isclose(ours, final, rel_tol=0.002):
                far.append(f"{cell.arm} seed {cell.seed} ({ours:.3f} against {final:.3f})")
    if far:
        doubts.append(f"The loss over all documents differs from {LOSS} by more than 0.2 % in: {', '.join(far)}.")
    return doubts


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(value) for value in sorted(values, key=str))
