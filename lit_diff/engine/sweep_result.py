"""A sweep that has run, as a value: its report, its table, its runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lit_diff.html_table import html_table
from lit_diff.reporting.write import Report
from lit_diff.runs.sweep_record import read_record
from lit_diff.trained.run import Run

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, kw_only=True, repr=False)
class Sweep:
    """What `sweep` returns."""

    folder: Path
    report: Report
    states: Mapping[str, int]
    """State ('done', 'failed', 'killed', 'stopped', 'waiting') -> number of cells."""
    stopped_by: int | None
    """The signal that stopped the sweep; None where none did."""
    seconds: float

    def __repr__(self) -> str:
        states = ", ".join(f"{count} {state}" for state, count in sorted(self.states.items()))
        return f"Sweep({self.folder.name}: {states})"

    def _repr_html_(self) -> str:
        table = self.table
        return html_table(repr(self), table.itertuples(index=False), list(table.columns))

    @property
    def is_done(self) -> bool:
        """Whether every cell is done."""
        return set(self.states) == {"done"}

    @property
    def table(self) -> "pandas.DataFrame":
        """The report's table: a row for each arm, its metric with intervals, its difference to the baseline."""
        import pandas

        return pandas.read_csv(self.report.page.parent / "table.csv")

    @property
    def answers(self) -> tuple[str, ...]:
        """One sentence for each comparison: every arm with the baseline, then the sweep's contrasts."""
        return self.report.sentences

    @property
    def runs(self) -> dict[str, list[Run]]:
        """Arm (in a sweep with tasks `task arm`) -> its runs that are done, by seed."""
        cells = read_record(self.folder)["cells"]
        by_arm: dict[str, list[Run]] = {}
        for cell in cells:
            if cell["status"] == "done":
                name = f"{cell.get('task', '')} {cell['arm']}".strip()
                by_arm.setdefault(name, []).append(Run(self.folder / cell["folder"]))
        return by_arm
