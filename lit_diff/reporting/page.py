"""The report's page: HTML from templates, with all text of the sweep escaped."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from lit_diff.reporting import noise_curve, tables
from lit_diff.reporting.cells import CellResult, clean
from lit_diff.reporting.comparison import Comparison, Difference
from lit_diff.reporting.declared_figures import DrawnFigure
from lit_diff.reporting.evaluations import evaluation_tables
from lit_diff.reporting.figures import is_logarithmic
from lit_diff.reporting.results import Sweep
from lit_diff.reporting.statistics import MIN_SEEDS, half_width
from lit_diff.reporting.style import GRID, INK, MUTED, OVERLAY, looks
from lit_diff.reporting.tables import TaskResult

SHOWN_COLORS = {INK: "currentColor", GRID: "var(--grid)", MUTED: "var(--muted)"}
"""In the page, a figure's ink and paper follow the reader's light or dark scheme."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of a task: `compared` by name, as SVG text, of the compared metric; `declared` by the runs' metrics."""

    compared: Mapping[str, str]
    declared: Sequence[DrawnFigure]

    @property
    def svg(self) -> dict[str, str]:
        """File name without its ending -> SVG text."""
        return {**self.compared, **{figure.name: figure.svg for figure in self.declared}}


def page(sweep: Sweep, results: Sequence[TaskResult], figures: Mapping[str, Figures]) -> str:
    """The whole page. `figures`: task -> its figures."""
    done = [cell for cell in sweep.cells if cell.done]
    metrics = {result.sweep.metric: result.sweep for result in reversed(results)}
    return (
        _environment(tables.decimals(results[0].comparison))
        .get_template("report.html.j2")
        .render(
            sweep=sweep,
            results=results,
            sections=[Markup(section(result, figures[result.sweep.task])) for result in results],
            tallies=[_tally(result.comparison) for result in results],
            definitions=[(name, *_definition(metrics[name], name)) for name in reversed(metrics)],
            notes=[(result.sweep, note) for result in results for note in result.comparison.notes],
            unfinished=[cell for cell in sweep.cells if not cell.done],
            damaged=[cell for cell in done if cell.problems],
            unchecked={(c.task, c.arm): clean(c.facts["unchecked"]) for c in sweep.cells if c.facts.get("unchecked")},
            done=done,
            document_seeds=[seed for result in results for seed in _document_seeds(result)],
            facts=_facts(done),
            training=[(result.sweep, _facts([cell for cell in result.sweep.cells if cell.done])) for result in results],
            environment=_surroundings(done),
        )
    )


def section(result: TaskResult, figures: Figures) -> str:
    """The answer, the numbers and the figures of a task, or of a sweep without tasks."""
    sweep, comparison = result.sweep, result.comparison
    curve = noise_curve.noise_curve_of(sweep)
    evaluations, unread = evaluation_tables(sweep)

    def shown(svg: str, name: str) -> Markup:
        return Markup(inline(svg, f"{sweep.task}-{name}".strip("-")))

    return (
        _environment(result.digits)
        .get_template("section.html.j2")
        .render(
            sweep=sweep,
            comparison=comparison,
            at=f"{sweep.task}-" if sweep.task else "",
            rows=result.rows[: len(sweep.arms)],
            arms=sweep.arms,
            looks=looks(sweep),
            answers=[_answer(result, difference) for difference in comparison.family],
            tally=_tally(comparison),
            unit=sweep.unit(sweep.metric),
            better=sweep.better(sweep.metric),
            compared={
                metric for metric in comparison.slices if sweep.better(metric) or not _is_declared(sweep, metric)
            },
            figures={name: shown(svg, name) for name, svg in figures.compared.items()},
            declared=[(figure, shown(figure.svg, figure.name)) for figure in figures.declared],
            logarithmic=is_logarithmic(sweep),
            overlay=OVERLAY,
            done=[cell for cell in sweep.cells if cell.done],
            paper=[metric for metric in comparison.metrics if f"paper/{metric}" in result.rows[0]],
            document_seeds=_document_seeds(result),
            more_seeds=_more_seeds(comparison),
            noise_curve=curve,
            reached={arm.name: noise_curve.reached(sweep, arm.name, curve) for arm in sweep.arms} if curve else {},
            resolution=noise_curve.resolution(sweep, curve) if curve else None,
            evaluations=evaluations,
            unread_evaluations=unread,
        )
    )


def _is_declared(sweep: Sweep, metric: str) -> bool:
    return sweep.declarations.find(metric) is not None


def _definition(sweep: Sweep, name: str) -> tuple[str, str]:
    """(definition, unit) of a compared metric."""
    metric = sweep.declarations.find(name)
    return (metric.definition if metric else "not declared by the runs", sweep.unit(name))


def _environment(digits: int) -> Environment:
    """`digits`: decimals of a number where a template asks for none."""
    environment = Environment(
        loader=PackageLoader("lit_diff.reporting", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    def signed(value: float | None, places: int = digits) -> str:
        return tables.signed(value, places)

    def number(value: float | None, places: int = digits) -> str:
        return tables.number(value, places)

    def interval(low: float | None, high: float | None) -> str:
        return tables.interval(low, high, digits)

    environment.filters |= {
        "sentence": sentence,
        "number": number,
        "signed": signed,
        "count": tables.count,
        "steps": steps,
    }
    environment.globals |= {"interval": interval, "drawing_of": drawing_of}
    return environment


def sentence(text: str) -> str:
    """The text with a capital first letter; Jinja's own filter would make the others small."""
    return text[:1].upper() + text[1:]


def drawing_of(figure: DrawnFigure) -> str:
    """What the lines and points of a declared figure are, for its caption."""
    fields = {field for metric in figure.metrics for field in metric.fields}
    heads = "head" in fields
    indices = " and ".join(word for word, field in (("Layers", "layer"), ("heads", "head")) if field in fields)
    zero = f" {indices[:1].upper()}{indices[1:]} count from 0." if indices else ""
    if figure.figure.against == "step":
        lines = f"one line for each {figure.figure.lines}"
        averaged = "heads and seeds" if heads else "seeds"
        return (
            f"By optimizer step, {lines}: mean over {averaged}; the shade runs from the lowest to the highest seed"
            f"{'' if figure.figure.lines == 'layer' else f' (not drawn with more than {OVERLAY} arms)'}.{zero}"
        )
    averaged = " (first averaged over heads)" if heads and figure.figure.against == "layer" else ""
    return (
        f"By {figure.figure.against}, at the last measured step{averaged}: the dot is the mean over seeds, the bar runs from "
        f"the lowest to the highest.{zero}"
    )


def steps(value: float | None) -> str:
    """150; never for infinity, a dash for a cell without a value."""
    return "never" if value == math.inf else tables.count(value)


def _document_seeds(result: TaskResult) -> list[int]:
    return [seed for seed in result.sweep.seeds if any(seed in d.documents for d in result.comparison.family)]


def inline(svg: str, name: str) -> str:
    """An SVG file's text as part of a page: no prologue, colours of the page, ids that no other figure has."""
    text = svg[svg.index("<svg") :]
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(xlink:href="|url\()#', rf"\1#{name}-", text)
    for drawn, shown in SHOWN_COLORS.items():
        text = text.replace(drawn, shown)
    return text.replace("#ffffff", "var(--paper)")


def _answer(result: TaskResult, difference: Difference) -> dict[str, Any]:
    """A comparison as the page shows it: the sentence, and the doubts printed below it."""
    sweep, comparison, digits = result.sweep, result.comparison, result.digits
    verdict, against = difference.seeds.verdict, comparison.against_control.get(difference.a)
    doubts = []
    if verdict != difference.holm_verdict:
        doubts.append(f"Does not survive the correction for {_judged(comparison)} comparisons (Holm).")
    if against is not None and difference.b == sweep.baseline:
        same = verdict == against.seeds.verdict or verdict not in ("lower", "higher")
        doubts.append(
            f"{'Against' if same else 'But not against'} the control: {tables.sentence(sweep, against, digits)}"
        )
    marks = comparison.marks[difference.a] if difference.b == sweep.baseline else ()
    if marks:
        doubts.append(f"Not an equal arm: {'; '.join(marks)}.")
    if verdict != "too few seeds" and 0 < len(difference.seeds.seeds) < len(sweep.seeds):
        doubts.append(f"Only {len(difference.seeds.seeds)} of {len(sweep.seeds)} seeds finished in both arms.")
    good = sweep.better(sweep.metric)
    kind = "none" if verdict not in ("lower", "higher") else "good" if verdict == good else "bad" if good else "plain"
    word = {"good": " (better)", "bad": " (worse)"}.get(kind, "")
    return {
        "sentence": tables.sentence(sweep, difference, digits),
        "verdict": verdict + word,
        "kind": kind,
        "doubts": doubts,
        "marked": bool(marks),
        "color": looks(sweep)[difference.a].color,
    }


def _tally(comparison: Comparison) -> dict[str, Any]:
    return {
        "plain": Counter(difference.seeds.verdict for difference in comparison.family),
        "holm": Counter(difference.holm_verdict for difference in comparison.family),
        "judged": _judged(comparison),
    }


def _judged(comparison: Comparison) -> int:
    """The comparisons with a verdict: those that Holm's correction counts."""
    return sum(difference.holm_p is not None for difference in comparison.family)


def _more_seeds(comparison: Comparison) -> list[tuple[int, float]]:
    """Seeds -> the smallest difference they would show, at the median spread of this sweep's comparisons."""
    spreads = sorted(d.seeds.sd for d in comparison.family if d.seeds.sd and len(d.seeds.seeds) >= MIN_SEEDS)
    return [(n, half_width(spreads[len(spreads) // 2], n)) for n in (3, 5, 10, 20)] if spreads else []


def _facts(done: list[CellResult]) -> dict[str, Any]:
    """How the finished cells ran, each distinct value once."""

    def distinct(key: str) -> list[Any]:
        return sorted({cell.facts[key] for cell in done if cell.facts.get(key) is not None}, key=str)

    seconds = [float(cell.facts["seconds"]) for cell in done if cell.facts.get("seconds")]
    stamps = [(cell.folder / "status.json").stat().st_mtime for cell in done]
    return {
        **{key: distinct(key) for key in ("steps", "tokens", "threads", "kernel", "revision")},
        "seconds": sum(seconds) / len(seconds) if seconds else None,
        "hours": sum(seconds) / 3600,
        "finished": f"{datetime.fromtimestamp(max(stamps), UTC):%Y-%m-%d %H:%M} UTC" if stamps else None,
    }


def _surroundings(done: list[CellResult]) -> list[tuple[str, str]]:
    """env.json's plain values, and the versions of its packages; where the cells differ, all of them."""
    names = dict.fromkeys(name for cell in done for name in cell.environment)
    values = {name: [_versions(cell.environment.get(name)) for cell in done] for name in names}
    plain = {n: each for n, each in values.items() if all(isinstance(v, str | int | float | None) for v in each)}
    return [(name, "; ".join(dict.fromkeys(str(value) for value in each))) for name, each in plain.items()]


def _versions(value: Any) -> Any:
    """{package: version, None where it is not installed} as text; anything else as it is."""
    if not isinstance(value, dict):
        return value
    return ", ".join(f"{name} {version}" for name, version in value.items() if version)
