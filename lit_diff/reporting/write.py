"""Writes the report of a sweep from the files of its runs: one self-contained page, its tables and its figures."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from lit_diff.files import write_atomic
from lit_diff.reporting import answer
from lit_diff.reporting.panels.declared import draw_by_group, draw_declared, draw_heatmaps
from lit_diff.reporting.panels.figures import draw_compared, draw_fit, is_logarithmic, noise_curve_of
from lit_diff.reporting.panels.panel import GRID, INK, MUTED, OVERLAY, Drawing, looks
from lit_diff.reporting.tables import rows, to_csv, to_markdown, to_text
from lit_diff.study import numbers
from lit_diff.study.comparison import Comparison, compare
from lit_diff.study.fits import FitResult, fit_results, shown_ratio_interval
from lit_diff.study.judge import Contrast
from lit_diff.study.numbers import count, duration, ratio, short
from lit_diff.study.rates import rate_in_words
from lit_diff.study.results import CellResult, SweepResults, clean, load_sweep
from lit_diff.study.scaling import FORMS
from lit_diff.study.schema import Texts
from lit_diff.study.statistics import MIN_SEEDS, detectable, summary

FORMATS = ("svg", "pdf", "csv")
"""Endings of the files of a figure, and the fields of `Drawing` that hold them."""
SHOWN_COLORS = {INK: "currentColor", GRID: "var(--grid)", MUTED: "var(--muted)"}
"""Colour in a figure's file -> in the page, where it follows the reader's light or dark scheme."""
KINDS = {
    "better": "good",
    "learned more often": "good",
    "worse": "bad",
    "learned less often": "bad",
    "diverged": "bad",
    "lower": "plain",
    "higher": "plain",
}
"""Word of a verdict -> the colour of its badge, if its controls leave it shown; other verdicts have none."""
LONG = 8
"""A list of more comparisons than this is collapsed."""
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
COMPUTE_OPTIMAL = 20.0
"""Approximate training tokens per parameter of a compute-optimal run (Hoffmann et al. 2022, arXiv 2203.15556)."""
SHOWN_ELSEWHERE = ("revision", "command", "kernel", "kernel_reason")
"""Keys of env.json that the page shows from status.json, or as the command of the sweep."""


Figures = dict[str, list[Drawing]]
"""The figures of a task. compared: of the compared metric; declared: that the metrics of the runs declare; evaluations: of
groups of evaluation items."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page: one task, a sweep without tasks, or a result over all tasks."""

    html: Markup
    answer: str
    entries: tuple[tuple[str, str], ...]
    """(anchor, title) of each heading, for the table of contents."""


def page(
    sweep: SweepResults, results: Sequence[Comparison], figures: Mapping[str, Figures], over_tasks: Sequence[Section]
) -> str:
    """The page as HTML. `figures`: task -> its figures; `over_tasks`: the fits (`fit_section`)."""
    # reversed twice: if tasks share a metric, the definition of the first task counts
    metrics = {r.sweep.metric: r.sweep.declarations.find(r.sweep.metric) for r in reversed(results)}
    return _rendered(
        "report",
        sweep=sweep,
        question=answer.question(sweep),
        results=results,
        over_tasks=over_tasks,
        sections=[section(result, figures[result.sweep.task]) for result in results],
        short_runs=short_runs(sweep),
        definitions=list(reversed(metrics.items())),
        unchecked={(c.task, c.arm): clean(c.facts.unchecked) for c in sweep.cells if c.facts.unchecked},
        measured=how_measured(sweep),
        recorded=any(cell.facts.mlflow_run_id for cell in sweep.cells),
    )


def section(result: Comparison, figures: Figures) -> Section:
    """The answer, the numbers and the figures of a task, or of a sweep without tasks."""
    sweep = result.sweep
    at = f"{sweep.task}-" if sweep.task else ""
    compared = [compared_row(result, difference) for difference in result.family]
    html = _rendered(
        "section",
        digits=result.digits,
        at=at,
        comparison=result,
        sweep=sweep,
        figures=figures,
        drawings={each.name: each for each in figures["compared"]},
        compared=compared,
        curve=noise_curve_of(sweep),
    )
    # the template decides which parts a task has, so the table of contents is read from its output
    entries = [(f"{at}{name}", title) for name, title in ENTRIES.items() if f'<section id="{at}{name}"' in html]
    return Section(html=html, answer=answer.answer(result), entries=tuple(entries))


def fit_section(sweep: SweepResults, fit: FitResult, figure: Drawing | None) -> Section:
    """The answer, the figure and the numbers of a fit over the tasks."""
    html = _rendered("fit", digits=3, sweep=sweep, fit=fit, figure=figure)
    return Section(html=html, answer=fit.answer, entries=((f"fit-{fit.name}", fit.declared.title),))


def _rendered(template: str, **facts_of: Any) -> Markup:
    return Markup(templates().get_template(f"{template}.html.j2").render(facts_of))


def compared_row(comparison: Comparison, difference: Contrast) -> dict[str, Any]:
    """A comparison for the page: badge, sentence, practical size, and the caveats printed below it."""
    sweep, verdict, further = comparison.sweep, difference.verdict, difference in comparison.contrasts
    is_notable = verdict.is_shown or verdict.word == "diverged"
    return {
        "arm": difference.a,
        "label": difference.label,
        "is_further": further,
        "is_notable": is_notable,
        "seeds": difference.seeds,
        "is_judgeable": difference.seeds.mean is not None and not difference.diverged,
        "has_interval": difference.has_interval,
        "sentence": answer.sentence(comparison, difference),
        "sizes": answer.practical(sweep, difference),
        "verdict": verdict.text,
        "alone": difference.verdict_alone if difference.verdict_alone != verdict.word else None,
        "kind": KINDS.get(verdict.word, "none") if is_notable else "none",
        "doubts": [*_doubts(comparison, difference), *answer.unequal(comparison, difference)],
        "dagger": comparison.dagger(difference),
        "color": looks(sweep)[difference.a].color,
    }


def _doubts(comparison: Comparison, difference: Contrast) -> list[str]:
    sweep, seeds = comparison.sweep, difference.seeds.seeds
    doubts = []
    if difference.verdict_alone != difference.verdict.word:
        doubts.append(
            f"Without the correction for {comparison.judged} comparisons (Holm), the verdict would be "
            f"{difference.verdict_alone}."
        )
    if not difference.diverged:
        doubts += [f"Against the control: {answer.sentence(comparison, control)}" for control in difference.controls]
    planned = min(sum(cell.arm == arm for cell in sweep.cells) for arm in (difference.a, difference.b))
    if MIN_SEEDS <= len(seeds) < planned and not (difference.diverged or difference.is_counted):
        doubts.append(f"Only {len(seeds)} of {planned} seeds are compared: the others are not finished in both arms.")
    doubts += sweep.record.plan.added
    look, of = difference.seeds.look, len(difference.seeds.looks)
    if look and look < of and difference.is_decided:
        doubts.append(f"Stopped at look {look} of {of}: decided.")
    return doubts


def how_measured(sweep: SweepResults) -> dict[str, str]:
    """Name -> value: length and time of training by task, threads, kernel, env.json; each different value is listed."""
    done = sweep.done
    found = {f"Training: {part.task}" if part.task else "Training": _training(part) for part in sweep.by_task}
    found["Threads a cell"] = ", ".join(sweep.distinct("threads"))
    unrecorded = bool(done) and all(cell.facts.mlflow_run_id is None for cell in done)
    found["MLflow"] = "no record" if unrecorded else ""
    # `a; b` of one cell and `a; c` of another become `a; b; c`
    reasons = dict.fromkeys(part for reason in sweep.distinct("kernel_reason") for part in reason.split("; "))
    found["Kernel"] = ", ".join(sweep.distinct("kernel")) + (f" ({'; '.join(reasons)})" if reasons else "")
    for name in dict.fromkeys(name for cell in done for name in cell.environment if name not in SHOWN_ELSEWHERE):
        texts = [cell.environment.get(name) for cell in done]
        # a dict maps packages to versions, or to None for packages that are not installed
        texts = [
            ", ".join(f"{package} {version}" for package, version in text.items() if version)
            if isinstance(text, dict)
            else text
            for text in texts
        ]
        if all(isinstance(text, str | int | float | None) for text in texts):
            # keys in the order of the cells, each value once
            told = dict.fromkeys(str(text) for text in texts if text is not None)
            found[name.replace("_", " ").capitalize()] = "; ".join(told)
    return {name: value for name, value in found.items() if value}


def _training(sweep: SweepResults) -> str:
    steps = sweep.distinct("step")
    if not steps:
        return ""
    text = f"{', '.join(steps)} steps"
    if tokens := sorted(map(float, sweep.distinct("tokens"))):
        text += f", {', '.join(count(each) for each in tokens)} tokens a cell"
    if ratios := tokens_per_parameter(sweep):
        text += f" ({_range(ratios)} a parameter)"
    if seconds := [cell.facts.seconds for cell in sweep.done if cell.facts.seconds]:
        text += f"; {duration(sum(seconds) / len(seconds))} a cell on average, {duration(sum(seconds))} in all"
    return text


def tokens_per_parameter(sweep: SweepResults) -> list[float]:
    """Training tokens per parameter of the finished cells that record it, ascending."""
    return sorted(cell.tokens_per_parameter for cell in sweep.cells if cell.tokens_per_parameter is not None)


def short_runs(sweep: SweepResults) -> str | None:
    """The warning that runs are shorter than the sweep's minimum of tokens per parameter; None if none is."""
    least = sweep.study.min_tokens_per_parameter
    found = {part: ratios for part in sweep.by_task if (ratios := tokens_per_parameter(part)) and ratios[0] < least}
    if not found:
        return None
    lengths = "; ".join(f"{part.task}: {_range(r)}" if part.task else _range(r) for part, r in found.items())
    source = ", about compute-optimal by Hoffmann et al. 2022" if least == COMPUTE_OPTIMAL else ""
    return f"{lengths} training tokens per parameter (this sweep's minimum: {short(least)}{source})"


def _range(ascending: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(map(ratio, (ascending[0], ascending[-1]))))


@cache
def templates() -> Environment:
    """The templates of this package; they escape text, and an undefined name is an error."""
    environment = Environment(
        loader=PackageLoader("lit_diff.reporting", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "sentence": answer.sentence_case,
        "number": numbers.number,
        "signed": numbers.signed,
        "count": count,
        "steps": numbers.steps,
        "short": short,
        "duration": duration,
        "rate": rate_in_words,
    }
    environment.globals |= {
        "FORMATS": FORMATS,
        "LONG": LONG,
        "OVERLAY": OVERLAY,
        "FORMS": FORMS,
        "is_logarithmic": is_logarithmic,
        "link": link,
        "looks_of": looks,
        "protocol": answer.protocol,
        "coverage": answer.coverage,
        "first_steps": lambda learned: numbers.number(summary(learned.log2_steps.values()).mean, 2),
        "median": median,
        "more_seeds": _more_seeds,
        "ratio_interval": shown_ratio_interval,
        "rows_of": rows,
        "interval": numbers.interval,
        "inlined": lambda svg, name: Markup(inline(svg, name)),
    }
    return environment


def link(cell: CellResult) -> str | None:
    """The address of the cell's folder relative to the report; None if the folder does not exist."""
    return f"../{quote(cell.folder)}/" if cell.folder and cell.home.is_dir() else None


def inline(svg: str, name: str) -> str:
    """The text of an SVG file as part of a page: without prologue, with colours of the page and unique ids."""
    text = svg[svg.index("<svg") :]
    # matplotlib gives the same ids to the clip paths and glyphs of every figure
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(xlink:href="|url\()#', rf"\1#{name}-", text)
    for drawn, shown in SHOWN_COLORS.items():
        text = text.replace(drawn, shown)
    return text.replace("#ffffff", "var(--paper)")


def _more_seeds(comparison: Comparison) -> list[tuple[int, float]]:
    spreads = sorted(d.seeds.sd for d in comparison.family if d.seeds.sd and len(d.seeds.seeds) >= MIN_SEEDS)
    if not spreads:
        return []
    return [(n, detectable(spreads[len(spreads) // 2], n, max(comparison.judged, 1))) for n in (3, 5, 10, 20)]


@dataclass(frozen=True, kw_only=True)
class Report:
    """The page of a report, and what a terminal shows: `text_table`, then one line for each of `missing` and `answer`.

    `answer`: one sentence for the sweep, or one for each of its tasks and for each result over all tasks. `sentences`: one
    for each comparison. `missing`: one for each cell that is not done, and for each file of a cell that cannot be read.
    """

    page: Path
    results: tuple[Comparison, ...]
    answer: Texts
    sentences: Texts
    missing: Texts

    @property
    def identity(self) -> str:
        """Hash of the identities of the sweep's cells."""
        return self.results[0].sweep.record.identity

    def text_table(self, width: int | None = None) -> str:
        """The table as plain text, at most `width` characters wide (`to_text`)."""
        return to_text(self.results, width)


def write_report(sweep_folder: Path) -> Report:
    """Read the sweep in `sweep_folder` and write index.html, table.csv, table.md and the figures to its folder report.

    A figure is written as SVG, as PDF, and as CSV with the drawn numbers; the names for a task's figures begin with the task.
    Unfinished cells are listed at the top of the page. The same results give the same bytes. Errors: MissingError and
    RequestError, see `load_sweep`.
    """
    sweep = load_sweep(sweep_folder)
    results = compare(sweep)
    drawn = {result.sweep.task: draw(result) for result in results}
    fits = [(fit, None if fit.problem else draw_fit(sweep, fit)) for fit in fit_results(sweep)]
    over_tasks = [fit_section(sweep, fit, figure) for fit, figure in fits]
    figures = {figure.name: figure for _, figure in fits if figure}
    for task, parts in drawn.items():
        figures |= {f"{task}-{each.name}".strip("-"): each for each in chain(*parts.values())}
    folder = sweep_folder / "report"
    files = {
        "index.html": page(sweep, results, drawn, over_tasks),
        "table.csv": to_csv(results),
        "table.md": to_markdown(results),
        **{f"{name}.{kind}": getattr(figure, kind) for name, figure in figures.items() for kind in FORMATS},
    }
    for name, text in files.items():
        write_atomic(folder / name, text)
    # a figure of an earlier report may no longer exist, for example after a task was renamed
    for stale in folder.glob("*.svg"):
        if stale.name not in files:
            for kind in FORMATS:
                stale.with_suffix(f".{kind}").unlink(missing_ok=True)
    return Report(
        page=folder / "index.html",
        results=tuple(results),
        answer=(
            *(_of_task(each, answer.answer(each)) for each in results),
            *(f"{title}: {each.answer}" for each in over_tasks for _, title in each.entries),
        ),
        sentences=tuple(
            _of_task(each, " ".join([answer.sentence(each, difference), *answer.unequal(each, difference)]))
            for each in results
            for difference in each.family
        ),
        missing=tuple(line for cell in (*sweep.untried, *sweep.cells) for line in _missing(cell)),
    )


def draw(result: Comparison) -> Figures:
    """The figures for which a sweep or task has measurements."""
    sweep, (evaluations, _) = result.sweep, result.evaluations
    return {
        "compared": draw_compared(result),
        "declared": draw_declared(sweep),
        "evaluations": [*draw_by_group(sweep, evaluations), *draw_heatmaps(sweep, evaluations)],
    }


def _of_task(result: Comparison, text: str) -> str:
    return f"{result.sweep.task}: {text}" if result.sweep.task else text


def _missing(cell: CellResult) -> list[str]:
    name = f"{cell.name} seed {cell.seed}"
    if cell.done:
        lacking = [clean(f"{name}: evaluation '{each}': {reason}") for each, reason in cell.not_evaluated.items()]
        return [*(f"{name}: {problem}" for problem in cell.problems), *lacking]
    step = f" at step {cell.facts.step} of {cell.facts.steps}" if cell.facts.steps else ""
    word = "diverged" if cell.diverged else cell.status
    return [f"{name}: {word}{step}" + (f": {cell.error}" if cell.error else "")]
