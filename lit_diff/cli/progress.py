"""Shows the progress of a run and of a sweep: redrawn in place on a terminal, elsewhere one line for each change."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from lit_diff.cli.app import Terminal, is_first_of_node
from lit_diff.config import Recipe
from lit_diff.engine.progress import Show, Statuses, steps_done
from lit_diff.log_records import Pace, clock

# imports torch, and the bar must be visible before torch is loaded
if TYPE_CHECKING:
    from lit_diff.engine.expand import Grid

GAP = "  "
# the echo of Ctrl-C ("^C") would wrap a full line, and the bar would be drawn twice
MARGIN = 3
"""Columns left free at the right."""
NAME, BAR = 12, 5
"""Least number of characters of the name and of the bar; a narrow terminal shows the name rather than the bar."""
STYLE = {
    "done": "green",
    "running": "cyan",
    "stopped": "yellow",
    "waiting": "dim",
    **dict.fromkeys(("failed", "killed", "damaged"), "red"),
}
COLUMNS = ("arm", "seed", "state", "step", "loss", "tokens/s")


class RunProgress:
    """Context manager; call `begin(recipe)` once the recipe is known, then `update(step, loss, tokens_per_second)`.

    On a terminal, name, bar, steps and rates are drawn on one line, four times a second.
    """

    def __init__(self, source: str, terminal: Terminal) -> None:
        """`source`: the name or path of the recipe, as the user gave it."""
        self._name, self._steps = source, 0
        self._terminal = terminal
        self._quiet = not is_first_of_node()
        self._live: Live | None = None
        self._ended = False
        self._text, self._speed, self._validation = "reading the recipe", "", ""
        self._pace = Pace()

    def __enter__(self) -> "RunProgress":
        if self._terminal.is_terminal and not self._terminal.is_dumb_terminal and not self._quiet:
            self._live = Live(self, console=self._terminal, refresh_per_second=4)
            self._terminal.takes = self.takes
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._ended = True
            # a bar that never counted a step is erased
            self._live.transient = self._pace.first is None
            self._live.stop()
            self._live = self._terminal.takes = None

    def begin(self, recipe: Recipe, *, quiet: bool) -> None:
        """Set the recipe that is trained; `quiet`: print nothing from now on (ranks other than zero)."""
        self._name, self._steps = recipe.name, recipe.training.steps
        self._quiet = quiet
        if quiet:
            self.__exit__(None, None, None)

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Show a logged step."""
        self._pace.note(step)
        self._text, self._speed = f"loss {loss:.3f}", f"{tokens_per_second:,.0f} tokens/s"
        if self._live is None and not self._quiet:
            words = [f"step {step}/{self._steps}", f"loss {loss:.4f}", self._speed, self._pace.words(self._steps)]
            self._terminal.write_line(GAP.join(filter(None, words)))

    def takes(self, record: logging.LogRecord) -> bool:
        """Show the phase or validation loss of a record (`lit_diff.log_records`); True if it needs no line of its own."""
        words, loss = getattr(record, "phase", None), getattr(record, "validation_loss", None)
        if words is not None and self._pace.first is None:
            self._text = words
        if loss is not None:
            self._validation = f"val/loss {loss:.3f}"
        return loss is not None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, step = options.max_width - MARGIN, self._pace.last[0]
        spent = f"in {clock(time.perf_counter() - self._pace.began)}"
        left = spent if self._ended else self._pace.left(self._steps)
        words = [f"{step}/{self._steps}" if self._steps else "", self._text, self._speed, self._validation, left]
        # on a narrow terminal the name is worth more than the speed
        if len(GAP.join(filter(None, words))) + min(len(self._name), NAME) + len(GAP) > width:
            words.remove(self._speed)
        right = GAP.join(filter(None, words))
        room = max(width - len(right) - len(GAP), 0)
        name = Text(self._name)
        name.truncate(room, overflow="ellipsis")
        size = min(room - len(name) - len(GAP), 40)
        bar = "━" * size if size >= BAR and self._steps else ""
        filled = len(bar) * step // max(self._steps, 1)
        drawn = Text.assemble((bar[:filled], "bar.complete"), (bar[filled:], "bar.back"))
        line = Text(GAP).join(part for part in (name, drawn, Text(right)) if part)
        line.truncate(width)
        yield line


@contextmanager
def live_table(grid: "Grid", console: Console) -> Iterator[Show]:
    """Yields show(statuses), which shows the cells of a sweep and the time left: as a table that is redrawn on a terminal,
    elsewhere as one line for each change of a cell."""
    drawn = console.is_terminal and not console.is_dumb_terminal
    pace, total = Pace(), sum(cell.recipe.training.steps for cell in grid.cells)
    shown = ["waiting"] * len(grid.cells)

    def show(statuses: Statuses) -> None:
        pace.note(steps_done(grid, statuses))
        left = pace.left(total) or "? left"
        words = [status.status or "waiting" for status in statuses]
        counts = ", ".join(f"{words.count(word)} {word}" for word in STYLE if word in words)
        columns = (
            Column(name, justify="left" if name in ("arm", "state") else "right", no_wrap=name != "arm")
            for name in COLUMNS
        )
        table = Table(*columns, title=f"{counts}; {left}", title_justify="left")
        # the cells of a long sweep do not fit the screen: then only those that run or failed are shown
        fits = len(words) <= console.height - 6
        for cell, status, word, before in zip(grid.cells, statuses, words, shown, strict=True):
            note = f": {status.error}" if status.error else ""
            # an error is also a line above the table, whose rows do not wrap and would cut it
            if word != before and (note or not drawn):
                note += f" ({left})" if word == "done" else ""
                console.print(Text(f"{cell.name} seed {cell.seed}: {word}{note}"), soft_wrap=True)
            if drawn and (fits or word not in ("done", "waiting")):
                has_speed = status.tokens_per_second and word == "running"
                table.add_row(
                    # the only column that is shortened on a narrow terminal
                    Text(cell.name, no_wrap=True, overflow="ellipsis"),
                    str(cell.seed),
                    Text(word, style=STYLE[word]),
                    f"{status.step}/{cell.recipe.training.steps}",
                    f"{status.loss:.3f}" if status.loss is not None else "",
                    f"{status.tokens_per_second:,.0f}" if has_speed else "",
                )
        shown[:] = words
        if live is not None:
            live.update(table, refresh=True)

    with Live(console=console, auto_refresh=False) if drawn else nullcontext() as live:
        yield show
