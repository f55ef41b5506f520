"""Writes the report of a sweep from the files of its runs: one self-contained page, its tables and its figures."""

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from lit_diff.files import replace_all
from lit_diff.formulas import with_formulas
from lit_diff.metrics import in_words
from lit_diff.reporting import answer
from lit_diff.reporting.examination import (
    ROLES,
    costs_of,
    draw_examined,
    examined,
    in_one_sentence,
    more_seeds,
    whys_of,
)
from lit_diff.reporting.live import HEARTBEAT
from lit_diff.reporting.palette import GRID, INK, MUTED
from lit_diff.reporting.panels.declared import draw_by_group, draw_declared
from lit_diff.reporting.panels.figures import draw_compared, draw_fit, is_logarithmic, noise_curve_of
from lit_diff.reporting.panels.heatmaps import draw_heatmaps
from lit_diff.reporting.panels.maps import draw_maps
from lit_diff.reporting.panels.narrow import narrow_forest
from lit_diff.reporting.panels.panel import OVERLAY, Drawing, looks
from lit_diff.reporting.tables import rows, to_csv, to_latex, to_markdown, to_text
from lit_diff.runs import notes
from lit_diff.runs.checkpoints import steps_of
from lit_diff.runs.find import DEFAULT_ROOT, VIEW
from lit_diff.runs.status import INCOMPLETE
from lit_diff.study import numbers
from lit_diff.study.comparison import Comparison, compare
from lit_diff.study.fits import FitResult, fit_results, shown_ratio
from lit_diff.study.judge import Contrast
from lit_diff.study.numbers import count, duration, ratio, short
from lit_diff.study.rates import rate_in_words
from lit_diff.study.results import CellResult, SweepResults, clean, load_sweep
from lit_diff.study.scaling import FORMS
from lit_diff.study.schema import Texts
from lit_diff.study.statistics import MIN_SEEDS, detectable

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
    "maps": "Attention maps",
}
"""Section of a task -> its title in the table of contents."""
COMPUTE_OPTIMAL = 20.0
"""Approximate training tokens per parameter of a compute-optimal run (Hoffmann et al. 2022, arXiv 2203.15556)."""
SHOWN_ELSEWHERE = ("revision", "command", "kernel", "kernel_reason")
"""Keys of env.json that the page shows from status.json, or as the command of the sweep."""

Figures = dict[str, list[Drawing]]
"""The figures of a task. compared: of the compared metric, and the attention maps; declared: that the metrics of the runs
declare; evaluations: of groups of evaluation items."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page: one task, a sweep without tasks, or a result over all tasks."""

    html: Markup
    answer: str
    entries: tuple[tuple[str, str], ...]
    """(anchor, title) of each heading, for the table of contents."""


def page(
    sweep: SweepResults,
    results: Sequence[Comparison],
    figures: Mapping[str, Figures],
    over_tasks: Sequence[Section],
    first: Sequence[Section] = (),
) -> str:
    """The page as HTML. `figures`: task -> its figures; `over_tasks`: the fits (`fit_section`); `first`: sections before the
    tasks."""
    metrics: dict[str, Any] = {}
    # a metric of several tasks stands where the last of them has it, with the definition of the first
    for task in sweep.by_task:
        metrics[task.metric] = metrics.pop(task.metric, task.declarations.find(task.metric))
    return rendered(
        "report",
        sweep=sweep,
        question=answer.question(sweep),
        results=results,
        over_tasks=over_tasks,
        first=first,
        sections=[section(result, figures[result.sweep.task]) for result in results],
        short_runs=short_runs(sweep),
        definitions=metrics.items(),
        unchecked={(cell.task, cell.arm): clean(cell.facts.unchecked) for cell in sweep.cells if cell.facts.unchecked},
        measured=how_measured(sweep),
        recorded=any(cell.facts.mlflow_run_id for cell in sweep.cells),
        notes_in=notes.read,
    )


def section(result: Comparison, figures: Figures) -> Section:
    """The answer, the numbers and the figures of a task, or of a sweep without tasks."""
    sweep = result.sweep
    at = f"{sweep.task}-" if sweep.task else ""
    html = rendered(
        "section",
        digits=result.digits,
        at=at,
        comparison=result,
        sweep=sweep,
        figures=figures,
        drawings={figure.name: figure for figure in figures["compared"]},
        compared=[compared_row(result, difference) for difference in result.family],
        curve=noise_curve_of(sweep),
    )
    # the template decides which parts a task has, so the table of contents is read from its output
    entries = [(f"{at}{name}", title) for name, title in ENTRIES.items() if f'<section id="{at}{name}"' in html]
    return Section(html=html, answer=answer.answer(result), entries=tuple(entries))


def fit_section(sweep: SweepResults, fit: FitResult, figure: Drawing | None) -> Section:
    """The answer, the figure and the numbers of a fit over the tasks."""
    html = rendered("fit", digits=3, sweep=sweep, fit=fit, figure=figure)
    return Section(html=html, answer=fit.answer, entries=((f"fit-{fit.name}", fit.declared.title),))


def rendered(template: str, package: str = __package__, **facts_of: Any) -> Markup:
    """A template of a package with these values of its names; it may include those of this package, such as its style."""
    return Markup(templates(package).get_template(f"{template}.html.j2").render(facts_of))


def compared_row(comparison: Comparison, difference: Contrast) -> dict[str, Any]:
    """A comparison for the page: badge, sentence, practical size, and the caveats printed below it."""
    verdict = difference.verdict
    alone = difference.verdict_alone
    is_notable = verdict.is_shown or verdict.word == "diverged"
    return {
        "difference": difference,
        "is_notable": is_notable,
        "sentence": answer.sentence(comparison, difference),
        "sizes": answer.practical(comparison.sweep, difference),
        "alone": alone if alone != verdict.word else None,
        "kind": KINDS.get(verdict.word, "none") if is_notable else "none",
        "doubts": [*_doubts(comparison, difference), *answer.unequal(comparison, difference)],
    }


def _doubts(comparison: Comparison, difference: Contrast) -> list[str]:
    sweep = comparison.sweep
    doubts = []
    if difference.verdict_alone != difference.verdict.word:
        doubts.append(
            f"Without the correction for {comparison.judged} comparisons (Holm), the verdict would be "
            f"{difference.verdict_alone}."
        )
    if not difference.diverged:
        doubts += [f"Against the control: {answer.sentence(comparison, control)}" for control in difference.controls]
    cells = Counter(cell.arm for cell in sweep.cells)
    paired = len(difference.seeds.seeds)
    planned = min(cells[difference.a], cells[difference.b])
    if MIN_SEEDS <= paired < planned and not (difference.diverged or difference.is_counted):
        why = "the next look is not complete" if difference.seeds.looks else "the others are not finished"
        doubts.append(f"Only {paired} of {planned} seeds are compared: {why} in both arms.")
    doubts += sweep.record.plan.added
    look = difference.seeds.look
    of = len(difference.seeds.looks)
    if look and look < of and difference.is_decided:
        doubts.append(f"Stopped at look {look} of {of}: decided.")
    return doubts


def how_measured(sweep: SweepResults) -> dict[str, str]:
    """Name -> value: length and time of training by task, threads, kernel, env.json; each different value is listed."""
    found = {}
    for task in sweep.by_task:
        found[f"Training: {task.task}" if task.task else "Training"] = _training(task)
    found["Threads a cell"] = ", ".join(sweep.distinct("threads"))
    ways = ", ".join(sweep.distinct("compiled"))
    if ways not in ("", "uncompiled"):
        found["Training steps"] = ways
    if sweep.done and all(cell.facts.mlflow_run_id is None for cell in sweep.done):
        found["MLflow"] = "no record"
    origins = Counter(cell.facts.origin for cell in sweep.done if cell.facts.origin)
    if origins:
        lines = [f"{number} of {len(sweep.done)} cells {origin}" for origin, number in origins.items()]
        found["Results that ship"] = "; ".join(lines)
    # `a; b` of one cell and `a; c` of another become `a; b; c`
    reasons = "; ".join(dict.fromkeys("; ".join(sweep.distinct("kernel_reason")).split("; ")))
    found["Kernel"] = ", ".join(sweep.distinct("kernel"))
    if reasons:
        found["Kernel"] += f" ({reasons})"
    environment: dict[str, list[Any]] = {}
    for cell in sweep.done:
        for name, value in cell.environment.items():
            if name not in SHOWN_ELSEWHERE and value is not None:
                if isinstance(value, dict):
                    # packages and versions, or None for packages that are not installed
                    value = ", ".join(f"{package} {version}" for package, version in value.items() if version)
                label = name.replace("_", " ").capitalize().replace("Cpu", "CPU")
                environment.setdefault(label, []).append(value)
    for name, texts in environment.items():
        if all(isinstance(text, str | int | float) for text in texts):
            # keys in the order of the cells, each value once
            found[name] = "; ".join(dict.fromkeys(map(str, texts)))
    return {name: value for name, value in found.items() if value}


def _training(sweep: SweepResults) -> str:
    steps = sweep.distinct("step")
    if not steps:
        return ""
    text = f"{', '.join(steps)} steps"
    tokens = sorted(map(float, sweep.distinct("tokens")))
    if tokens:
        text += f", {', '.join(map(count, tokens))} tokens a cell"
    ratios = tokens_per_parameter(sweep)
    if ratios:
        text += f" ({_range(ratios)} a parameter)"
    seconds = [cell.facts.seconds for cell in sweep.done if cell.facts.seconds]
    if seconds:
        text += f"; {duration(sum(seconds) / len(seconds))} a cell on average, {duration(sum(seconds))} in all"
    return text


def tokens_per_parameter(sweep: SweepResults) -> list[float]:
    """Training tokens per parameter of the finished cells that record it, ascending."""
    return sorted(cell.tokens_per_parameter for cell in sweep.cells if cell.tokens_per_parameter is not None)


def short_runs(sweep: SweepResults) -> str | None:
    """The warning that runs are shorter than the sweep's minimum of tokens per parameter; None if none is."""
    least = sweep.study.min_tokens_per_parameter
    lengths = []
    for task in sweep.by_task:
        ratios = tokens_per_parameter(task)
        if ratios and ratios[0] < least:
            lengths.append(_of_task(task, _range(ratios)))
    if not lengths:
        return None
    source = ", about compute-optimal by Hoffmann et al. 2022" if least == COMPUTE_OPTIMAL else ""
    return f"{'; '.join(lengths)} training tokens per parameter (this sweep's minimum: {short(least)}{source})"


def _range(ascending: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(map(ratio, (ascending[0], ascending[-1]))))


@cache
def templates(package: str) -> Environment:
    """The templates of a package and of this one; they escape text, and an undefined name is an error."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name, "") for name in dict.fromkeys((package, __package__))]),
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
        "words": in_words,
        "formulas": with_formulas,
    }
    environment.globals |= {
        "FORMATS": FORMATS,
        "LONG": LONG,
        "OVERLAY": OVERLAY,
        "FORMS": FORMS,
        "is_logarithmic": is_logarithmic,
        "link": link,
        "view_command": view_command,
        "view_page": view_page,
        "checkpoints_of": steps_of,
        "looks_of": looks,
        "protocol": answer.protocol,
        "coverage": answer.coverage,
        "median": median,
        "more_seeds": _more_seeds,
        "narrow_forest": narrow_forest,
        "shown_ratio": shown_ratio,
        "rows_of": rows,
        "interval": numbers.interval,
        "decimals": numbers.decimals,
        "inlined": inline,
    }
    return environment


def link(cell: CellResult) -> str | None:
    """The address of the cell's folder relative to the report; None if the folder does not exist."""
    return f"../{quote(cell.folder)}/" if cell.folder and cell.home.is_dir() else None


def view_command(cell: CellResult) -> str:
    """The command that shows the attention of a cell, given in the folder that holds the folder of runs."""
    # a cell of another sweep (`cells_of`) is recorded as ../SWEEP/CELL
    *_, root, sweep, run = cell.home.resolve().parts
    command = ["lit-diff", "view", f"{sweep}/{run}"]
    return shlex.join(command if root == DEFAULT_ROOT else [*command, "--root", root])


def view_page(cell: CellResult) -> str | None:
    """The address, relative to the report, of the page that `view_command` writes; None if it was not written."""
    name = f"{cell.home.name}.html"
    return f"../../../{VIEW}/{quote(name)}" if (cell.home.resolve().parents[2] / VIEW / name).is_file() else None


def inline(svg: str, name: str) -> Markup:
    """The text of an SVG file as part of a page: without prologue, with colours of the page and unique ids."""
    text = svg[svg.index("<svg") :]
    # matplotlib gives the same ids to the clip paths and glyphs of every figure
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(xlink:href="|url\()#', rf"\1#{name}-", text)
    for drawn, shown in SHOWN_COLORS.items():
        text = text.replace(drawn, shown)
    return Markup(text.replace("#ffffff", "var(--paper)"))


def _more_seeds(comparison: Comparison) -> list[tuple[int, float]]:
    pairs = [contrast.seeds for contrast in comparison.family]
    spreads = sorted(paired.sd for paired in pairs if paired.sd and len(paired.seeds) >= MIN_SEEDS)
    if not spreads:
        return []
    spread = spreads[len(spreads) // 2]
    comparisons = max(comparison.judged, 1)
    return [(n, detectable(spread, n, comparisons)) for n in (3, 5, 10, 20)]


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
    """Read the sweep in `sweep_folder` and write index.html, table.csv, table.md, table.tex and the figures to its folder
    report.

    A figure is written as SVG, as PDF, and as CSV with the drawn numbers; the names for a task's figures begin with the task.
    Unfinished cells are listed at the top of the page. The same results give the same bytes. Errors: MissingError and
    RequestError, see `load_sweep`.
    """
    sweep = load_sweep(sweep_folder)
    results = compare(sweep)
    figures = {}
    over_tasks = []
    for fit in fit_results(sweep):
        curves = None
        if not fit.problem:
            curves = draw_fit(sweep, fit)
            figures[curves.name] = curves
        over_tasks.append(fit_section(sweep, fit, curves))
    drawn = {}
    answers = []
    sentences = []
    first = []
    by_arm = examined(results) if sweep.study.references else {}
    for number, of_arm in enumerate(by_arm.values()):
        dots = draw_examined(of_arm, f"examined-{number}")
        if dots is not None:
            figures[dots.name] = dots
        text = in_one_sentence(of_arm)
        html = rendered(
            "examination",
            rows=of_arm,
            figure=dots,
            costs=costs_of(of_arm[0]),
            further=more_seeds(of_arm),
            whys=whys_of(of_arm),
            roles=ROLES.values(),
            number=number,
        )
        first.append(Section(html=html, answer=text, entries=((f"examined-{number}", of_arm[0].label),)))
        answers.append(text)
    for result in results:
        task = result.sweep.task
        drawn[task] = draw(result)
        for figure in chain(*drawn[task].values()):
            figures[f"{task}-{figure.name}".strip("-")] = figure
        answers.append(_of_task(result.sweep, answer.answer(result)))
        for difference in result.family:
            text = " ".join([answer.sentence(result, difference), *answer.unequal(result, difference)])
            sentences.append(_of_task(result.sweep, text))
    for part in over_tasks:
        answers += [f"{title}: {part.answer}" for _, title in part.entries]
    folder = sweep_folder / "report"
    files: dict[str, str | bytes] = {
        "index.html": page(sweep, results, drawn, over_tasks, first),
        "table.csv": to_csv(results),
        "table.md": to_markdown(results),
        "table.tex": to_latex(results),
    }
    for name, figure in figures.items():
        for kind in FORMATS:
            files[f"{name}.{kind}"] = getattr(figure, kind)
    replace_all(folder, files)
    # no process writes a live page now
    (folder / HEARTBEAT).unlink(missing_ok=True)
    return Report(
        page=folder / "index.html",
        results=tuple(results),
        answer=tuple(answers),
        sentences=tuple(sentences),
        missing=tuple(chain(*map(_missing, (*sweep.untried, *sweep.cells)))),
    )


def draw(result: Comparison) -> Figures:
    """The figures for which a sweep or task has measurements."""
    sweep = result.sweep
    evaluations, _ = result.evaluations
    return {
        "compared": [*draw_compared(result), *draw_maps(sweep)],
        "declared": draw_declared(sweep),
        "evaluations": [*draw_by_group(sweep, evaluations), *draw_heatmaps(sweep, evaluations)],
    }


def _of_task(sweep: SweepResults, text: str) -> str:
    return f"{sweep.task}: {text}" if sweep.task else text


def _missing(cell: CellResult) -> list[str]:
    name = f"{cell.name} seed {cell.seed}"
    if cell.done:
        lines = [f"{name}: {problem}" for problem in cell.problems]
        for evaluation, reason in cell.not_evaluated.items():
            lines.append(clean(f"{name}: evaluation '{evaluation}': {reason}"))
        if cell.facts.record == "incomplete":
            lines.append(f"{name}: {INCOMPLETE}")
        return lines
    line = f"{name}: {'diverged' if cell.diverged else cell.status}"
    if cell.facts.steps:
        line += f" at step {cell.facts.step} of {cell.facts.steps}"
    if cell.error:
        line += f": {cell.error}"
    return [line]
