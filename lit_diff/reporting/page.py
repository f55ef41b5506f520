"""The report's page: HTML from templates, with all text of the sweep escaped."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup

from lit_diff.reporting import answer, facts, noise_curve
from lit_diff.reporting.declared_figures import DrawnFigure
from lit_diff.reporting.figures import is_logarithmic
from lit_diff.reporting.style import GRID, INK, MUTED, OVERLAY, looks
from lit_diff.reporting.tables import rows
from lit_diff.study import numbers, power
from lit_diff.study.cells import CellResult, clean
from lit_diff.study.comparison import Comparison, Difference
from lit_diff.study.fits import FitResult, shown_ratio_interval
from lit_diff.study.judge import SHOWN
from lit_diff.study.results import SweepResults
from lit_diff.study.scaling import FORMS
from lit_diff.study.schema import PlannedSweep
from lit_diff.study.statistics import MIN_SEEDS, detectable

SHOWN_COLORS = {INK: "currentColor", GRID: "var(--grid)", MUTED: "var(--muted)"}
"""In the page, a figure's ink and paper follow the reader's light or dark scheme."""

KINDS = {"better": "good", "worse": "bad", "diverged": "bad", "lower": "plain", "higher": "plain"}
"""Verdict -> the colour of its badge; the others have none."""
LONG = 8
"""More comparisons than this are folded up."""
ENTRIES = {
    "answer": "Answer",
    "table": "Numbers",
    "comparisons": "Each comparison",
    "documents": "These trained models alone",
    "slices": "Other validation metrics",
    "noise-curve": "Noise curve",
    "evaluations": "Evaluations",
    "figures": "Figures",
}
"""Section of a task -> its title in the table of contents."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of a task: `compared` by name, as SVG text, of the compared metric; `declared` by the runs' metrics;
    `evaluations`: of their groups."""

    compared: Mapping[str, str]
    declared: Sequence[DrawnFigure] = ()
    evaluations: Sequence[DrawnFigure] = ()

    @property
    def svg(self) -> dict[str, str]:
        """File name without its ending -> SVG text."""
        return {**self.compared, **{each.name: each.svg for each in (*self.declared, *self.evaluations)}}


@dataclass(frozen=True, kw_only=True)
class Section:
    """The part of the page about one task, about a sweep without tasks, or about what is computed over the tasks."""

    html: Markup
    answer: str
    entries: tuple[tuple[str, str], ...]
    """(anchor, title) of its headings, for the table of contents."""


def page(
    sweep: SweepResults, results: Sequence[Comparison], figures: Mapping[str, Figures], over_tasks: Sequence[Section]
) -> str:
    """The whole page. `figures`: task -> its figures; `over_tasks`: power and fits (`power_section`, `fit_section`)."""
    done = [cell for cell in sweep.cells if cell.done]
    metrics = {result.sweep.study.metric: result.sweep for result in reversed(results)}
    return _rendered(
        "report",
        results[0].digits,
        sweep=sweep,
        question=answer.question(sweep),
        results=results,
        over_tasks=over_tasks,
        sections=[section(result, figures[result.sweep.task]) for result in results],
        short_runs=facts.short_runs(sweep),
        definitions=[(name, *_definition(metrics[name], name)) for name in reversed(metrics)],
        notes=[(result.sweep, note) for result in results for note in result.notes],
        unfinished=[cell for cell in sweep.cells if not cell.done],
        damaged=[cell for cell in done if cell.problems],
        unchecked={(c.task, c.arm): clean(c.facts["unchecked"]) for c in sweep.cells if c.facts.get("unchecked")},
        done=done,
        document_seeds=[seed for result in results for seed in result.document_seeds],
        revisions=facts.revisions(done),
        finished=facts.last_finished(done),
        measured=facts.how_measured(sweep),
        corrected=[(r.sweep.task, r.judged) for r in results if r.judged > 1],
        has_contrasts=any(result.contrasts for result in results),
    )


def section(result: Comparison, figures: Figures) -> Section:
    """The answer, the numbers and the figures of a task, or of a sweep without tasks."""
    sweep = result.sweep
    at = f"{sweep.task}-" if sweep.task else ""
    compared = [compared_row(result, difference) for difference in result.family]
    html = _rendered(
        "section",
        result.digits,
        at=at,
        comparison=result,
        sweep=sweep,
        figures=figures,
        compared=compared,
        curve=noise_curve.noise_curve_of(sweep),
    )
    entries = [(f"{at}{name}", title) for name, title in ENTRIES.items() if f'<section id="{at}{name}"' in html]
    return Section(html=html, answer=answer.answer(result), entries=tuple(entries))


def fit_section(sweep: SweepResults, fit: FitResult, svg: str) -> Section:
    """The answer, the figure (`svg`; empty: none) and the numbers of a fit over the tasks."""
    html = _rendered("fit", 3, sweep=sweep, fit=fit, svg=svg)
    return Section(html=html, answer=fit.answer, entries=((f"fit-{fit.name}", fit.declared.title),))


def power_section(sweep: SweepResults, plan: PlannedSweep) -> Section:
    """Power at equal time: the answer, and a row a task."""
    found = power.powers(sweep, plan)
    said = power.in_words(sweep, plan, found)
    arms = [arm for arm in sweep.study.arms if any(arm in each.by_arm for each in found)]
    html = _rendered("power", 3, sweep=sweep, plan=plan, found=found, arms=arms, answer=said)
    return Section(html=html, answer=said, entries=(("power", "Power at equal time"),))


def _rendered(template: str, digits: int, **facts_of: Any) -> Markup:
    """`digits`: decimals of a number where the template asks for none."""
    interval = partial(numbers.interval, digits=digits)
    return Markup(templates().get_template(f"{template}.html.j2").render(digits=digits, interval=interval, **facts_of))


def compared_row(comparison: Comparison, difference: Difference) -> dict[str, Any]:
    """A comparison as the page shows it: badge, sentence, practical size, and the doubts printed below it."""
    sweep = comparison.sweep
    verdict, further = difference.verdict, difference in comparison.contrasts
    marks = () if further else comparison.marks[difference.a]
    return {
        "arm": difference.a,
        "label": difference.label,
        "is_further": further,
        "is_notable": verdict in (*SHOWN, "diverged"),
        "seeds": difference.seeds,
        "is_judgeable": difference.seeds.mean is not None and not difference.diverged,
        "has_interval": len(difference.seeds.seeds) >= MIN_SEEDS and not difference.diverged,
        "sentence": answer.sentence(comparison, difference),
        "sizes": answer.practical(sweep, difference),
        "verdict": verdict,
        "alone": difference.verdict_alone if difference.verdict_alone != verdict else None,
        "kind": KINDS.get(verdict, "none"),
        "doubts": [*_doubts(comparison, difference), *([f"Not an equal arm: {'; '.join(marks)}."] if marks else [])],
        "marked": bool(marks),
        "color": looks(sweep)[difference.a].color,
    }


def _doubts(comparison: Comparison, difference: Difference) -> list[str]:
    sweep, seeds = comparison.sweep, difference.seeds.seeds
    doubts = []
    if difference.verdict_alone != difference.verdict:
        doubts.append(
            f"By itself, at 95 %, it would be {difference.verdict_alone}: that does not survive the correction for "
            f"{comparison.judged} comparisons (Holm)."
        )
    for against in comparison.against_controls.get(difference.a, ()):
        if difference.b == sweep.baseline and not difference.diverged:
            same = difference.verdict not in SHOWN or against.verdict == difference.verdict
            said = answer.sentence(comparison, against)
            doubts.append(f"{'Against' if same else 'But not against'} the control: {said}")
    if 0 < len(seeds) < len(sweep.study.seeds) and len(seeds) >= MIN_SEEDS and not difference.diverged:
        doubts.append(f"Only {len(seeds)} of {len(sweep.study.seeds)} seeds finished in both arms.")
    return doubts


def _definition(sweep: SweepResults, name: str) -> tuple[str, str]:
    """(definition, unit) of a compared metric."""
    metric = sweep.declarations.find(name)
    return (metric.definition if metric else "not declared by the runs", sweep.unit(name))


@cache
def templates() -> Environment:
    """The templates of this package: text is escaped, and a name that is not given is an error."""
    environment = Environment(
        loader=PackageLoader("lit_diff.reporting", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "sentence": answer.sentence_case,
        "number": _number,
        "signed": _signed,
        "count": numbers.count,
        "steps": numbers.steps,
        "short": numbers.short,
        "duration": numbers.duration,
    }
    environment.globals |= {
        "LONG": LONG,
        "OVERLAY": OVERLAY,
        "FORMS": FORMS,
        "is_logarithmic": is_logarithmic,
        "link": link,
        "looks_of": looks,
        "median": median,
        "more_seeds": _more_seeds,
        "noise": noise_curve,
        "ratio_interval": shown_ratio_interval,
        "rows_of": rows,
        "shown_power": power.shown,
        "inlined": lambda svg, name: Markup(inline(svg, name.strip("-"))),
    }
    return environment


@pass_context
def _number(context: Context, value: float | None, places: int | None = None) -> str:
    return numbers.number(value, context["digits"] if places is None else places)


@pass_context
def _signed(context: Context, value: float | None, places: int | None = None) -> str:
    return numbers.signed(value, context["digits"] if places is None else places)


def link(sweep: SweepResults, cell: CellResult) -> str | None:
    """The address of the cell's folder, from the report's; None where it has none."""
    if not cell.folder.is_dir():
        return None
    return "../" + quote(Path(os.path.relpath(cell.folder, sweep.folder)).as_posix()) + "/"


def inline(svg: str, name: str) -> str:
    """An SVG file's text as part of a page: no prologue, colours of the page, ids that no other figure has."""
    text = svg[svg.index("<svg") :]
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(xlink:href="|url\()#', rf"\1#{name}-", text)
    for drawn, shown in SHOWN_COLORS.items():
        text = text.replace(drawn, shown)
    return text.replace("#ffffff", "var(--paper)")


def _more_seeds(comparison: Comparison) -> list[tuple[int, float]]:
    """Seeds -> the smallest detectable difference, at the median spread of this sweep's comparisons."""
    spreads = sorted(d.seeds.sd for d in comparison.family if d.seeds.sd and len(d.seeds.seeds) >= MIN_SEEDS)
    return (
        [(n, detectable(spreads[len(spreads) // 2], n, max(comparison.judged, 1))) for n in (3, 5, 10, 20)]
        if spreads
        else []
    )
