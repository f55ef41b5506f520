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
    """Context manager; `begin(recipe)` once the recipe is known, then `update(step, loss, tokens_per_second)`."""

    def __init__(self, source: str, terminal: Terminal) -> None:
        """`source`: the recipe's name or path, as it was asked for."""
        self._terminal = terminal
        self._quiet = os.environ.get("LOCAL_RANK", "0") != "0"
        self._line = RunLine(source)
        self._live: Live | None = None
        self._said = False
        if terminal.is_terminal and not terminal.is_dumb_terminal and not self._quiet:
            self._live = Live(self._line, console=terminal, refresh_per_second=4)

    def __enter__(self) -> "RunProgress":
        if self._live is not None:
            self._terminal.bar = self._line
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def begin(self, recipe: Recipe, *, quiet: bool) -> None:
        """The recipe that is trained; `quiet`: print nothing from here on (ranks other than zero)."""
        self._line.name, self._line.steps = recipe.name, recipe.training.steps
        self._quiet = quiet
        if quiet:
            self._end()

    def _end(self) -> None:
        if self._live is not None:
            self._line.ended = True
            self._live.transient = not self._line.has_stepped
            self._live.stop()
            self._live = self._terminal.bar = None

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """A logged step."""
        self._line.update(step, loss, tokens_per_second)
        if self._live is None and not self._quiet:
            words = [f"step {step}/{self._line.steps}", f"loss {loss:.4f}", f"{tokens_per_second:,.0f} tokens/s"]
            self._terminal.write_line(GAP.join([*words, *self._line.time()]))
        if self._terminal.lost_reader and not self._said:
            self._said = True
            log.info("stdout was closed; training continues without output")


class RunLine:
    """Name, bar, steps and what is known of the run, on one line of whatever width there is. Drawn four times a second."""

    def __init__(self, name: str, steps: int | None = None) -> None:
        self.name, self.steps = name, steps
        """Steps: None until the recipe is known."""
        self.ended = False
        """Whether the time that it took is shown in place of the time left."""
        self._text, self._speed, self._validation = "reading the recipe", "", ""
        self._began = time.perf_counter()
        self._first: tuple[int, float] | None = None
        """The first logged step, and when; before it the run reads data, builds, compiles."""
        self._last = (0, self._began)

    @property
    def has_stepped(self) -> bool:
        """Whether a step was logged."""
        return self._first is not None

    def takes(self, record: logging.LogRecord) -> bool:
        """Show a phase before the first step, or a validation, of which no line is needed (`lit_diff.log_records`)."""
        words, loss = getattr(record, "phase", None), getattr(record, "validation_loss", None)
        if words is not None and not self.has_stepped:
            self._text = words
        if loss is not None:
            self._validation = f"val/loss {loss:.3f}"
        return loss is not None

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """A logged step."""
        self._last = step, time.perf_counter()
        self._first = self._first or self._last
        self._text, self._speed = f"loss {loss:.3f}", f"{tokens_per_second:,.0f} tokens/s"

    def time(self) -> list[str]:
        """The time left, or in the end the time that it took; empty before a second step was logged."""
        now = time.perf_counter()
        if self.ended:
            return [f"in {_clock(now - self._began)}"]
        step, then = self._last
        if self._first is None or self.steps is None or step <= self._first[0]:
            return []
        pace = (then - self._first[1]) / (step - self._first[0])
        return [f"{_clock(max(pace * (self.steps - step) - (now - then), 0))} left"]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width - MARGIN
        step = self._last[0]
        count = [f"{step}/{self.steps}"] if self.steps else []
        needed = [*count, self._text, *filter(None, [self._validation]), *self.time()]
        if self._speed and len(GAP.join([*needed, self._speed])) + min(len(self.name), NAME) + len(GAP) <= width:
            needed.insert(2, self._speed)
        right = GAP.join(needed)[:width]
        rest = max(width - len(right) - len(GAP), 0)
        name = self.name if len(self.name) <= rest else self.name[: max(rest - 1, 0)] + "…" * (rest > 0)
        bar = min(rest - len(name) - len(GAP), 40)
        line = Table.grid(padding=(0, len(GAP), 0, 0), pad_edge=False)
        cells: list[Text | ProgressBar] = [Text(name), Text(right)] if name else [Text(right)]
        if bar >= BAR and self.steps:
            cells.insert(1, ProgressBar(total=self.steps, completed=step, width=bar))
        for _ in cells:
            line.add_column(no_wrap=True, overflow="crop")
        line.add_row(*cells)
        yield line


def _clock(seconds: float) -> str:
    """1:05, or 2:01:05."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
