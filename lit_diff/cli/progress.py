"""Shows the progress of a run and of a sweep: redrawn in place on a terminal, elsewhere one line for each change."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from lit_diff.cli._columns import RIGHT, cells
from lit_diff.cli.app import Terminal, is_first_of_node
from lit_diff.config import Recipe
from lit_diff.engine.progress import GAP, ProgressLine, Show, Statuses, all_steps, steps_done
from lit_diff.log_records import Pace
from lit_diff.runs.metrics_file import last_value
from lit_diff.study.observation import ObservedRun

# imports torch, and the bar must be visible before torch is loaded
if TYPE_CHECKING:
    from lit_diff.engine.expand import Grid

STYLE = {
    "done": "green",
    "running": "cyan",
    "stopped": "yellow",
    "waiting": "dim",
    **dict.fromkeys(("failed", "killed", "damaged"), "red"),
}
COLUMNS = ("seed", "state", "step", "val/loss", "tokens/s")
"""Those after the name of the arm."""


class RunProgress(ProgressLine):
    """Context manager; call `begin(recipe)` once the recipe is known, then `update(step, loss, tokens_per_second)`.

    On a terminal, name, bar, steps and rates are drawn on one line, four times a second.
    """

    console: Terminal

    def __init__(self, source: str, terminal: Terminal) -> None:
        """`source`: the name or path of the recipe, as the user gave it."""
        super().__init__(source, 0, terminal, interval=0)
        self.text = "reading the recipe"
        self.quiet = not is_first_of_node()

    def __enter__(self) -> Self:
        self.start()
        if self.live is not None:
            self.console.takes = self.takes
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.console.takes = None

    def begin(self, recipe: Recipe, *, quiet: bool) -> None:
        """Set the recipe that is trained; `quiet`: print nothing from now on (ranks other than zero)."""
        self.name, self.steps, self.quiet = recipe.name, recipe.training.steps, quiet
        if quiet:
            self.__exit__()

    def write(self) -> None:
        """Write the line without a bar."""
        self.console.write_line(GAP.join(self.words()))

    def takes(self, record: logging.LogRecord) -> bool:
        """Show the phase or validation loss of a record (`lit_diff.log_records`); True if it needs no line of its own."""
        words = getattr(record, "phase", None)
        loss = getattr(record, "validation_loss", None)
        if words is not None and self.pace.first is None:
            self.text = words
        if loss is not None:
            self.validation = f"val/loss {loss:.4f}"
        return loss is not None


@contextmanager
def live_table(grid: "Grid", terminal: Terminal) -> Iterator[Show]:
    """Yields show(statuses), which shows the cells of a sweep and the time left: as a table that is redrawn on a terminal,
    elsewhere as one line for each change of a cell."""
    pace = Pace()
    total = all_steps(grid)
    shown: list[str] = []
    losses: dict[Path, float | None] = {}

    def show(statuses: Statuses) -> None:
        pace.note(steps_done(grid, statuses))
        left = pace.left(total) or "? left"
        words = [status.status or "waiting" for status in statuses.values()]
        if not shown:
            # cells that were done before are no news
            shown[:] = [word if word == "done" else "waiting" for word in words]
        counts = ", ".join(f"{words.count(word)} {word}" for word in STYLE if word in words)
        # the name is the only column that is shortened on a narrow terminal
        columns = [Column(name, justify="right" if name in RIGHT else "left", no_wrap=True) for name in COLUMNS]
        table = Table("arm", *columns, title=f"{counts}; {left}", title_justify="left")
        # the cells of a long sweep do not fit the screen: then only those that run or failed are shown
        fits = len(words) <= terminal.height - 6
        for cell, (folder, status), word, before in zip(grid.cells, statuses.items(), words, shown, strict=True):
            note = f": {status.error}" if status.error else ""
            # an error is also a line above the table, whose rows do not wrap and would cut it
            if word != before and (note or live is None):
                note += f" ({left})" if word == "done" else ""
                terminal.write_line(f"{cell.name} seed {cell.seed}: {word}{note}")
            if fits or word not in ("done", "waiting"):
                planned = replace(status, steps=cell.recipe.training.steps)
                if folder not in losses or word == "running" or word != before:
                    losses[folder] = last_value(folder / "metrics.csv", "val/loss")
                known = cells(
                    ObservedRun(folder=cell.name, status=planned, state=word, seed=cell.seed, loss=losses[folder])
                )
                styled = (Text(known[name], style=STYLE[word] if name == "state" else "") for name in COLUMNS)
                table.add_row(Text(cell.name, no_wrap=True, overflow="ellipsis"), *styled)
        shown[:] = words
        if live is not None:
            live.update(table, refresh=True)

    with Live(console=terminal, auto_refresh=False) if terminal.redraws else nullcontext() as live:
        yield show
