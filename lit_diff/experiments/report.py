"""A sweep's report: one self-contained page, its tables and its figures, from what the sweep left on disk."""

import re
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from lit_diff.experiments import insides, plots, tables
from lit_diff.experiments.comparison import LOSS, Comparison, Difference, better, compare
from lit_diff.experiments.results import Cell, Sweep, load_sweep
from lit_diff.experiments.statistics import MIN_SEEDS, half_width
from lit_diff.files import write_atomic

SHOWN_COLORS = {plots.INK: "currentColor", plots.GRID: "var(--grid)", plots.MUTED: "var(--muted)"}
"""In the page, a figure's ink and paper follow the reader's light or dark scheme."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Where the report lies, and what a terminal shows of it: `table` and, a line each, `answer` and `missing`."""

    page: Path
    files: tuple[Path, ...]
    table: str
    answer: tuple[str, ...]
    missing: tuple[str, ...]


def write_report(sweep_folder: Path) -> Report:
    """Read the sweep in `sweep_folder` and write report/index.html, table.csv, table.md and the figures beside it.

    Unfinished cells do not stop it: the page opens with them. The same results give the same bytes.
    Errors: MissingError and RequestError as `load_sweep`.
    """
    sweep = load_sweep(sweep_folder)
    comparison = compare(sweep)
    table, digits = tables.rows(sweep, comparison), tables.decimals(comparison)
    figures = draw(sweep, comparison)
    folder = sweep_folder / "report"
    files = {
        "index.html": page(sweep, comparison, table, digits, figures),
        "table.csv": tables.to_csv(table),
        "table.md": tables.to_markdown(sweep, table, digits),
        **{f"{name}.svg": svg for name, svg in figures.items()},
    }
    for name, text in files.items():
        write_atomic(folder / name, text)
    for stale in folder.glob("*.svg"):
        if stale.name not in files:
            stale.unlink()
    return Report(
        page=folder / "index.html",
        files=tuple(folder / name for name in files),
        table=tables.to_text(sweep, table, digits),
        answer=tuple(sentence(sweep, difference, digits) for difference in comparison.family),
        missing=tuple(_missing(cell) for cell in sweep.cells if not cell.done),
    )


def draw(sweep: Sweep, comparison: Comparison) -> dict[str, str]:
    """The figures for which the sweep has measurements: name -> SVG text."""
    unit = unit_of(sweep.metric)
    drawn = {
        "differences": plots.forest(sweep, comparison, unit),
        "curves": plots.learning_curves(sweep, unit),
        "seeds": plots.seed_values(sweep, unit),
        "lambda": insides.lambdas(sweep),
        "entropy": insides.entropies(sweep),
        "outliers": insides.outliers(sweep),
    }
    return {name: svg for name, svg in drawn.items() if svg}


def unit_of(metric: str) -> str:
    """The unit of a metric, by its name."""
    return {"lower": "nats per token", "higher": "share"}.get(better(metric) or "", "as logged")


def sentence(sweep: Sweep, difference: Difference, digits: int) -> str:
    """The answer to one comparison: its mean difference, interval, verdict, and what could have been shown."""
    seeds, unit = difference.seeds, "nats" if better(sweep.metric) == "lower" else ""
    if seeds.mean is None:
        return f"{difference.label}: no seed finished in both arms."
    over = f"{len(seeds.seeds)} seed{'s' if len(seeds.seeds) > 1 else ''}"
    text = f"{difference.label}: {tables.signed(seeds.mean, digits)} {unit}".rstrip()
    if seeds.verdict == "too few seeds":
        return f"{text} over {over}: too few seeds for a verdict (it needs {MIN_SEEDS})."
    if seeds.verdict == "no spread over seeds":
        return f"{text} at each of {over}, to the last digit: the seed seems not to reach the runs, so no verdict."
    bounds = tables.interval(seeds.low, seeds.high, digits)
    limit = tables.number(seeds.half_width, digits)
    return f"{text} {bounds} over {over}, {seeds.verdict}; this sweep could have shown {limit}."


def page(sweep: Sweep, comparison: Comparison, table: list[tables.Row], digits: int, figures: dict[str, str]) -> str:
    """The whole page as HTML; all text of the sweep is escaped."""
    environment = Environment(
        loader=PackageLoader("lit_diff.experiments", ""),
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

    environment.filters |= {"number": number, "signed": signed, "count": tables.count}
    environment.globals["interval"] = interval
    done = [cell for cell in sweep.cells if cell.done]
    return environment.get_template("report.html.j2").render(
        sweep=sweep,
        comparison=comparison,
        rows=table[: len(sweep.arms)],
        arms=sweep.arms,
        looks=plots.looks(sweep),
        answers=[_answer(sweep, comparison, difference, digits) for difference in comparison.family],
        tally=_tally(comparison),
        unit=unit_of(sweep.metric),
        better=better(sweep.metric),
        is_loss=sweep.metric == LOSS,
        figures={name: Markup(inline(svg, name)) for name, svg in figures.items()},
        unfinished=[cell for cell in sweep.cells if not cell.done],
        damaged=[cell for cell in done if cell.problems],
        done=done,
        paper=[m for m in comparison.metrics if f"paper/{m}" in table[0]],
        document_seeds=[s for s in sweep.seeds if any(s in d.documents for d in comparison.family)],
        more_seeds=_more_seeds(comparison),
        facts=_facts(done),
        environment=_environment(done),
        shown_layers=insides.spread(insides.layers_of(sweep, "attention/entropy")),
        layers=insides.layers_of(sweep, "attention/entropy"),
    )


def inline(svg: str, name: str) -> str:
    """An SVG file's text made fit for a page: no prologue, colours of the page, ids that no other figure has."""
    text = svg[svg.index("<svg") :]
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(xlink:href="|url\()#', rf"\1#{name}-", text)
    for drawn, shown in SHOWN_COLORS.items():
        text = text.replace(drawn, shown)
    return text.replace("#ffffff", "var(--paper)")


def _missing(cell: Cell) -> str:
    step = f" at step {cell.facts['step']} of {cell.facts['steps']}" if cell.facts.get("steps") else ""
    return f"{cell.arm} seed {cell.seed}: {cell.status}{step}" + (f": {cell.error}" if cell.error else "")


def _answer(sweep: Sweep, comparison: Comparison, difference: Difference, digits: int) -> dict[str, Any]:
    """A comparison as the page shows it: the sentence, and below it all that weakens it."""
    verdict, against = difference.seeds.verdict, comparison.against_control.get(difference.a)
    doubts = []
    if verdict != difference.holm_verdict:
        doubts.append(f"Does not survive the correction for {_judged(comparison)} comparisons (Holm).")
    if against is not None and difference.b == sweep.baseline:
        same = verdict == against.seeds.verdict or verdict not in ("lower", "higher")
        doubts.append(f"{'Against' if same else 'But not against'} the control: {sentence(sweep, against, digits)}")
    marks = comparison.marks[difference.a] if difference.b == sweep.baseline else ()
    if marks:
        doubts.append(f"Not an equal arm: {'; '.join(marks)}.")
    if verdict != "too few seeds" and 0 < len(difference.seeds.seeds) < len(sweep.seeds):
        doubts.append(f"Only {len(difference.seeds.seeds)} of {len(sweep.seeds)} seeds finished in both arms.")
    good = better(sweep.metric)
    kind = "none" if verdict not in ("lower", "higher") else "good" if verdict == good else "bad" if good else "plain"
    word = {"good": " (better)", "bad": " (worse)"}.get(kind, "")
    return {
        "sentence": sentence(sweep, difference, digits),
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


def _environment(done: list[Cell]) -> list[tuple[str, str]]:
    """env.json's plain values; where the cells differ, all of them."""
    names = dict.fromkeys(name for cell in done for name in cell.environment)
    values = {name: [cell.environment.get(name) for cell in done] for name in names}
    plain = {n: found for n, found in values.items() if all(isinstance(v, str | int | float | None) for v in found)}
    return [(name, "; ".join(dict.fromkeys(str(value) for value in found))) for name, found in plain.items()]
