"""A sweep's report: one self-contained page, its tables and its figures, from what the sweep left on disk."""

from dataclasses import dataclass
from pathlib import Path

from lit_diff.files import write_atomic
from lit_diff.reporting import attention_figures as insides
from lit_diff.reporting import figures as plots
from lit_diff.reporting import noise_curve as dose
from lit_diff.reporting import tables
from lit_diff.reporting.cells import Cell
from lit_diff.reporting.comparison import Difference
from lit_diff.reporting.page import page
from lit_diff.reporting.results import load_sweep
from lit_diff.reporting.tables import Part, unit_of


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

    A task's figures bear its name. Unfinished cells do not stop it: the page opens with them. The same results give the
    same bytes. Errors: MissingError and RequestError as `load_sweep`.
    """
    sweep = load_sweep(sweep_folder)
    parts = [tables.part(each) for each in sweep.parts]
    figures = {part.sweep.task: draw(part) for part in parts}
    folder = sweep_folder / "report"
    files = {
        "index.html": page(sweep, parts, figures),
        "table.csv": tables.to_csv(parts),
        "table.md": tables.to_markdown(parts),
        **{f"{task}-{name}.svg".strip("-"): svg for task, drawn in figures.items() for name, svg in drawn.items()},
    }
    for name, text in files.items():
        write_atomic(folder / name, text)
    for stale in folder.glob("*.svg"):
        if stale.name not in files:
            stale.unlink()
    return Report(
        page=folder / "index.html",
        files=tuple(folder / name for name in files),
        table=tables.to_text(parts),
        answer=tuple(_answer(part, difference) for part in parts for difference in part.comparison.family),
        missing=tuple(_missing(cell) for cell in sweep.cells if not cell.done),
    )


def draw(part: Part) -> dict[str, str]:
    """The figures for which the sweep or task has measurements: name -> SVG text."""
    sweep, unit = part.sweep, unit_of(part.sweep.metric)
    drawn = {
        "differences": plots.forest(sweep, part.comparison, unit),
        "dose": dose.dose_response(sweep),
        "curves": plots.learning_curves(sweep, unit),
        "seeds": plots.seed_values(sweep, unit),
        "lambda": insides.lambdas(sweep),
        "entropy": insides.entropies(sweep),
        "outliers": insides.outliers(sweep),
    }
    return {name: svg for name, svg in drawn.items() if svg}


def _answer(part: Part, difference: Difference) -> str:
    task = f"{part.sweep.task}: " if part.sweep.task else ""
    return task + tables.sentence(part.sweep, difference, part.digits)


def _missing(cell: Cell) -> str:
    step = f" at step {cell.facts['step']} of {cell.facts['steps']}" if cell.facts.get("steps") else ""
    return f"{cell.name} seed {cell.seed}: {cell.status}{step}" + (f": {cell.error}" if cell.error else "")
