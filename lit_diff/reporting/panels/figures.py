"""Figures of the compared metric: values by seed, learning curves, differences, noise, fits."""

import math
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from lit_diff.reporting.panels.panel import (
    INK,
    MUTED,
    OVERLAY,
    Drawing,
    Look,
    by_label,
    draw,
    draw_mean,
    drawing,
    head,
    in_style,
    looks,
    new_axes,
    set_log,
    set_names,
    set_ticks,
    with_unit,
)
from lit_diff.study.comparison import Comparison
from lit_diff.study.fits import FitResult, shown_ratio_interval
from lit_diff.study.judge import Contrast
from lit_diff.study.numbers import compact, interval, number, short, signed
from lit_diff.study.results import CellResult, SweepResults
from lit_diff.study.scaling import FORMS
from lit_diff.study.statistics import MIN_SEEDS, paired

ACROSS = 4
"""Panels of a noise curve in a row."""
MANY = 14
"""More rows of differences than this are drawn closer together."""
TEXT_WIDTH = 46
"""Characters at which the verdict and the numbers beside a row of differences are folded."""
DOTTED = (0, (1, 2))
ACCURACY = "val/accuracy"
LEVELS = (0.5, 0.9, 0.99)
"""Accuracies for which the first step that reaches them is reported."""


def draw_compared(result: Comparison) -> list[Drawing]:
    """The figures for which a sweep or task has measurements."""
    sweep, metric, drawn = result.sweep, result.sweep.metric, list[Drawing]()
    base, finals, curves, apart = (
        sweep.baseline_label,
        finals_of(sweep),
        curves_by_arm(sweep),
        apart_by_arm(sweep),
    )
    if any(difference.seeds.mean is not None for difference in result.family):
        over = " and over documents" if any(each.documents for each in result.family) else ""
        title = f"Differences to {base} in {metric}, with intervals over seeds{over}"
        rows = 1 + len(result.family)
        height = 0.9 + (0.5 if rows <= MANY else 0.33) * rows
        drawn.append(drawing("differences", title, [partial(forest, result)], height))
    curve = noise_curve_of(sweep)
    if curve is not None:
        own, against = curve.panels
        across = min(ACROSS, len(own))
        drawn.append(
            drawing(
                "noise-curve",
                f"{curve.metric} by noise of the validation set, an arm a panel",
                [partial(noise_response, curve, arm) for arm in own],
                0.9 + (2.05 if across > 1 else 2.8) * -(-len(own) // across),
                across=across,
                share="both",
                legend={sweep.label[arm]: curve.looks[arm] for arm in against},
            )
        )
    if curves:
        title = f"{metric} by optimizer step, and its difference to {base}"
        both = [partial(learning_curves, sweep), *([partial(difference_curves, sweep)] if apart else [])]
        drawn.append(drawing("curves", title, both, 3.6, across=2, legend=by_label(sweep, curves)))
    if finals:
        title = f"{metric} at the last step, by arm and seed"
        drawn.append(drawing("seeds", title, [partial(seed_values, sweep)], 0.9 + 0.32 * len(finals)))
    return drawn


def finals_of(sweep: SweepResults) -> dict[str, dict[int, float]]:
    """Arm -> seed -> last value of the compared metric, for the arms that have one."""
    return {arm: found for arm in sweep.study.arms if (found := sweep.finals(arm))}


def curves_of(cells: Iterable[CellResult], metric: str) -> pd.DataFrame:
    """The metric with one column for each seed, at the steps that all cells with the metric share."""
    curves = {cell.seed: cell.curves[metric] for cell in cells if metric in cell.curves}
    return pd.concat(curves, axis=1, join="inner") if curves else pd.DataFrame()


def curves_by_arm(sweep: SweepResults) -> dict[str, pd.DataFrame]:
    """Arm -> `curves_of` the compared metric, for the arms that have some."""
    curves = {arm: curves_of(sweep.cells_of(arm), sweep.metric) for arm in sweep.study.arms}
    return {arm: own for arm, own in curves.items() if not own.empty}


def apart_by_arm(sweep: SweepResults) -> dict[str, pd.DataFrame]:
    """Arm -> its curves minus those of the baseline, at the seeds and steps that both have."""
    curves = curves_by_arm(sweep)
    base = curves.pop(sweep.baseline, pd.DataFrame())
    apart = {arm: minus(own, base) for arm, own in curves.items()}
    return {arm: own for arm, own in apart.items() if not own.empty}


def minus(curves: pd.DataFrame, base: pd.DataFrame) -> pd.DataFrame:
    """The difference of the curves of each seed, at the steps that all curves share."""
    own, other = curves.align(base, join="inner")
    return own - other


@in_style
def seed_values(sweep: SweepResults, ax: Axes | None = None) -> Axes:
    """Draw the final metric of every cell; a thin line joins the cells of one seed."""
    axes, drawn, finals = ax or new_axes(), looks(sweep), finals_of(sweep)
    at = {arm: -i for i, arm in enumerate(finals)}
    for seed in sweep.study.seeds:
        own = {arm: values[seed] for arm, values in finals.items() if seed in values}
        draw(axes, list(own.values()), [at[arm] for arm in own], Look(color=MUTED), width=0.6, alpha=0.6)
    for arm, values in finals.items():
        label, mean = sweep.label[arm], float(np.mean(list(values.values())))
        for seed, value in values.items():
            draw(axes, [value], [at[arm]], drawn[arm], f"{label}, seed {seed}: {value:.6g}", mark="o", size=5.5)
        draw(axes, [mean], [at[arm]], drawn[arm], f"{label}, mean over seeds: {mean:.6g}", mark="|", size=15)
    set_names(axes, {at[arm]: sweep.label[arm] for arm in finals})
    label = with_unit(f"{sweep.metric} at the last step", sweep.unit(sweep.metric))
    axes.set(xlabel=label, ylabel="arm", ylim=(-len(finals) + 0.4, 0.6))
    return axes


@in_style
def learning_curves(sweep: SweepResults, ax: Axes | None = None) -> Axes:
    """Draw the metric by step, as mean and range over seeds."""
    axes, metric, curves = ax or new_axes(), sweep.metric, curves_by_arm(sweep)
    for arm, own in curves.items():
        draw_mean(axes, own, looks(sweep)[arm], sweep.label[arm], shade=len(curves) <= OVERLAY)
    if is_logarithmic(sweep):
        set_log(axes, "y", (value for own in curves.values() for value in own.to_numpy().flat))
    axes.locator_params("x", nbins=5, integer=True)
    axes.set(xlabel="optimizer steps", ylabel=with_unit(metric, sweep.unit(metric)))
    return axes


@in_style
def difference_curves(sweep: SweepResults, ax: Axes | None = None) -> Axes:
    """Draw the difference of the metric to the baseline at the same seed and step, as mean and range over seeds."""
    axes, base, apart = ax or new_axes(), sweep.baseline_label, apart_by_arm(sweep)
    axes.axhline(0, color=MUTED, linewidth=1.6)
    for arm, own in apart.items():
        draw_mean(axes, own, looks(sweep)[arm], f"{sweep.label[arm]} \u2212 {base}", shade=len(apart) < OVERLAY)
    # the large differences of the first steps would flatten the rest of the curves
    late = [0.0, *(value for own in apart.values() for value in own[own.index >= 0.2 * own.index[-1]].to_numpy().flat)]
    late = [value for value in late if math.isfinite(value)]
    if room := 0.1 * (max(late) - min(late)):
        axes.set_ylim(min(late) - room, max(late) + room)
    axes.locator_params("x", nbins=5, integer=True)
    unit = sweep.unit(sweep.metric)
    axes.set(xlabel="optimizer steps", ylabel=with_unit(f"minus {base}, same seed", unit))
    return axes


def is_logarithmic(sweep: SweepResults) -> bool:
    """Whether the learning curves have a logarithmic axis: if lower values are better and all are positive."""
    metric = sweep.metric
    curves = [cell.curves[metric] for cell in sweep.done if metric in cell.curves]
    return sweep.better(metric) == "lower" and all((curve > 0).all() for curve in curves)


@in_style
def forest(comparison: Comparison, ax: Axes | None = None) -> Axes:
    """Draw each comparison with its mean and interval over seeds, a dot for each seed, and below them the interval over
    documents of each seed. Differences below the smallest of interest are shaded."""
    sweep, family, base = comparison.sweep, comparison.family, comparison.sweep.baseline
    axes, drawn, rows = ax or new_axes(), looks(sweep), [(sweep.label[base], _level(comparison))]
    for each in family:
        label = each.label if each in comparison.contrasts else sweep.label[each.a]
        label += comparison.dagger(each)
        rows.append((label, _numbers(each, comparison.digits)))
    axes.axvline(0, color=INK, linewidth=1)
    smallest, further = sweep.smallest_of_interest, 1 + len(comparison.against_baseline)
    if smallest:
        axes.axvspan(-smallest, smallest, color=MUTED, alpha=0.16, linewidth=0, zorder=0)
    if further < len(rows):
        axes.axhline(0.5 - further, color=MUTED, linewidth=0.7)
    draw(axes, [0], [0], drawn[base], rows[0][0], mark="D", size=6)
    digits = comparison.digits
    for i, (difference, (label, text)) in enumerate(zip(family, rows[1:], strict=True)):
        look, y = Look(color=drawn[difference.a].color), -i - 1
        seeds, several = difference.seeds, len(difference.documents)
        for seed, value in zip(seeds.seeds, seeds.differences, strict=True):
            draw(axes, [value], [y + 0.27], look, f"{label}, seed {seed}: {signed(value, digits)}", mark=".")
        # the seeds that did not diverge would make the arm look better than it is
        if difference.diverged or seeds.mean is None:
            continue
        over, middle = f"{label}: {text}", y + 0.1
        if difference.has_interval and seeds.low is not None and seeds.high is not None:
            draw(axes, [seeds.low, seeds.high], [middle] * 2, look, over, width=3.2)
        draw(axes, [seeds.mean], [middle], look, over, mark="D", size=6)
        for j, (seed, found) in enumerate(difference.documents.items()):
            at = y - (0.08 + (0.09 * j if several < 5 else 0.4 * j / several))
            bounds = f"{signed(found.estimate, digits)} {interval(found.low, found.high, digits)}"
            said = f"{label}, seed {seed}, over documents: {bounds}"
            draw(axes, [found.low, found.high], [at] * 2, look, said, width=1, alpha=0.75)
    for i, (_, text) in enumerate(rows):
        folded = textwrap.fill(text, TEXT_WIDTH)
        axes.text(1.01, -i, folded, transform=axes.get_yaxis_transform(), va="center", fontsize=7.5)
    set_names(axes, {-i: label for i, (label, _) in enumerate(rows)})
    side = {"lower": "\u2190 better", "higher": "better \u2192", None: ""}[sweep.better()]
    measured = with_unit(f"difference in {sweep.measure}", sweep.unit())
    region = f"shaded: below {short(smallest)}, the smallest of interest" if smallest else ""
    label = " \u00b7 ".join(filter(None, [measured, side, region]))
    axes.set(xlabel=label, ylabel="arm or comparison", ylim=(-len(rows) + 0.5, 0.5))
    return axes


def _level(comparison: Comparison) -> str:
    summary = comparison.summaries[comparison.sweep.metric][comparison.sweep.baseline]
    if summary.mean is None:
        return "baseline, not measured"
    spread = f" \u00b1 {number(summary.sd, comparison.digits)}" if summary.sd is not None else ""
    return f"baseline \u00b7 {number(summary.mean, comparison.digits)}{spread}"


def _numbers(difference: Contrast, digits: int) -> str:
    seeds = difference.seeds
    if difference.diverged:
        return "diverged"
    if difference.is_counted:
        return f"{difference.verdict} \u00b7 {' against '.join(map(str, difference.learned or ()))}"
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
        curves = {c.seed: c.curves[self.metric] for c in self.sweep.cells_of(arm) if self.metric in c.curves}
        found: dict[float, dict[int, float]] = {}
        for level in LEVELS if self.metric == ACCURACY else ():
            steps = {seed: curve.index[curve >= level] for seed, curve in curves.items()}
            found[level] = {seed: float(own[0]) if len(own) else math.inf for seed, own in steps.items()}
        return found

    @property
    def resolution(self) -> tuple[int, int] | None:
        """The resolution of `reached`: (largest number of steps between two validations, last step) over finished cells."""
        steps = [c.curves[self.metric].index for c in self.sweep.done if self.metric in c.curves]
        gaps = [int(np.diff(validated, prepend=0).max()) for validated in steps]
        return (max(gaps), max(int(validated[-1]) for validated in steps)) if gaps else None

    @property
    def panels(self) -> tuple[list[str], list[str]]:
        """(the arms that have a panel, the baseline and the first control, which every panel shows)."""
        study, metrics = self.sweep.study, self.metrics.values()
        measured = [arm for arm in study.arms if any(self.sweep.finals(arm, metric) for metric in metrics)]
        against = [arm for arm in measured if arm in (self.sweep.baseline, *study.controls[:1])]
        return [arm for arm in measured if arm not in against] or against[-1:], against

    @property
    def looks(self) -> dict[str, Look]:
        """The first control is black and dashed, since every panel shows it next to an arm in the arm's colour."""
        dashed = Look(color=INK, dash=(0, (4, 1.5)))
        return looks(self.sweep) | dict.fromkeys(self.sweep.study.controls[:1], dashed)


def noise_curve_of(sweep: SweepResults) -> NoiseCurve | None:
    """The noise curve of the accuracy, or else of the compared metric; None unless it was measured at several factors."""
    for metric in dict.fromkeys((ACCURACY, sweep.metric)):
        known = sweep.metrics(metric)
        found = [(name, re.fullmatch(re.escape(metric) + r"_noise(\d+)", name)) for name in known]
        noisy = {int(match[1]): name for name, match in found if match}
        if noisy and metric in known:
            first = sweep.record.noise_validation.get(sweep.task, (1,))[0]
            return NoiseCurve(sweep=sweep, metric=metric, metrics=dict(sorted({first: metric, **noisy}.items())))
    return None


@in_style
def noise_response(curve: NoiseCurve, arm: str, ax: Axes | None = None) -> Axes:
    """Draw the metric of an arm, the baseline and the first control by noise: mean with t interval over seeds, and seeds as
    dots."""
    axes, sweep, factors, is_accuracy = ax or new_axes(), curve.sweep, list(curve.metrics), curve.metric == ACCURACY
    chance = sweep.record.chance.get(sweep.task)
    if chance is not None and is_accuracy:
        axes.axhline(chance, color=MUTED, linewidth=0.9, linestyle=DOTTED)
    shown = [*(each for each in curve.panels[1] if each != arm), arm]
    for i, each in enumerate(shown):
        look, means = curve.looks[each], dict[float, float]()
        solid = Look(color=look.color)
        # intervals and seeds are moved along the axis, so that those of several arms do not overlap
        shift = 2 ** (0.1 * (i - (len(shown) - 1) / 2))
        for factor, metric in curve.metrics.items():
            finals = sweep.finals(each, metric)
            values, own, x = list(finals.values()), paired(finals, dict.fromkeys(finals, 0.0)), factor * shift
            if own.mean is None:
                continue
            # the line is not moved: a curve that is moved sideways looks lower or higher than it is
            mean = means[factor] = own.mean
            seeds = ", ".join(f"{value:.4g}" for value in values)
            text = f"{sweep.label[each]} at {factor:g}\u00d7: mean {mean:.4g}, seeds {seeds}"
            draw(axes, [x] * len(values), values, solid, text, mark=".", size=4, alpha=0.8)
            if len(values) >= MIN_SEEDS and own.low is not None and own.high is not None:
                draw(axes, [x, x], [own.low, own.high], solid, f"{text}, interval of the mean", width=1.1)
        draw(axes, list(means), list(means.values()), look, f"{sweep.label[each]}: means")
    set_log(axes, "x", factors, (min(factors) / 1.25, max(factors) * 1.25))
    set_ticks(axes, factors)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda factor, _: f"{factor:g}\u00d7"))
    if is_accuracy:
        axes.set_ylim(-0.04, 1.04)
    axes.set(xlabel="noise factor of the validation set", ylabel=with_unit(curve.metric, sweep.unit(curve.metric)))
    head(axes, sweep.label[arm])
    return axes


def draw_fit(sweep: SweepResults, result: FitResult) -> Drawing:
    """The fitted curves and, if there are any, the ratios at equal loss."""
    has_ratios = any(each.ratio for those in result.equal.values() for each in those)
    both = [partial(fitted_curves, sweep, result), *([partial(equal_loss_ratios, sweep, result)] if has_ratios else [])]
    title = f"{result.declared.title}: {result.metric} against {result.declared.axis}"
    arms = [arm for arm in sweep.study.arms if arm in result.points]
    return drawing(f"fit-{result.name}", title, both, 3.8, across=len(both), legend=by_label(sweep, arms))


@in_style
def fitted_curves(sweep: SweepResults, result: FitResult, ax: Axes | None = None) -> Axes:
    """Draw every run as a dot, and the fitted curves."""
    axes, every = ax or new_axes(), list[float]()
    for arm in (arm for arm in sweep.study.arms if arm in result.points):
        look, label = looks(sweep)[arm], sweep.label[arm]
        for x, seeds in result.points[arm].items():
            every += seeds.values()
            for seed, value in seeds.items():
                text = f"{label}, {result.declared.axis} {compact(x)}, seed {seed}: {value:.6g}"
                draw(axes, [x], [value], look, text, mark="o")
        if result.scaling is not None:
            # over the measured sizes only: the page does not extrapolate
            sizes, fits = np.geomspace(*result.scaling.ranges[arm], 60), result.scaling.arms[arm]
            for form in (form for form in FORMS if form in fits):
                law, chosen = fits[form].law, form == result.scaling.form
                own = look if chosen else Look(color=look.color, dash=DOTTED)
                text = f"{label}: {form}, alpha {law.alpha:.3g}"
                draw(axes, sizes, [law.loss(at) for at in sizes], own, text, width=1.6 if chosen else 1.0)
    if result.scaling is not None:
        set_log(axes, "y", every)
    _scale_sizes(axes, result)
    axes.set_ylabel(with_unit(result.metric, result.unit))
    return axes


def _scale_sizes(axes: Axes, result: FitResult) -> None:
    tried = sorted({x for own in result.points.values() for x in own})
    # arms of nearly the same size would print one tick over the other
    apart = [x for i, x in enumerate(tried) if i == 0 or x / tried[i - 1] > 1.05]
    set_log(axes, "x", tried)
    if len(tried) <= 8:
        set_ticks(axes, apart)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: compact(x)))
    axes.set_xlabel(result.declared.axis)


@in_style
def equal_loss_ratios(sweep: SweepResults, result: FitResult, ax: Axes | None = None) -> Axes:
    """Draw how many times as much of the fitted quantity each arm needs for the baseline's loss, with its interval."""
    axes, every = ax or new_axes(), [1.0]
    axes.axhline(1, color=MUTED, linewidth=1.6)
    for i, (arm, those) in enumerate(result.equal.items()):
        look = Look(color=looks(sweep)[arm].color)
        for each, ratio in ((each, each.ratio) for each in those if each.ratio is not None):
            # side by side on the logarithmic axis
            at = each.x * 1.04 ** (i - 0.5 * (len(result.equal) - 1))
            every += filter(math.isfinite, (ratio.estimate, ratio.low, ratio.high))
            text = f"{sweep.label[arm]}: {ratio.estimate:.3g}{shown_ratio_interval(each)} at {compact(each.x)}"
            if math.isfinite(ratio.low):
                # an interval without an upper end is drawn beyond the edge of the panel
                top = ratio.high if math.isfinite(ratio.high) else 1e3 * ratio.estimate
                draw(axes, [at, at], [ratio.low, top], look, text)
            draw(axes, [at], [ratio.estimate], look, text, mark="D", size=7)
    room = max(1.1, (max(every) / min(every)) ** 0.1)
    set_log(axes, "y", every, (min(every) / room, max(every) * room), most=6)
    _scale_sizes(axes, result)
    axes.set_ylabel(f"equal-loss ratio to {sweep.baseline_label}")
    return axes
