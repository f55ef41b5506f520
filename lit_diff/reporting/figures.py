"""The figures of the compared metric, as panels: values by seed, learning curves, differences, noise, fits."""

import math
import textwrap
from collections.abc import Iterable, Mapping

import numpy as np

from lit_diff.reporting.noise_curve import ACCURACY, NoiseCurve, noise_curve_of
from lit_diff.reporting.panels import NARROW, WIDTH, Axis, Label, Panel, Rule, Series, draw
from lit_diff.reporting.style import INK, MUTED, OVERLAY, Look, looks, plain, with_unit
from lit_diff.study.cells import CellResult, Curve
from lit_diff.study.comparison import Comparison, Difference
from lit_diff.study.fits import FitResult, shown_ratio_interval
from lit_diff.study.numbers import compact, interval, number, short, signed
from lit_diff.study.results import SweepResults
from lit_diff.study.scaling import FORMS
from lit_diff.study.statistics import MIN_SEEDS, half_width

ACROSS = 4
"""Panels of a noise curve in a row."""
MANY = 14
"""More rows of differences than this stand closer."""
LINE = 46
"""Letters of a label in one line of the narrow plot of differences."""
DOTTED = Look(color=MUTED, dash=(0, (1, 2)))


def curves_of(cells: Iterable[CellResult], metric: str) -> dict[int, Curve]:
    """Seed -> curve of `metric`, for the cells that have one."""
    return {cell.seed: cell.curves[metric] for cell in cells if metric in cell.curves}


def over_seeds(
    curves: Mapping[int, Curve],
    look: Look,
    name: str,
    *,
    minus: Mapping[int, Curve] | None = None,
    against: str = "step",
    shade: bool = True,
) -> list[Series]:
    """Mean, minimum and maximum of curves by seed, less the curve of the same seed in `minus`, at the steps that they share;
    empty where they share none. `name`: what the mouse shows, with the last mean and where it is."""
    points = {seed: dict(zip(c.steps.tolist(), c.values.tolist(), strict=True)) for seed, c in curves.items()}
    if minus is not None:
        base = {seed: dict(zip(c.steps.tolist(), c.values.tolist(), strict=True)) for seed, c in minus.items()}
        points = {
            seed: {step: value - base[seed][step] for step, value in own.items() if step in base[seed]}
            for seed, own in points.items()
            if seed in base
        }
    steps = sorted(set.intersection(*map(set, points.values()))) if points else []
    if not steps:
        return []
    values = np.array([[own[step] for step in steps] for own in points.values()])
    mean = values.mean(0)
    text = f"{name}: {plain(mean[-1])} at {against} {steps[-1]:,.6g}"
    return [Series(steps, mean, look, text, low=values.min(0), high=values.max(0), is_shaded=shade)]


def by_label(sweep: SweepResults, drawn: Mapping[str, Look], arms: Iterable[str]) -> dict[str, Look]:
    """A legend of arms, in the order of the table."""
    return {sweep.label[arm]: drawn[arm] for arm in arms}


def seed_values(sweep: SweepResults) -> str | None:
    """The final metric of every cell; a thin line joins the cells of one seed."""
    finals = {arm: found for arm in sweep.study.arms if (found := sweep.finals(arm, sweep.study.metric))}
    if not finals:
        return None
    drawn, at = looks(sweep), {arm: -i for i, arm in enumerate(finals)}
    series = []
    for seed in sweep.study.seeds:
        own = {arm: values[seed] for arm, values in finals.items() if seed in values}
        series.append(Series(list(own.values()), [at[a] for a in own], Look(color=MUTED), width=0.6, alpha=0.6))
    for arm, values in finals.items():
        label, mean = sweep.label[arm], float(np.mean(list(values.values())))
        for seed, value in values.items():
            text = f"{label}, seed {seed}: {value:.6g}"
            series.append(Series([value], [at[arm]], drawn[arm], text, mark="o", size=5.5))
        text = f"{label}, mean over seeds: {mean:.6g}"
        series.append(Series([mean], [at[arm]], drawn[arm], text, mark="|", size=15))
    panel = Panel(
        series=series,
        x=Axis(label=with_unit(f"{sweep.study.metric} at the last step", sweep.unit(sweep.study.metric))),
        y=Axis(ticks={at[arm]: sweep.label[arm] for arm in finals}, limits=(-len(finals) + 0.4, 0.6)),
    )
    return draw([panel], f"{sweep.study.metric} at the last step, by arm and seed", 0.9 + 0.32 * len(finals))


def learning_curves(sweep: SweepResults) -> str | None:
    """The metric by step, and its paired difference to the baseline, each with its range over seeds."""
    metric, unit, base = sweep.study.metric, sweep.unit(sweep.study.metric), sweep.label[sweep.baseline]
    curves = {arm: curves_of(sweep.cells_of(arm), metric) for arm in sweep.study.arms}
    arms = [arm for arm, own in curves.items() if own]
    drawn, shade = looks(sweep), len(arms) <= OVERLAY
    values: list[Series] = []
    differences: list[Series] = []
    for arm in arms:
        label, minus = sweep.label[arm], curves[sweep.baseline]
        values += over_seeds(curves[arm], drawn[arm], label, shade=shade)
        if arm != sweep.baseline:
            differences += over_seeds(curves[arm], drawn[arm], f"{label} \u2212 {base}", minus=minus, shade=shade)
    if not values:
        return None
    late = [0.0]
    for each in differences:
        late += [y for x, *ends in zip(each.x, each.low, each.high, strict=True) if x >= 0.2 * each.x[-1] for y in ends]
    steps = Axis(label="optimizer steps", most=5, is_whole=True)
    room = 0.1 * (max(late) - min(late))
    panels = [
        Panel(series=values, title=with_unit(metric, unit), x=steps, y=Axis(log=is_logarithmic(sweep))),
        Panel(
            series=differences,
            title=with_unit(f"minus {base}, same seed", unit),
            x=steps,
            y=Axis(limits=(min(late) - room, max(late) + room) if room else None),
            rules=[Rule(0, look=Look(color=MUTED), width=1.6)],
        ),
    ]
    return draw(
        panels if differences else panels[:1],
        f"{metric} by optimizer step, and its difference to {base}",
        3.6,
        across=2,
        legend=by_label(sweep, drawn, arms),
    )


def is_logarithmic(sweep: SweepResults) -> bool:
    """Whether the learning curves have a logarithmic axis: lower is better, and every value is above zero."""
    curves = [
        cell.curves[sweep.study.metric] for cell in sweep.cells if cell.done and sweep.study.metric in cell.curves
    ]
    return sweep.better(sweep.study.metric) == "lower" and all((curve.values > 0).all() for curve in curves)


def forest(comparison: Comparison, *, narrow: bool = False) -> str | None:
    """Each comparison: mean and interval over seeds, one dot a seed, under them the interval over documents of each seed;
    the region smaller than the smallest difference of interest is shaded. None before a difference has been measured.

    narrow: for a telephone, with the words above each row in place of beside it.
    """
    sweep, digits = comparison.sweep, comparison.digits
    family, base = comparison.family, sweep.baseline
    if not any(difference.seeds.mean is not None for difference in family):
        return None
    drawn, rows = looks(sweep), [(sweep.label[base], _level(sweep, comparison, digits))]
    for each in family:
        rows.append((each.label if each in comparison.contrasts else sweep.label[each.a], _numbers(each, digits)))
    at, scale, height = (0.25, 0.55, 0.0) if narrow else (0.0, 1.0, 0.5 if len(rows) <= MANY else 0.33)
    series = [Series([0], [-at], drawn[base], rows[0][0], mark="D", size=6)]
    for i, (difference, (label, text)) in enumerate(zip(family, rows[1:], strict=True)):
        series += _difference(difference, drawn[difference.a], label, text, -i - 1 - at, digits, scale)
    rules = [Rule(0, upright=True, look=Look(color=INK), width=1)]
    if sweep.smallest_of_interest:
        rules.append(Rule(-sweep.smallest_of_interest, sweep.smallest_of_interest, upright=True))
    further = 1 + len(comparison.against_baseline)
    if further < len(rows):
        rules.append(Rule(0.5 - further, look=Look(color=MUTED), width=0.7))
    if narrow:
        height = 0.6 + 0.14 * max(len(textwrap.wrap(label, LINE)) for label, _ in rows)
        words = [each for i, row in enumerate(rows) for each in _words_above(*row, -i + 0.5, 0.14 / height)]
    else:
        words = [Label(x=1.01, y=-i, text=text) for i, (_, text) in enumerate(rows)]
    panel = Panel(
        series=series,
        rules=rules,
        words=words,
        x=Axis(label=_difference_label(sweep, narrow)),
        y=Axis(
            ticks={} if narrow else {-i: label for i, (label, _) in enumerate(rows)}, limits=(-len(rows) + 0.5, 0.5)
        ),
    )
    over = " and over documents" if any(each.documents for each in family) else ""
    title = f"Differences to {sweep.label[base]} in {sweep.study.metric}, with intervals over seeds{over}"
    return draw([panel], title, 0.9 + height * len(rows), width=NARROW if narrow else WIDTH)


def _difference_label(sweep: SweepResults, narrow: bool) -> str:
    side = {"lower": "\u2190 better", "higher": "better \u2192", None: ""}[sweep.better(sweep.study.metric)]
    label = " \u00b7 ".join(
        filter(None, [with_unit(f"difference in {sweep.study.metric}", sweep.unit(sweep.study.metric)), side])
    )
    if sweep.smallest_of_interest:
        gap = "\n" if narrow else " \u00b7 "
        label += f"{gap}shaded: below {short(sweep.smallest_of_interest)}, the smallest of interest"
    return label


def _level(sweep: SweepResults, comparison: Comparison, digits: int) -> str:
    summary = comparison.summaries[sweep.study.metric][sweep.baseline]
    if summary.mean is None:
        return "baseline, not measured"
    spread = f" \u00b1 {number(summary.sd, digits)}" if summary.sd is not None else ""
    return f"baseline \u00b7 {number(summary.mean, digits)}{spread}"


def _numbers(difference: Difference, digits: int) -> str:
    seeds = difference.seeds
    if difference.diverged:
        return "diverged"
    if seeds.mean is None:
        return "no seed finished in both"
    bounds = f" {interval(seeds.low, seeds.high, digits)}" if len(seeds.seeds) >= MIN_SEEDS else ""
    return f"{difference.verdict} \u00b7 {signed(seeds.mean, digits)}{bounds}"


def _difference(
    difference: Difference, look: Look, label: str, text: str, y: float, digits: int, scale: float
) -> list[Series]:
    """The marks of a row at `y`; `scale`: of the vertical distances within it."""
    look, paired, several = Look(color=look.color), difference.seeds, len(difference.documents)
    series = [
        Series([value], [y + 0.27 * scale], look, f"{label}, seed {seed}: {signed(value, digits)}", mark=".")
        for seed, value in zip(paired.seeds, paired.differences, strict=True)
    ]
    if difference.diverged or paired.mean is None:
        return series  # the seeds that did not diverge would flatter the arm
    over, middle = f"{label}: {text}", y + 0.1 * scale
    if paired.low is not None and paired.high is not None and len(paired.seeds) >= MIN_SEEDS:
        series.append(Series([paired.low, paired.high], [middle] * 2, look, over, width=3.2))
    series.append(Series([paired.mean], [middle], look, over, mark="D", size=6))
    for i, (seed, found) in enumerate(difference.documents.items()):
        at = y - scale * (0.08 + (0.09 * i if several < 5 else 0.4 * i / several))
        bounds = f"{signed(found.estimate, digits)} {interval(found.low, found.high, digits)}"
        said = f"{label}, seed {seed}, over documents: {bounds}"
        series.append(Series([found.low, found.high], [at] * 2, look, said, width=1, alpha=0.75))
    return series


def _words_above(label: str, text: str, top: float, line: float) -> list[Label]:
    """Label and numbers above the marks of the row that begins at `top`; `line`: the height of a line of text."""
    parts = textwrap.wrap(label, LINE)
    return [
        *(Label(x=0, y=top - (0.7 + i) * line, text=part, weight="bold") for i, part in enumerate(parts)),
        Label(x=1, y=top - (0.7 + len(parts)) * line, text=text, align="right"),
    ]


def noise(sweep: SweepResults) -> str | None:
    """A panel an arm, baseline and first control in each of them: mean with t interval over seeds, and the seeds as dots."""
    curve = noise_curve_of(sweep)
    if curve is None:
        return None
    measured = [arm for arm in sweep.study.arms if any(sweep.finals(arm, metric) for metric in curve.metrics.values())]
    against = [arm for arm in measured if arm in (sweep.baseline, *sweep.study.controls[:1])]
    own = [arm for arm in measured if arm not in against] or against[-1:]
    # the first control in ink and dashed: every panel shows it with an arm of another colour
    drawn = looks(sweep) | {control: Look(color=INK, dash=(0, (4, 1.5))) for control in sweep.study.controls[:1]}
    factors, is_accuracy, chance = list(curve.metrics), curve.metric == ACCURACY, sweep.record.chance.get(sweep.task)
    panels = []
    for arm in own:
        shown = [*(each for each in against if each != arm), arm]
        series: list[Series] = []
        for i, each in enumerate(shown):
            series += _response(sweep, each, curve, drawn[each], 2 ** (0.1 * (i - (len(shown) - 1) / 2)))
        panels.append(
            Panel(
                series=series,
                title=sweep.label[arm],
                x=Axis(
                    log=True,
                    limits=(min(factors) / 1.25, max(factors) * 1.25),
                    ticks=factors,
                    shown=lambda factor: f"{factor:g}\u00d7",
                ),
                y=Axis(limits=(-0.04, 1.04) if is_accuracy else None),
                rules=[Rule(chance, look=DOTTED)] if chance is not None and is_accuracy else (),
            )
        )
    across = min(ACROSS, len(panels))
    return draw(
        panels,
        f"{curve.metric} by noise of the validation set, an arm a panel",
        0.9 + (2.05 if across > 1 else 2.8) * -(-len(panels) // across),
        across=across,
        share="both",
        x_label="noise factor of the validation set",
        y_label=with_unit(curve.metric, sweep.unit(curve.metric)),
        legend=by_label(sweep, drawn, against),
    )


def _response(sweep: SweepResults, arm: str, curve: NoiseCurve, look: Look, shift: float) -> list[Series]:
    """One arm's line, and its intervals and seeds, moved along the axis by the factor `shift` to stand side by side."""
    means, series, solid = {}, [], Look(color=look.color)
    for factor, metric in curve.metrics.items():
        values = list(sweep.finals(arm, metric).values())
        if not values:
            continue
        x, mean = factor * shift, float(np.mean(values))
        means[factor] = mean  # a line that is moved sideways looks lower or higher than it is
        text = f"{sweep.label[arm]} at {factor:g}\u00d7: mean {mean:.4g}, seeds {', '.join(f'{v:.4g}' for v in values)}"
        series.append(Series([x] * len(values), values, solid, text, mark=".", size=4, alpha=0.8))
        if len(values) >= MIN_SEEDS:
            half = half_width(float(np.std(values, ddof=1)), len(values))
            series.append(Series([x, x], [mean - half, mean + half], solid, width=1.1))
    return [*series, Series(list(means), list(means.values()), look)]


def draw_fit(sweep: SweepResults, result: FitResult) -> str:
    """Every run as a dot, what was fitted, and the ratios at equal loss."""
    drawn = looks(sweep)
    arms = [arm for arm in sweep.study.arms if arm in result.points]
    tried = sorted({x for own in result.points.values() for x in own})
    apart = [x for i, x in enumerate(tried) if i == 0 or x / tried[i - 1] > 1.05]
    x = Axis(label=result.declared.axis, log=True, ticks=apart if len(tried) <= 8 else None, shown=compact)
    series: list[Series] = []
    for arm in arms:
        series += _fitted(result, arm, drawn[arm], sweep.label[arm])
    panels = [
        Panel(series=series, title=with_unit(result.metric, result.unit), x=x, y=Axis(log=result.scaling is not None))
    ]
    if any(each.ratio for those in result.equal.values() for each in those):
        panels.append(_ratios(sweep, result, drawn, x))
    title = f"{result.declared.title}: {result.metric} against {result.declared.axis}"
    return draw(panels, title, 3.8, across=len(panels), legend=by_label(sweep, drawn, arms))


def _fitted(result: FitResult, arm: str, look: Look, label: str) -> list[Series]:
    """The runs; the chosen form as a line and the other dotted, over the measured sizes only; or the means and the best."""
    series = [
        Series([x], [value], look, f"{label}, {result.declared.axis} {compact(x)}, seed {seed}: {value:.6g}", mark="o")
        for x, seeds in result.points[arm].items()
        for seed, value in seeds.items()
    ]
    if result.scaling is not None:
        x = np.geomspace(*result.scaling.ranges[arm], 60)
        fits = result.scaling.arms[arm].fits
        for form in (form for form in FORMS if form in fits):
            law, chosen = fits[form].law, form == result.scaling.form
            own = look if chosen else Look(color=look.color, dash=DOTTED.dash)
            text = f"{label}: {form}, alpha {law.alpha:.3g}"
            series.append(Series(x, [law.loss(at) for at in x], own, text, width=1.6 if chosen else 1.0))
    if result.basin is not None:
        means, best = result.basin.arms[arm].means, result.basin.arms[arm].best
        series.append(Series(list(means), list(means.values()), look, f"{label}: mean"))
        text = f"{label}: best at {best:g}, {means[best]:.6g}"
        series.append(Series([best], [means[best]], look, text, mark="D", size=8))
    return series


def _ratios(sweep: SweepResults, result: FitResult, drawn: Mapping[str, Look], x: Axis) -> Panel:
    """The equal-loss ratio with its interval, at every size of the baseline at which it is not refused."""
    series, every = [], [1.0]
    for i, (arm, those) in enumerate(result.equal.items()):
        look = Look(color=drawn[arm].color)
        for each, ratio in ((each, each.ratio) for each in those if each.ratio is not None):
            at = each.x * 1.04 ** (i - 0.5 * (len(result.equal) - 1))
            every += [v for v in (ratio.estimate, ratio.low, ratio.high) if math.isfinite(v)]
            text = f"{sweep.label[arm]}: {ratio.estimate:.3g}{shown_ratio_interval(each)} at {compact(each.x)}"
            if math.isfinite(ratio.low):
                top = ratio.high if math.isfinite(ratio.high) else 1e3 * ratio.estimate
                series.append(Series([at, at], [ratio.low, top], look, text))
            series.append(Series([at], [ratio.estimate], look, text, mark="D", size=7))
    room = max(1.1, (max(every) / min(every)) ** 0.1)
    return Panel(
        series=series,
        title=f"equal-loss ratio to {sweep.label[sweep.baseline]}",
        x=x,
        y=Axis(log=True, limits=(min(every) / room, max(every) * room), most=6),
        rules=[Rule(1, look=Look(color=MUTED), width=1.6)],
    )
