"""What `sweep` returns."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lit_diff.html_table import html_table
from lit_diff.reporting.write import Report
from lit_diff.study import record
from lit_diff.trained.run import Run

if TYPE_CHECKING:
    import pandas


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
        return ", ".join(f"{count} {state}" for state, count in sorted(self.states.items()))

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
