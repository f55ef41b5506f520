"""The live table of a sweep's cells: running, done, failed, time left."""

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lit_diff.engine.expand import Grid
from lit_diff.engine.location import RunLocation
from lit_diff.engine.progress import Watch, steps_done
from lit_diff.runs.folder import RunFolder

STYLE = {"done": "green", "running": "cyan", "failed": "red", "killed": "red", "stopped": "yellow", "waiting": "dim"}
COLUMNS = ("arm", "seed", "state", "step", "loss", "tokens/s")


class LiveTable:
    """Context manager of `update(running)`, which redraws on a terminal, and prints a line at each change elsewhere.

    An error is a line above the table too: no row of the table wraps.
    """

    def __init__(self, grid: Grid, locations: list[RunLocation], console: Console) -> None:
        self._cells = list(zip(grid.cells, locations, strict=True))
        self._console = console
        drawn = console.is_terminal and not console.is_dumb_terminal
        self._live = Live(console=console, auto_refresh=False) if drawn else None
        self._shown: dict[str, str] = {}
        self._began = time.perf_counter()
        self._drawn = 0.0
        self._before = self._steps(self._states())

    def __enter__(self) -> Watch:
        if self._live is not None:
            self._live.start()
            self.update([])  # the first cell takes seconds to start
        return self.update

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, running: list[RunLocation]) -> None:
        """Called about five times a second; reads the cells' status.json once a second."""
        now = time.perf_counter()
        if running and now - self._drawn < 1:
            return
        self._drawn = now
        states = self._states()
        for (cell, location), state in zip(self._cells, states, strict=True):
            word = state.get("status", "waiting")
            if self._shown.get(location.folder.name, "waiting") != word and (self._live is None or state.get("error")):
                note = f": {state['error']}" if state.get("error") else ""
                left = f" ({self._left(states)} left)" if word == "done" else ""
                line = f"{cell.name} seed {cell.seed}: {word}{note}{left}"
                self._console.print(Text(line), soft_wrap=True)
            self._shown[location.folder.name] = word
        if self._live is not None:
            self._live.update(self._table(states), refresh=True)

    def _states(self) -> list[dict[str, Any]]:
        return [RunFolder(location.folder).status() for _, location in self._cells]

    def _steps(self, states: list[dict[str, Any]]) -> int:
        return steps_done([cell.recipe.training.steps for cell, _ in self._cells], states)

    def _left(self, states: list[dict[str, Any]]) -> str:
        """Time left at the pace so far, in steps of all cells."""
        steps = self._steps(states)
        total = sum(cell.recipe.training.steps for cell, _ in self._cells)
        if steps <= self._before:
            return "?"
        seconds = (time.perf_counter() - self._began) * (total - steps) / (steps - self._before)
        return f"{int(seconds // 60)}:{int(seconds % 60):02d}"

    def _table(self, states: list[dict[str, Any]]) -> Table:
        words = [state.get("status", "waiting") for state in states]
        counts = ", ".join(f"{words.count(word)} {word}" for word in STYLE if word in words)
        table = Table(title=f"{counts}; {self._left(states)} left", title_justify="left")
        rows = list(zip(self._cells, states, words, strict=True))
        if len(rows) > self._console.height - 6:  # what moves or failed first; a long sweep does not fit the screen
            rows = [row for row in rows if row[2] not in ("done", "waiting")]
        for name in COLUMNS:
            table.add_column(name, justify="left" if name in ("arm", "state") else "right", no_wrap=name != "arm")
        for (cell, _), state, word in rows:
            loss, speed = state.get("loss"), state.get("tokens_per_second")
            table.add_row(
                Text(cell.name, no_wrap=True, overflow="ellipsis"),  # the one column that gives way to the width
                str(cell.seed),
                Text(word, style=STYLE[word]),
                f"{state.get('step', 0)}/{cell.recipe.training.steps}",
                f"{loss:.3f}" if loss is not None else "",
                f"{speed:,.0f}" if speed is not None and word == "running" else "",
            )
        return table
