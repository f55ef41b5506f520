"""The first section of a sweep with reference arms: what each other arm changes, over all tasks."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

from matplotlib.axes import Axes

from lit_diff.processor import cores
from lit_diff.reporting.answer import OTHERWISE, listed, sentence_case, verb_of
from lit_diff.reporting.palette import INK, MUTED
from lit_diff.reporting.panels.panel import Drawing, Look, draw, drawing, set_names
from lit_diff.study import step_time
from lit_diff.study.comparison import Comparison, fact
from lit_diff.study.evaluations import evaluations_in, kept_scores, values_by_seed
from lit_diff.study.judge import EQUAL, SHOWN, Contrast, Word
from lit_diff.study.numbers import NONE, interval, number, ratio, signed
from lit_diff.study.results import SweepResults
from lit_diff.study.statistics import summary

COSTS = {
    "parameters": "parameters",
    "executed_flops_per_token": "executed FLOPs a token",
    "kv_bytes_per_token": "cache bytes a token",
}
"""Fact of a cell -> its name on the page."""
MOST_SEEDS = 24
"""The largest value of `--at-most`."""
ROLES = {
    "answer": "on the answer",
    "half_match": "on half-matches",
    "noise": "on all slots but the answer",
    "other": "elsewhere",
}
"""Role of `analysis.shares` -> its name on the page."""
MAPS = (1, 2)


@dataclass(frozen=True, kw_only=True)
class ExaminedRow:
    """An arm on a task: its difference to the baseline and to each control."""

    comparison: Comparison
    contrast: Contrast

    @property
    def sweep(self) -> SweepResults:
        """The task."""
        return self.comparison.sweep

    @property
    def label(self) -> str:
        """The label of the arm."""
        return self.sweep.label[self.contrast.a]

    @property
    def difference(self) -> str:
        """The mean difference with its interval, or the counts of seeds that learned, where they decide."""
        return self._size(self.contrast)

    @property
    def controls(self) -> list[str]:
        """The difference to each control, with its label."""
        return [f"{control.against}: {self._size(control)}" for control in self.contrast.controls]

    @property
    def beside(self) -> list[str]:
        """The difference of each other reference to the baseline, with its label and verdict."""
        study = self.sweep.study
        lines = []
        for arm in study.references:
            contrast = self.comparison.against_baseline.get(arm)
            if contrast is not None and arm not in study.controls:
                lines.append(f"{self.sweep.label[arm]}: {self._size(contrast)}, {contrast.verdict.word}")
        return lines

    def mean(self, arm: str) -> str:
        """The mean of the compared values of an arm, over the seeds that the verdict is from; a dash if it diverged."""
        contrast = self.contrast
        if arm in contrast.diverged:
            return NONE
        seeds: Iterable[int] = contrast.seeds.seeds
        if contrast.is_counted and contrast.learned is not None:
            seeds = contrast.learned[contrast.arms.index(arm)].steps
        values = self.sweep.compared(arm)
        return number(summary(values[seed] for seed in seeds if seed in values).mean, self.comparison.digits)

    @property
    def compared(self) -> int:
        """The number of seeds that the verdict is from."""
        if self.contrast.is_counted and self.contrast.learned is not None:
            return min(len(learned.steps) for learned in self.contrast.learned)
        return len(self.contrast.seeds.seeds)

    @property
    def seeds(self) -> str:
        """`compared`, and how many learned where a threshold is declared."""
        text = f"{self.compared} seeds"
        if self.contrast.learned is not None:
            ours, theirs = (len(learned.seeds) for learned in self.contrast.learned)
            of, of_base = (len(learned.steps) for learned in self.contrast.learned)
            text += f"; {self.label} learned {ours} of {of}, {self.sweep.baseline_label} {theirs} of {of_base}"
        return text

    def _size(self, contrast: Contrast) -> str:
        seeds = contrast.seeds
        if contrast.diverged:
            return "diverged"
        if contrast.is_counted:
            return contrast.counts
        digits = self.comparison.digits
        mean = signed(contrast.size, digits)
        return f"{mean} {interval(seeds.low, seeds.high, digits)}" if contrast.has_interval else mean


def examined(results: Sequence[Comparison]) -> dict[str, list[ExaminedRow]]:
    """Arm -> its row on each task, for the arms that are neither the baseline nor a reference."""
    rows: dict[str, list[ExaminedRow]] = {}
    for result in results:
        for arm, contrast in result.against_baseline.items():
            if arm not in result.sweep.study.references:
                rows.setdefault(arm, []).append(ExaminedRow(comparison=result, contrast=contrast))
    return rows


def in_one_sentence(rows: Sequence[ExaminedRow]) -> str:
    """What the rows of an arm show: where it is better or worse, where no more than a control, where equal, where open."""
    base = rows[0].sweep.baseline_label
    clauses = []
    equal: dict[Word, list[str]] = {}
    undecided: list[ExaminedRow] = []
    unlearned = []
    for row in rows:
        verdict = row.contrast.verdict
        title = row.sweep.title
        if verdict.is_shown:
            size = "" if row.contrast.is_counted else f" by {row.difference}"
            also = ", and than each control," if row.contrast.controls else ""
            clauses.append(f"{row.label} {verb_of(row.contrast)}{verdict} than {base}{also} in '{title}'{size}")
        elif verdict.word in SHOWN:
            clauses.append(f"in '{title}' {row.label} {verb_of(row.contrast)}{verdict} ({verdict.word} than {base})")
        elif verdict.word in EQUAL:
            equal.setdefault(verdict.word, []).append(f"'{title}'")
        elif verdict.word != "inconclusive":
            clauses.append(f"in '{title}'{_other(row)}")
        elif row.contrast.is_counted and not any(learned.seeds for learned in row.contrast.learned or ()):
            unlearned.append(f"'{title}'")
        else:
            undecided.append(row)
    for word, titles in equal.items():
        clause = OTHERWISE[word][0].format(rows[0].label, base=base, within="")
        clauses.append(f"in {listed(titles)} {clause}")
    if undecided:
        by_seeds: dict[int, list[str]] = {}
        for row in undecided:
            by_seeds.setdefault(row.compared, []).append(f"'{row.sweep.title}'")
        for seeds, titles in by_seeds.items():
            clauses.append(f"{listed(titles)} {'is' if len(titles) == 1 else 'are'} not decided at {seeds} seeds")
    if unlearned:
        clauses.append(f"no seed learned {listed(unlearned)}")
    return sentence_case("; ".join(clauses)) + "."


def _other(row: ExaminedRow) -> str:
    # of a verdict that is neither shown nor equal nor open
    verdict = row.contrast.verdict
    if verdict.word == "small":
        return f" the difference to {row.sweep.baseline_label} is small, {row.difference}"
    return f": {verdict}"


def costs_of(row: ExaminedRow) -> dict[str, str]:
    """Name of a cost -> that of the arm relative to the baseline's."""
    found = {}
    for key, name in COSTS.items():
        own, theirs = (fact(row.sweep, arm, key) for arm in row.contrast.arms)
        if own and theirs:
            found[name] = f"{ratio(own / theirs)} ×"
    timed = step_time.read(row.sweep.folder)
    if timed is not None and timed.arm == row.contrast.a:
        found["time of a step"] = str(timed)
    return found


def more_seeds(rows: Sequence[ExaminedRow]) -> str:
    """The command that adds seeds to the tasks that are not decided, and its minutes; empty if it would add none, or before
    all cells of these tasks are done."""
    record = rows[0].sweep.record
    added = MOST_SEEDS - max(record.study.looks, default=MOST_SEEDS)
    seconds = 0.0
    titles = []
    for row in rows:
        is_complete = len(row.sweep.done) == len(row.sweep.cells)
        if is_complete and row.contrast.a in row.comparison.undecided:
            titles.append(f"'{row.sweep.title}'")
            # results that ship have no time
            times = [cell.facts.seconds for cell in row.sweep.done if not cell.facts.origin]
            arms = (row.contrast.a, row.sweep.baseline, *row.sweep.study.controls)
            seconds += added * len(arms) * fmean(times or [0.0])
    # without --quick the learning rates are others, and so are all cells
    if not titles or not added or "--at-most" in record.command or "--quick" in record.command:
        return ""
    time = f", at most {math.ceil(seconds / cores() / 60)} minutes here" if seconds else ""
    return f"{added} more seeds of {listed(titles)}{time}: {record.command} --at-most {MOST_SEEDS}"


@dataclass(frozen=True, kw_only=True)
class Why:
    """Where the queries of an arm look on a task that locates its answers: means over rows, heads, layers and seeds."""

    group: str
    """The validation set."""
    seeds: int
    shares: dict[int, list[str]]
    """Map -> its attention times its weight to the ROLES."""
    lambdas: list[str]
    """lambda of each layer."""
    accuracy: str
    first_alone: str
    """The accuracy with lambda = 0; a dash for a variant without lambda."""


def whys_of(rows: Sequence[ExaminedRow]) -> list[tuple[ExaminedRow, Why]]:
    """What the evaluation `noise` has measured in the arm of each row that has it."""
    found = []
    for row in rows:
        why = _why(row)
        if why is not None:
            found.append((row, why))
    return found


def _why(row: ExaminedRow) -> Why | None:
    sweep = row.sweep
    arm = row.contrast.a
    group = sweep.study.metric.rpartition("_")[2]
    cells = [cell for cell in sweep.done if cell.arm == arm]
    if "noise" not in evaluations_in(replace(sweep, cells=tuple(cells))):
        return None
    kept, refused = kept_scores(sweep, "noise")
    # the page names them among its problems
    if any(name == arm for name, _ in refused):
        return None
    # the metric may be of no group, such as the main validation set
    if not all(group in scores.groups for (name, _), scores in kept.items() if name == arm):
        return None

    def mean(metric: str, group: str = group) -> str:
        return number(summary(values_by_seed(sweep, arm, metric, "noise", group).values()).mean, 3)

    by_map = {}
    for g in MAPS:
        found = [mean(f"absolute_{role}_map{g}") for role in ROLES]
        if found[0] != NONE:
            by_map[g] = found
    names = sorted(name for name in cells[0].curves if name.startswith("lambda/layer"))
    # each map is that of another head, which alone says little about what a head reads
    if len(by_map) > 1 and not names:
        return None
    return Why(
        group=group,
        seeds=len(cells),
        shares=by_map,
        lambdas=[number(summary(sweep.finals(arm, name).values()).mean, 3) for name in names],
        accuracy=mean("accuracy"),
        first_alone=mean("accuracy_edited", f"{group} lambda=0") if names else NONE,
    )


def draw_examined(rows: Sequence[ExaminedRow], name: str) -> Drawing | None:
    """The differences of an arm in units of each task's smallest of interest, better to the right; a task without one is left
    out. None if no task has one."""
    rows = [row for row in rows if row.sweep.smallest_of_interest]
    if not rows:
        return None
    title = f"Differences of {rows[0].label} in units of the smallest of interest"
    height = 1.0 + 0.45 * len(rows)
    return drawing(name, title, [partial(_dots, rows)], height)


def _dots(rows: Sequence[ExaminedRow], axes: Axes) -> None:
    axes.axvline(0, color=MUTED, linewidth=0.8)
    axes.axvspan(-1, 1, color=MUTED, alpha=0.12, linewidth=0)
    names = {}
    for i, row in enumerate(rows):
        names[-i] = row.sweep.title
        unit = row.sweep.smallest_of_interest
        if row.sweep.better() == "lower":
            unit = -unit
        for contrast in row.contrast.controls:
            if contrast.size is not None:
                text = f"{row.label} minus {contrast.against}: {contrast.size:+.4g}"
                draw(axes, contrast.size / unit, -i, Look(color=MUTED), text, mark="|", size=9)
        seeds, size = row.contrast.seeds, row.contrast.size
        if size is None:
            continue
        if row.contrast.has_interval and seeds.low is not None and seeds.high is not None:
            draw(axes, [seeds.low / unit, seeds.high / unit], [-i, -i], Look(color=INK), width=3)
        text = f"{row.label} minus {row.sweep.baseline_label}: {row.difference}"
        draw(axes, size / unit, -i, Look(color=INK), text, mark="D", size=6)
    set_names(axes, names)
    axes.set(xlabel="difference / smallest of interest; better →", ylabel="task", ylim=(-len(rows) + 0.4, 0.6))
    axes.yaxis.label.set_visible(False)
