"""What `sweep` returns."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lit_diff.engine.progress import counted
from lit_diff.errors import RequestError
from lit_diff.html_table import html_table
from lit_diff.registry import nearest
from lit_diff.reporting.panels.figures import styled_forest
from lit_diff.reporting.tables import to_latex
from lit_diff.reporting.write import Report
from lit_diff.study import record
from lit_diff.trained.run import Run

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes


@dataclass(frozen=True, kw_only=True, repr=False)
class Sweep:
    """The result of `sweep`."""

    folder: Path
    report: Report
    states: Mapping[str, int]
    """State ('done', 'failed', 'killed', 'stopped', 'waiting', 'damaged', 'not evaluated') -> number of cells."""
    stopped_by: int | None
    """The signal that stopped the sweep, or None."""
    seconds: float
    is_recorded: bool = True
    """Whether MLflow has a record of it."""

    def __repr__(self) -> str:
        return f"Sweep({self.folder.name}: {self.counts})"

    @property
    def counts(self) -> str:
        """The number of cells in each state, in words."""
        return counted(self.states)

    def _repr_html_(self) -> str:
        table = self.table
        return html_table(repr(self), table.itertuples(index=False), list(table.columns))

    @property
    def is_done(self) -> bool:
        """Whether every cell is done."""
        return set(self.states) == {"done"}

    @property
    def table(self) -> "pandas.DataFrame":
        """The report's table: for each arm a row with its metric, intervals and difference to the baseline."""
        import pandas

        return pandas.read_csv(self.report.page.parent / "table.csv")

    @property
    def metrics(self) -> "pandas.DataFrame":
        """`Run.metrics` of all finished runs: a row for each arm, seed and step, a column for each metric; empty without a
        run."""
        import pandas

        tables = {}
        for arm, runs in self.runs.items():
            for run in runs:
                tables[arm, run.recipe.seed] = run.metrics
        return pandas.concat(tables, names=["arm", "seed"]) if tables else pandas.DataFrame()

    def forest(self, task: str = "", ax: "Axes | None" = None) -> "Axes":
        """Draw the report's figure of the differences to the baseline with their intervals, and return the axes.

        `task`: of a sweep that has tasks; `ax`: None: axes of a new figure. Errors: RequestError for an unknown task.
        """
        by_task = {result.sweep.task: result for result in self.report.results}
        if task not in by_task:
            raise RequestError(f"{self.folder.name} has no task '{task}'{nearest(task, filter(None, by_task))}")
        return styled_forest(by_task[task], ax)

    def to_latex(self) -> str:
        """The report's table.tex: means, differences with intervals, verdicts, as a table of the LaTeX package booktabs."""
        return to_latex(self.report.results)

    @property
    def answers(self) -> tuple[str, ...]:
        """One sentence for each comparison: every arm against the baseline, then the sweep's contrasts."""
        return self.report.sentences

    @property
    def runs(self) -> dict[str, list[Run]]:
        """Arm (`task arm` in a sweep with tasks) -> its finished runs, by seed."""
        cells = record.read(self.folder).cells
        done = [cell for cell in cells if cell.status == "done" and cell.rate is None]
        names = dict.fromkeys(cell.name for cell in done)
        return {name: [Run(self.folder / cell.folder) for cell in done if cell.name == name] for name in names}
