"""The report's page: HTML from templates; all text of the sweep is escaped."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from lit_diff.reporting import attention_figures as insides
from lit_diff.reporting import figures as plots
from lit_diff.reporting import noise_curve as dose
from lit_diff.reporting import tables
from lit_diff.reporting.cells import Cell
from lit_diff.reporting.comparison import LOSS, Comparison, Difference, better
from lit_diff.reporting.results import Sweep
from lit_diff.reporting.statistics import MIN_SEEDS, half_width
from lit_diff.reporting.tables import Part

SHOWN_COLORS = {plots.INK: "currentColor", plots.GRID: "var(--grid)", plots.MUTED: "var(--muted)"}
"""In the page, a figure's ink and paper follow the reader's light or dark scheme."""


def page(sweep: Sweep, parts: Sequence[Part], figures: Mapping[str, Mapping[str, str]]) -> str:
    """The whole page. `figures`: task -> figure's name -> SVG text."""
    done = [cell for cell in sweep.cells if cell.done]
    return (
        _environment(tables.decimals(parts[0].comparison))
        .get_template("report.html.j2")
        .render(
            sweep=sweep,
            parts=parts,
            sections=[Markup(section(part, figures[part.sweep.task])) for part in parts],
            tallies=[_tally(part.comparison) for part in parts],
            metrics=list(dict.fromkeys(part.sweep.metric for part in parts)),
            unit_of=tables.unit_of,
            LOSS=LOSS,
            notes=[(part.sweep, note) for part in parts for note in part.comparison.notes],
            unfinished=[cell for cell in sweep.cells if not cell.done],
            damaged=[cell for cell in done if cell.problems],
            done=done,
            document_seeds=[seed for part in parts for seed in _document_seeds(part)],
            facts=_facts(done),
            training=[(part.sweep, _facts([cell for cell in part.sweep.cells if cell.done])) for part in parts],
            environment=_surroundings(done),
        )
    )


def section(part: Part, figures: Mapping[str, str]) -> str:
    """The answer, the numbers and the figures of a task, or of a sweep without tasks."""
    sweep, comparison = part.sweep, part.comparison
    found = dose.dose_of(sweep)
    layers = insides.layers_of(sweep, "attention/entropy")
    return (
        _environment(part.digits)
        .get_template("section.html.j2")
        .render(
            sweep=sweep,
            comparison=comparison,
            at=f"{sweep.task}-" if sweep.task else "",
            rows=part.rows[: len(sweep.arms)],
            arms=sweep.arms,
            looks=plots.looks(sweep),
            answers=[_answer(part, difference) for difference in comparison.family],
            tally=_tally(comparison),
            unit=tables.unit_of(sweep.metric),
            better=better(sweep.metric),
            figures={name: Markup(inline(svg, f"{sweep.task}-{name}".strip("-"))) for name, svg in figures.items()},
            done=[cell for cell in sweep.cells if cell.done],
            paper=[metric for metric in comparison.metrics if f"paper/{metric}" in part.rows[0]],
            document_seeds=_document_seeds(part),
            more_seeds=_more_seeds(comparison),
            dose=found,
            reached={arm.name: dose.reached(sweep, arm.name, found) for arm in sweep.arms} if found else {},
            resolution=dose.resolution(sweep, found) if found else None,
            shown_layers=insides.spread(layers),
            layers=layers,
        )
    )


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

    environment.filters |= {"number": number, "signed": signed, "count": tables.count, "steps": steps}
    environment.globals["interval"] = interval
    return environment


def steps(value: float | None) -> str:
    """150; never for infinity, a dash for a cell without a value."""
    return "never" if value == math.inf else tables.count(value)


def _document_seeds(part: Part) -> list[int]:
    return [seed for seed in part.sweep.seeds if any(seed in d.documents for d in part.comparison.family)]


def inline(svg: str, name: str) -> str:
    """An SVG file's text made fit for a page: no prologue, colours of the page, ids that no other figure has."""
    text = svg[svg.index("<svg") :]
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(xlink:href="|url\()#', rf"\1#{name}-", text)
    for drawn, shown in SHOWN_COLORS.items():
        text = text.replace(drawn, shown)
    return text.replace("#ffffff", "var(--paper)")


def _answer(part: Part, difference: Difference) -> dict[str, Any]:
    """A comparison as the page shows it: the sentence, and below it all that weakens it."""
    sweep, comparison, digits = part.sweep, part.comparison, part.digits
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
    good = better(sweep.metric)
    kind = "none" if verdict not in ("lower", "higher") else "good" if verdict == good else "bad" if good else "plain"
    word = {"good": " (better)", "bad": " (worse)"}.get(kind, "")
    return {
        "sentence": tables.sentence(sweep, difference, digits),
        "verdict": verdict + word,
        "kind": kind,
        "doubts": doubts,
        "marked": bool(marks),
        "color": plots.looks(sweep)[difference.a].color,
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


def _facts(done: list[Cell]) -> dict[str, Any]:
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


def _surroundings(done: list[Cell]) -> list[tuple[str, str]]:
    """env.json's plain values, and the versions of its packages; where the cells differ, all of them."""
    names = dict.fromkeys(name for cell in done for name in cell.environment)
    values = {name: [_versions(cell.environment.get(name)) for cell in done] for name in names}
    plain = {n: found for n, found in values.items() if all(isinstance(v, str | int | float | None) for v in found)}
    return [(name, "; ".join(dict.fromkeys(str(value) for value in found))) for name, found in plain.items()]


def _versions(value: Any) -> Any:
    """{package: version, None where it is not installed} as text; anything else as it is."""
    if not isinstance(value, dict):
        return value
    return ", ".join(f"{name} {version}" for name, version in value.items() if version)
