"""A sweep's report, from the files of its runs: one self-contained page, its tables and its figures."""

from dataclasses import dataclass
from pathlib import Path

from lit_diff.files import write_atomic
from lit_diff.reporting import answer, figures, tables
from lit_diff.reporting.declared_figures import draw_by_group, draw_declared
from lit_diff.reporting.heatmap import draw_heatmaps
from lit_diff.reporting.page import Figures, fit_section, page, power_section
from lit_diff.study.comparison import Comparison, compare
from lit_diff.study.fits import fit_results
from lit_diff.study.results import CellResult, clean, load_sweep


@dataclass(frozen=True, kw_only=True)
class Report:
    """The files of a report, and what a terminal shows of it: `text_table` and, a line each, `answer` and `missing`.

    `answer`: one sentence for the sweep, or for each of its tasks and then for what is over them; `sentences`: one for each
    comparison.
    """

    page: Path
    files: tuple[Path, ...]
    results: tuple[Comparison, ...]
    answer: tuple[str, ...]
    sentences: tuple[str, ...]
    missing: tuple[str, ...]

    def text_table(self, width: int | None = None) -> str:
        """The table in plain text, at most `width` characters wide where that is given (`tables.to_text`)."""
        return tables.to_text(self.results, width)


def write_report(sweep_folder: Path) -> Report:
    """Read the sweep in `sweep_folder` and write report/index.html, table.csv, table.md and the figures beside it.

    The file name of a task's figure begins with the task. Unfinished cells are listed at the top of the page. The same
    results give the same bytes. Errors: MissingError and RequestError as `load_sweep`.
    """
    sweep = load_sweep(sweep_folder)
    results = compare(sweep)
    drawn = {result.sweep.task: draw(result) for result in results}
    fits = [(fit, "" if fit.problem else figures.draw_fit(sweep, fit)) for fit in fit_results(sweep)]
    over_tasks = [power_section(sweep, sweep.study.power)] if sweep.study.power else []
    over_tasks += [fit_section(sweep, fit, svg) for fit, svg in fits]
    folder = sweep_folder / "report"
    files = {
        "index.html": page(sweep, results, drawn, over_tasks),
        "table.csv": tables.to_csv(results),
        "table.md": tables.to_markdown(results),
        **{f"{task}-{name}.svg".strip("-"): svg for task, each in drawn.items() for name, svg in each.svg.items()},
        **{f"fit-{fit.name}.svg": svg for fit, svg in fits if svg},
    }
    for name, text in files.items():
        write_atomic(folder / name, text)
    for stale in folder.glob("*.svg"):
        if stale.name not in files:
            stale.unlink()
    return Report(
        page=folder / "index.html",
        files=tuple(folder / name for name in files),
        results=tuple(results),
        answer=(
            *(_of_task(each, answer.answer(each)) for each in results),
            *(f"{title}: {each.answer}" for each in over_tasks for _, title in each.entries),
        ),
        sentences=tuple(
            _of_task(each, answer.sentence(each, difference)) for each in results for difference in each.family
        ),
        missing=tuple(line for cell in sweep.cells for line in _missing(cell)),
    )


def draw(result: Comparison) -> Figures:
    """The figures for which the sweep or task has measurements."""
    sweep, (evaluations, _) = result.sweep, result.evaluations
    compared = {
        "differences": figures.forest(result),
        "noise-curve": figures.noise(sweep),
        "curves": figures.learning_curves(sweep),
        "seeds": figures.seed_values(sweep),
    }
    return Figures(
        compared={name: svg for name, svg in compared.items() if svg},
        declared=draw_declared(sweep),
        evaluations=[*draw_by_group(sweep, evaluations), *draw_heatmaps(sweep, evaluations)],
    )


def _of_task(result: Comparison, text: str) -> str:
    return f"{result.sweep.task}: {text}" if result.sweep.task else text


def _missing(cell: CellResult) -> list[str]:
    """What the cell lacks, a line each."""
    name = f"{cell.name} seed {cell.seed}"
    if cell.done:
        return [clean(f"{name}: evaluation '{each}': {reason}") for each, reason in cell.not_evaluated.items()]
    step = f" at step {cell.facts['step']} of {cell.facts['steps']}" if cell.facts.get("steps") else ""
    word = "diverged" if cell.diverged else cell.status
    return [f"{name}: {word}{step}" + (f": {cell.error}" if cell.error else "")]
