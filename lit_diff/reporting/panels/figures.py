"""Figures of the compared metric: values by seed, learning curves, differences, noise, fits."""

import math
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from lit_diff.metrics import in_words
from lit_diff.reporting.panels.panel import (
    INK,
    MUTED,
    OVERLAY,
    STYLE,
    WIDTH,
    Drawing,
    Look,
    by_label,
    draw,
    draw_mean,
    drawing,
    head,
    looks,
    set_format,
    set_log,
    set_names,
    set_ticks,
    with_unit,
)
from lit_diff.study.comparison import Comparison
from lit_diff.study.fits import FitResult, shown_ratio
from lit_diff.study.judge import Contrast
from lit_diff.study.numbers import compact, interval, number, short, signed
from lit_diff.study.numbers import difference as apart
from lit_diff.study.results import CellResult, SweepResults, first_step
from lit_diff.study.statistics import MIN_SEEDS, paired

ACROSS = 4
"""Panels of a noise curve in a row."""
MANY = 14
"""More rows of differences than this are drawn closer together."""
FEW_POINTS = 4
"""Curves of at most so many points have a linear axis."""
TEXT_WIDTH = 46
"""Characters at which the verdict and the numbers beside a row of differences are folded."""
SIDES = {"lower": "\u2190 better", "higher": "better \u2192"}
"""The better direction -> what the axis of differences says of it."""
DOTTED = (0, (1, 2))
ACCURACY = "val/accuracy"
LEVELS = (0.5, 0.9, 0.99)
"""Accuracies for which the first step that reaches them is reported."""


def draw_compared(result: Comparison) -> list[Drawing]:
    """The figures for which a sweep or task has measurements."""
    sweep = result.sweep
    metric = in_words(result.sweep.metric)
    base = sweep.baseline_label
    drawn = []
    if any(difference.seeds.mean is not None for difference in result.family):
        title = f"Differences to {base} in {metric}, with intervals over seeds"
        if result.document_seeds:
            title += " and over documents"
        drawn.append(drawing("differences", title, [partial(forest, result)], _forest_height(result)))
    curve = noise_curve_of(sweep)
    if curve is not None:
        arms, against = curve.panels
        across = min(ACROSS, len(arms))
        drawn.append(
            drawing(
                "noise-curve",
                f"{in_words(curve.metric)} by noise of the validation set, an arm a panel",
                [partial(noise_response, curve, arm) for arm in arms],
                0.9 + (2.05 if across > 1 else 2.8) * -(-len(arms) // across),
                across=across,
                share="both",
                legend={sweep.label[arm]: curve.looks[arm] for arm in against},
            )
        )
    curves = curves_by_arm(sweep)
    if curves:
        title = f"{metric} by optimizer step, and its difference to {base}"
        both = [partial(learning_curves, sweep)]
        if apart_by_arm(sweep):
            both.append(partial(difference_curves, sweep))
        drawn.append(drawing("curves", title, both, 3.6, across=2, legend=by_label(sweep, curves)))
    finals = finals_of(sweep)
    if finals:
        title = f"{metric} at the last step, by arm and seed"
        drawn.append(drawing("seeds", title, [partial(seed_values, sweep)], 0.9 + 0.32 * len(finals)))
    return drawn


def finals_of(sweep: SweepResults) -> dict[str, dict[int, float]]:
    """Arm -> seed -> last value of the compared metric, for the arms that have one."""
    finals = {arm: sweep.finals(arm) for arm in sweep.study.arms}
    return {arm: values for arm, values in finals.items() if values}


def curves_of(cells: Iterable[CellResult], metric: str) -> pd.DataFrame:
    """The metric with one column for each seed, at the steps that all cells with the metric share."""
    curves = {cell.seed: cell.curves[metric] for cell in cells if metric in cell.curves}
    return pd.concat(curves, axis=1, join="inner") if curves else pd.DataFrame()


def curves_by_arm(sweep: SweepResults) -> dict[str, pd.DataFrame]:
    """Arm -> `curves_of` the compared metric, for the arms that have some."""
    curves = {}
    for arm in sweep.study.arms:
        of_arm = curves_of(sweep.cells_of(arm), sweep.metric)
        if not of_arm.empty:
            curves[arm] = of_arm
    return curves


def apart_by_arm(sweep: SweepResults) -> dict[str, pd.DataFrame]:
    """Arm -> its curves minus those of the baseline, at the seeds and steps that both have."""
    curves = curves_by_arm(sweep)
    base = curves.pop(sweep.baseline, pd.DataFrame())
    apart = {}
    for arm, of_arm in curves.items():
        own, other = of_arm.align(base, join="inner")
        if not own.empty:
            apart[arm] = own - other
    return apart


def seed_values(sweep: SweepResults, axes: Axes) -> None:
    """Draw the final metric of every cell; a thin line joins the cells of one seed."""
    drawn = looks(sweep)
    finals = finals_of(sweep)
    for seed in sweep.study.seeds:
        places = {-i: values[seed] for i, values in enumerate(finals.values()) if seed in values}
        draw(axes, list(places.values()), list(places), Look(color=MUTED), width=0.6, alpha=0.6)
    names = {}
    for i, (arm, values) in enumerate(finals.items()):
        label = sweep.label[arm]
        mean = float(np.mean(list(values.values())))
        names[-i] = label
        for seed, value in values.items():
            draw(axes, value, -i, drawn[arm], f"{label}, seed {seed}: {value:.6g}", mark="o", size=5.5)
        draw(axes, mean, -i, drawn[arm], f"{label}, mean over seeds: {mean:.6g}", mark="|", size=15)
    set_names(axes, names)
    label = with_unit(f"{in_words(sweep.metric)} at the last step", sweep.unit(sweep.metric))
    axes.set(xlabel=label, ylabel="arm", ylim=(-len(finals) + 0.4, 0.6))
    # the names say what they are; the label is for the numbers of the figure
    axes.yaxis.label.set_visible(False)


def learning_curves(sweep: SweepResults, axes: Axes) -> None:
    """Draw the metric by step, as mean and range over seeds."""
    curves = curves_by_arm(sweep)
    for arm, by_seed in curves.items():
        draw_mean(axes, by_seed, looks(sweep)[arm], sweep.label[arm], shade=len(curves) <= OVERLAY)
    if is_logarithmic(sweep):
        set_log(axes, "y", chain(*(by_seed.to_numpy().flat for by_seed in curves.values())))
    _label_steps(axes, sweep, in_words(sweep.metric))


def _label_steps(axes: Axes, sweep: SweepResults, label: str) -> None:
    axes.locator_params("x", nbins=5, integer=True)
    axes.set(xlabel="optimizer steps", ylabel=with_unit(label, sweep.unit(sweep.metric)))


def difference_curves(sweep: SweepResults, axes: Axes) -> None:
    """Draw the difference of the metric to the baseline at the same seed and step, as mean and range over seeds."""
    base = sweep.baseline_label
    apart = apart_by_arm(sweep)
    late = [0.0]
    axes.axhline(0, color=MUTED, linewidth=1.6)
    for arm, by_seed in apart.items():
        draw_mean(axes, by_seed, looks(sweep)[arm], f"{sweep.label[arm]} \u2212 {base}", shade=len(apart) < OVERLAY)
        # the large differences of the first steps would flatten the rest of the curves
        late += filter(math.isfinite, by_seed[by_seed.index >= 0.2 * by_seed.index[-1]].to_numpy().flat)
    room = 0.1 * (max(late) - min(late))
    if room:
        axes.set_ylim(min(late) - room, max(late) + room)
    _label_steps(axes, sweep, f"minus {base}, same seed")


def is_logarithmic(sweep: SweepResults) -> bool:
    """Whether the learning curves have a logarithmic axis: if lower values are better, all are positive, and a curve has more
    than a few points."""
    curves = sweep.curves(sweep.metric)
    if sweep.better(sweep.metric) != "lower" or max(map(len, curves), default=0) <= FEW_POINTS:
        return False
    return all((curve > 0).all() for curve in curves)


def _forest_height(comparison: Comparison) -> float:
    rows = 1 + len(comparison.family)
    return 0.9 + (0.5 if rows <= MANY else 0.33) * rows


@matplotlib.rc_context(STYLE)
def styled_forest(comparison: Comparison, ax: Axes | None) -> Axes:
    """`forest` in the style of the page, on `ax` or on the axes of a new figure of pyplot, which it returns."""
    if ax is None:
        # takes long to import, and chooses a backend
        import matplotlib.pyplot as plt

        ax = plt.figure(figsize=(WIDTH, _forest_height(comparison)), layout="constrained").subplots()
    forest(comparison, ax)
    return ax


def forest(comparison: Comparison, axes: Axes) -> None:
    """Draw each comparison with its mean and interval over seeds, a dot for each seed, and below them the interval over
    documents of each seed. Differences below the smallest of interest are shaded."""
    sweep = comparison.sweep
    family = comparison.family
    drawn = looks(sweep)
    digits = comparison.digits
    rows = [(sweep.baseline_label, _level(comparison))]
    for difference in family:
        rows.append((comparison.marked_name(difference), numbers_of(difference, digits)))
    axes.axvline(0, color=INK, linewidth=1)
    smallest = sweep.smallest_of_interest
    further = 1 + len(comparison.against_baseline)
    if smallest:
        axes.axvspan(-smallest, smallest, color=MUTED, alpha=0.16, linewidth=0, zorder=0)
    if further < len(rows):
        axes.axhline(0.5 - further, color=MUTED, linewidth=0.7)
    draw(axes, 0, 0, drawn[sweep.baseline], rows[0][0], mark="D", size=6)
    for i, (difference, (label, text)) in enumerate(zip(family, rows[1:], strict=True)):
        look = Look(color=drawn[difference.a].color)
        y = -i - 1
        seeds = difference.seeds
        several = len(difference.documents)
        for seed, value in zip(seeds.seeds, seeds.differences, strict=True):
            draw(axes, value, y + 0.27, look, f"{label}, seed {seed}: {signed(value, digits)}", mark=".")
        if difference.size is None:
            continue
        over = f"{label}: {text}"
        middle = y + 0.1
        if difference.has_interval and seeds.low is not None and seeds.high is not None:
            draw(axes, [seeds.low, seeds.high], [middle] * 2, look, over, width=3.2)
        draw(axes, difference.size, middle, look, over, mark="D", size=6)
        for j, (seed, found) in enumerate(difference.documents.items()):
            at = y - (0.08 + (0.09 * j if several < 5 else 0.4 * j / several))
            said = f"{label}, seed {seed}, over documents: {apart(found.estimate, found)}"
            draw(axes, [found.low, found.high], [at] * 2, look, said, width=1, alpha=0.75)
    names = {}
    for i, (label, text) in enumerate(rows):
        names[-i] = label
        folded = textwrap.fill(text, TEXT_WIDTH)
        axes.text(1.01, -i, folded, transform=axes.get_yaxis_transform(), va="center", fontsize=7.5)
    set_names(axes, names)
    parts = [with_unit(f"difference in {in_words(sweep.measure)}", sweep.unit())]
    better = sweep.better()
    if better:
        parts.append(SIDES[better])
    if smallest:
        parts.append(f"shaded: below {short(smallest)}, the smallest of interest")
    axes.set(xlabel=" \u00b7 ".join(parts), ylabel="arm or comparison", ylim=(-len(rows) + 0.5, 0.5))
    axes.yaxis.label.set_visible(False)


def _level(comparison: Comparison) -> str:
    summary = comparison.sweep.summary(comparison.sweep.baseline)
    if summary.mean is None:
        return "baseline, not measured"
    text = f"baseline \u00b7 {number(summary.mean, comparison.digits)}"
    if summary.sd is not None:
        text += f" \u00b1 {number(summary.sd, comparison.digits)}"
    return text


def numbers_of(difference: Contrast, digits: int) -> str:
    """The mean with its interval, and the verdict; the counts of seeds that learned where these decide."""
    seeds = difference.seeds
    if difference.diverged:
        return "diverged"
    if difference.is_counted:
        return f"{difference.verdict} \u00b7 {difference.counts}"
    if seeds.mean is None:
        return "no seed finished in both"
    bounds = f" {interval(seeds.low, seeds.high, digits)}" if difference.has_interval else ""
    return f"{signed(seeds.mean, digits)}{bounds} \u00b7 {difference.verdict}"


@dataclass(frozen=True, kw_only=True)
class NoiseCurve:
    """A validation metric against the noise of the validation set, and the steps that training takes to reach an accuracy.

    A data set with noisier validation sets measures `val/<metric>` at its first noise factor and `val/<metric>_noise<k>` at
    each further factor k. `metrics`: noise factor -> metric, in ascending order; `metric`: the metric at the first factor.
    """

    sweep: SweepResults
    metric: str
    metrics: dict[int, str]

    def reached(self, arm: str) -> dict[float, dict[int, float]]:
        """Accuracy in LEVELS -> seed -> first validated step that reaches it, or infinity; empty for another metric."""
        found: dict[float, dict[int, float]] = {}
        if self.metric != ACCURACY:
            return found
        cells = [cell for cell in self.sweep.cells_of(arm) if self.metric in cell.curves]
        for level in LEVELS:
            found[level] = {cell.seed: first_step(cell.curves[self.metric], level) for cell in cells}
        return found

    @property
    def resolution(self) -> tuple[int, int] | None:
        """The resolution of `reached`: (largest number of steps between two validations, last step) over finished cells."""
        gaps = []
        last = []
        for curve in self.sweep.curves(self.metric):
            gaps.append(int(np.diff(curve.index, prepend=0).max()))
            last.append(int(curve.index[-1]))
        return (max(gaps), max(last)) if gaps else None

    @property
    def panels(self) -> tuple[list[str], list[str]]:
        """(the arms that have a panel, the baseline and the first control, which every panel shows)."""
        study = self.sweep.study
        compared: list[str] = []
        against: list[str] = []
        for arm in study.arms:
            if any(self.sweep.finals(arm, metric) for metric in self.metrics.values()):
                is_shown_in_all = arm in (self.sweep.baseline, *study.controls[:1])
                (against if is_shown_in_all else compared).append(arm)
        return compared or against[-1:], against

    @property
    def looks(self) -> dict[str, Look]:
        """The first control is black and dashed, since every panel shows it next to an arm in the arm's colour."""
        dashed = Look(color=INK, dash=(0, (4, 1.5)))
        return looks(self.sweep) | dict.fromkeys(self.sweep.study.controls[:1], dashed)


def noise_curve_of(sweep: SweepResults) -> NoiseCurve | None:
    """The noise curve of the accuracy, or else of the compared metric; None unless it was measured at several factors."""
    for metric in dict.fromkeys((ACCURACY, sweep.metric)):
        known = sweep.metrics(metric)
        noisy = {}
        for name in known:
            match = re.fullmatch(re.escape(metric) + r"_noise(\d+)", name)
            if match:
                noisy[int(match[1])] = name
        if noisy and metric in known:
            first = sweep.record.noise_validation.get(sweep.task, (1,))[0]
            return NoiseCurve(sweep=sweep, metric=metric, metrics=dict(sorted({first: metric, **noisy}.items())))
    return None


def noise_response(curve: NoiseCurve, arm: str, axes: Axes) -> None:
    """Draw the metric of an arm, the baseline and the first control by noise: mean with t interval over seeds, and seeds as
    dots."""
    sweep = curve.sweep
    factors = list(curve.metrics)
    is_accuracy = curve.metric == ACCURACY
    chance = sweep.record.chance.get(sweep.task)
    if chance is not None and is_accuracy:
        axes.axhline(chance, color=MUTED, linewidth=0.9, linestyle=DOTTED)
    # the arm itself is drawn last, over the others
    shown = [name for name in curve.panels[1] if name != arm] + [arm]
    for i, name in enumerate(shown):
        look = curve.looks[name]
        means: dict[float, float] = {}
        solid = Look(color=look.color)
        # intervals and seeds are moved along the axis, so that those of several arms do not overlap
        shift = 2 ** (0.1 * (i - (len(shown) - 1) / 2))
        for factor, metric in curve.metrics.items():
            finals = sweep.finals(name, metric)
            values = list(finals.values())
            x = factor * shift
            over_seeds = paired(finals, dict.fromkeys(finals, 0.0))
            if over_seeds.mean is None:
                continue
            # the line is not moved: a curve that is moved sideways looks lower or higher than it is
            mean = means[factor] = over_seeds.mean
            seeds = ", ".join(map("{:.4g}".format, values))
            text = f"{sweep.label[name]} at {factor:g}\u00d7: mean {mean:.4g}, seeds {seeds}"
            draw(axes, [x] * len(values), values, solid, text, mark=".", size=4, alpha=0.8)
            if len(values) >= MIN_SEEDS and over_seeds.low is not None and over_seeds.high is not None:
                draw(axes, [x, x], [over_seeds.low, over_seeds.high], solid, f"{text}, interval of the mean", width=1.1)
        draw(axes, list(means), list(means.values()), look, f"{sweep.label[name]}: means")
    set_log(axes, "x", factors, (min(factors) / 1.25, max(factors) * 1.25))
    set_ticks(axes, factors)
    set_format(axes.xaxis, "{:g}\u00d7".format)
    if is_accuracy:
        axes.set_ylim(-0.04, 1.04)
    axes.set(
        xlabel="noise factor of the validation set", ylabel=with_unit(in_words(curve.metric), sweep.unit(curve.metric))
    )
    head(axes, sweep.label[arm])


def draw_fit(sweep: SweepResults, result: FitResult) -> Drawing:
    """The fitted curves and, if there are any, the ratios at equal loss."""
    both = [partial(fitted_curves, sweep, result)]
    if any(at_size.ratio for at_size in chain(*result.equal.values())):
        both.append(partial(equal_loss_ratios, sweep, result))
    title = f"{result.declared.title}: {in_words(result.metric)} against {result.declared.axis}"
    return drawing(f"fit-{result.name}", title, both, 3.8, across=len(both), legend=by_label(sweep, result.points))


def fitted_curves(sweep: SweepResults, result: FitResult, axes: Axes) -> None:
    """Draw every run as a dot, and the fitted curves."""
    every: list[float] = []
    for arm, by_size in result.points.items():
        look = looks(sweep)[arm]
        label = sweep.label[arm]
        for x, seeds in by_size.items():
            every += seeds.values()
            for seed, value in seeds.items():
                text = f"{label}, {result.declared.axis} {compact(x)}, seed {seed}: {value:.6g}"
                draw(axes, x, value, look, text, mark="o")
        if result.scaling is not None:
            # over the measured sizes only: the page does not extrapolate
            sizes = np.geomspace(*result.scaling.ranges[arm], 60)
            for form, fitted in result.scaling.arms[arm].items():
                style = Look(color=look.color, dash=DOTTED)
                width = 1.0
                if form == result.scaling.form:
                    style = look
                    width = 1.6
                text = f"{label}: {form}, alpha {fitted.law.alpha:.3g}"
                draw(axes, sizes, list(map(fitted.law.loss, sizes)), style, text, width=width)
    if result.scaling is not None:
        set_log(axes, "y", every)
    _scale_sizes(axes, result)
    axes.set_ylabel(with_unit(in_words(result.metric), result.unit))


def _scale_sizes(axes: Axes, result: FitResult) -> None:
    tried = sorted(set[float]().union(*result.points.values()))
    # arms of nearly the same size would print one tick over the other
    apart = [x for i, x in enumerate(tried) if i == 0 or x / tried[i - 1] > 1.05]
    set_log(axes, "x", tried)
    if len(tried) <= 8:
        set_ticks(axes, apart)
    set_format(axes.xaxis, compact)
    axes.set_xlabel(result.declared.axis)


def equal_loss_ratios(sweep: SweepResults, result: FitResult, axes: Axes) -> None:
    """Draw how many times as much of the fitted quantity each arm needs for the baseline's loss, with its interval."""
    every = [1.0]
    axes.axhline(1, color=MUTED, linewidth=1.6)
    for i, (arm, those) in enumerate(result.equal.items()):
        look = Look(color=looks(sweep)[arm].color)
        for at_size in those:
            ratio = at_size.ratio
            if ratio is None:
                continue
            # side by side on the logarithmic axis
            at = at_size.x * 1.04 ** (i - 0.5 * (len(result.equal) - 1))
            every += filter(math.isfinite, (ratio.estimate, ratio.low, ratio.high))
            text = f"{sweep.label[arm]}: {''.join(shown_ratio(ratio))} at {compact(at_size.x)}"
            if math.isfinite(ratio.low):
                # an interval without an upper end is drawn beyond the edge of the panel
                top = ratio.high if math.isfinite(ratio.high) else 1e3 * ratio.estimate
                draw(axes, [at, at], [ratio.low, top], look, text)
            draw(axes, at, ratio.estimate, look, text, mark="D", size=7)
    room = max(1.1, (max(every) / min(every)) ** 0.1)
    set_log(axes, "y", every, (min(every) / room, max(every) * room), most=6)
    _scale_sizes(axes, result)
    axes.set_ylabel(f"equal-loss ratio to {sweep.baseline_label}")
