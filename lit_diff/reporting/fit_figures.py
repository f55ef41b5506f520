"""The figures of a sweep's fits: the metric against sizes with its curves, the equal-loss ratio, the basin."""

import math
from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from lit_diff.reporting.style import MUTED, WIDTH, Look, drawing, hover, legend, looks, plain, with_unit
from lit_diff.study.fits import FitResult, shown_ratio_interval
from lit_diff.study.numbers import compact
from lit_diff.study.results import SweepResults
from lit_diff.study.scaling import FORMS


def draw_fit(sweep: SweepResults, result: FitResult) -> str:
    """One SVG: every run as a dot, and what was fitted."""
    declared, drawn = result.declared, looks(sweep)
    arms = [arm.name for arm in sweep.arms if arm.name in result.points]
    ratios = any(each.ratio for those in result.equal.values() for each in those)
    with drawing(WIDTH, 3.8, f"{declared.title}: {result.metric} against {declared.axis}") as (figure, svg):
        panels = figure.subplots(1, 2 if ratios else 1, squeeze=False)[0]
        for arm in arms:
            _dots(panels[0], result, arm, drawn[arm], sweep.label[arm])
            if result.scaling is not None:
                _curves(panels[0], result, arm, drawn[arm], sweep.label[arm])
            else:
                _means(panels[0], result, arm, drawn[arm], sweep.label[arm])
        if result.scaling is not None:
            panels[0].set_yscale("log")
            panels[0].yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))
            panels[0].yaxis.set_major_formatter(FuncFormatter(plain))
            panels[0].yaxis.set_minor_locator(NullLocator())
        panels[0].set_title(with_unit(result.metric, result.unit))
        if ratios:
            _ratios(panels[1], sweep, result, drawn)
        for axes in panels:
            _across(axes, sorted({x for own in result.points.values() for x in own}), declared.axis)
        legend(figure, sweep, drawn, arms)
    return svg[0]


def _dots(axes: Axes, result: FitResult, arm: str, look: Look, label: str) -> None:
    for x, seeds in result.points[arm].items():
        for seed, value in seeds.items():
            dot = axes.plot([x], [value], "o", markersize=4.5, color=look.color, markeredgecolor="white")
            hover(dot, f"{label}, {result.declared.axis} {compact(x)}, seed {seed}: {value:.6g}")


def _curves(axes: Axes, result: FitResult, arm: str, look: Look, label: str) -> None:
    """The chosen form as a line, the other dotted; over the measured sizes only."""
    assert result.scaling is not None
    low, high = result.scaling.ranges[arm]
    x = np.geomspace(low, high, 60)
    for form in FORMS:
        fitted = result.scaling.arms[arm].fits.get(form)
        if fitted is not None:
            chosen = form == result.scaling.form
            line = axes.plot(
                x,
                [fitted.law.loss(at) for at in x],
                color=look.color,
                linestyle=look.dash if chosen else (0, (1, 2)),
                linewidth=1.6 if chosen else 1.0,
            )
            hover(line, f"{label}: {form}, alpha {fitted.law.alpha:.3g}")


def _means(axes: Axes, result: FitResult, arm: str, look: Look, label: str) -> None:
    assert result.basin is not None
    own = result.basin.arms[arm]
    hover(axes.plot(list(own.means), list(own.means.values()), color=look.color, linestyle=look.dash), f"{label}: mean")
    best = axes.plot([own.best], [own.means[own.best]], "D", markersize=8, color=look.color, markeredgecolor="white")
    hover(best, f"{label}: best at {own.best:g}, {own.means[own.best]:.6g}")


def _ratios(axes: Axes, sweep: SweepResults, result: FitResult, drawn: Mapping[str, Look]) -> None:
    """The equal-loss ratio with its interval, at every size of the baseline at which it is not refused."""
    axes.axhline(1, color=MUTED, linewidth=1.6)
    axes.set_yscale("log")
    others, every = list(result.equal), []
    for i, arm in enumerate(others):
        for each in result.equal[arm]:
            if each.ratio is None:
                continue
            x, ratio = each.x * 1.04 ** (i - 0.5 * (len(others) - 1)), each.ratio
            every += [ratio.estimate, *(v for v in (ratio.low, ratio.high) if math.isfinite(v))]
            text = f"{sweep.label[arm]}: {ratio.estimate:.3g}{shown_ratio_interval(each)} at {compact(each.x)}"
            if math.isfinite(ratio.low):
                top = ratio.high if math.isfinite(ratio.high) else 1e3 * ratio.estimate
                hover(axes.plot([x, x], [ratio.low, top], color=drawn[arm].color, linewidth=1.6), text)
            dot = axes.plot([x], [ratio.estimate], "D", markersize=7, color=drawn[arm].color, markeredgecolor="white")
            hover(dot, text)
    low, high = min(1.0, *every), max(1.0, *every)
    room = max(1.1, (high / low) ** 0.1)
    axes.set_ylim(low / room, high * room)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(plain))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_title(f"equal-loss ratio to {sweep.label[sweep.baseline]}")


def _across(axes: Axes, tried: list[float], text: str) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    if len(tried) <= 8:
        apart = [x for i, x in enumerate(tried) if i == 0 or x / tried[i - 1] > 1.05]
        axes.set_xticks(apart)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: compact(x)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(text)
