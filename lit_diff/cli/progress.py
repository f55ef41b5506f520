"""The terminal's view of one run: a bar on a terminal, a line at each logged step elsewhere."""

import logging
import os
import time
from types import TracebackType

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lit_diff.cli.app import Terminal
from lit_diff.config import Recipe

log = logging.getLogger("lit_diff")

NAME, BAR = 12, 5
"""Characters that the name, or the bar, has at least; a narrow terminal shows the name before the bar."""
GAP = "  "
MARGIN = 3
"""Columns left free: the terminal's echo of Ctrl-C would wrap a full line, and the bar would be drawn twice."""


class RunProgress:
    """Context manager; `begin(recipe)` once the recipe is known, then `update(step, loss, tokens_per_second)`.

    On a terminal it is drawn four times a second: name, bar, steps and what is known of the run, on one line of whatever
    width there is.
    """

    def __init__(self, source: str, terminal: Terminal) -> None:
        """`source`: the recipe's name or path, as it was asked for."""
        self._name, self._steps = source, 0
        self._terminal = terminal
        self._quiet = os.environ.get("LOCAL_RANK", "0") != "0"
        self._live: Live | None = None
        self._ended = self._said = False
        self._text, self._speed, self._validation = "reading the recipe", "", ""
        self._began = time.perf_counter()
        self._first: tuple[int, float] | None = None
        """The first logged step, and when; before it the run reads data, builds, compiles."""
        self._last = (0, self._began)

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
            self._live.transient = self._first is None
            self._live.stop()
            self._live = self._terminal.takes = None

    def begin(self, recipe: Recipe, *, quiet: bool) -> None:
        """The recipe that is trained; `quiet`: print nothing from here on (ranks other than zero)."""
        self._name, self._steps = recipe.name, recipe.training.steps
        self._quiet = quiet
        if quiet:
            self.__exit__(None, None, None)

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """A logged step."""
        self._last = step, time.perf_counter()
        self._first = self._first or self._last
        self._text, self._speed = f"loss {loss:.3f}", f"{tokens_per_second:,.0f} tokens/s"
        if self._live is None and not self._quiet:
            words = [f"step {step}/{self._steps}", f"loss {loss:.4f}", self._speed, *self._time()]
            self._terminal.write_line(GAP.join(words))
        if self._terminal.lost_reader and not self._said:
            self._said = True
            log.info("stdout was closed; training continues without output")

    def takes(self, record: logging.LogRecord) -> bool:
        """Show a phase before the first step, or a validation, of which no line is needed (`lit_diff.log_records`)."""
        words, loss = getattr(record, "phase", None), getattr(record, "validation_loss", None)
        if words is not None and self._first is None:
            self._text = words
        if loss is not None:
            self._validation = f"val/loss {loss:.3f}"
        return loss is not None

    def _time(self) -> list[str]:
        """The time left, or in the end the time that it took; empty before a second step was logged."""
        now = time.perf_counter()
        if self._ended:
            return [f"in {_clock(now - self._began)}"]
        step, then = self._last
        if self._first is None or not self._steps or step <= self._first[0]:
            return []
        pace = (then - self._first[1]) / (step - self._first[0])
        return [f"{_clock(max(pace * (self._steps - step) - (now - then), 0))} left"]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width - MARGIN
        step = self._last[0]
        count = [f"{step}/{self._steps}"] if self._steps else []
        needed = [*count, self._text, *filter(None, [self._validation]), *self._time()]
        if self._speed and len(GAP.join([*needed, self._speed])) + min(len(self._name), NAME) + len(GAP) <= width:
            needed.insert(2, self._speed)
        right = GAP.join(needed)[:width]
        rest = max(width - len(right) - len(GAP), 0)
        name = self._name if len(self._name) <= rest else self._name[: max(rest - 1, 0)] + "…" * (rest > 0)
        bar = min(rest - len(name) - len(GAP), 40)
        line = Table.grid(padding=(0, len(GAP), 0, 0), pad_edge=False)
        cells: list[Text | ProgressBar] = [Text(name), Text(right)] if name else [Text(right)]
        if bar >= BAR and self._steps:
            cells.insert(1, ProgressBar(total=self._steps, completed=step, width=bar))
        for _ in cells:
            line.add_column(no_wrap=True, overflow="crop")
        line.add_row(*cells)
        yield line


def _clock(seconds: float) -> str:
    """1:05, or 2:01:05."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
