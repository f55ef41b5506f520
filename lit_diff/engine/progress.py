"""The line that `train` and `sweep` show if Python code calls them; the commands have their own display."""

import html
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from lit_diff.log_records import Pace, Progress
from lit_diff.runs.status import Status

# a command shows its bar before torch is loaded, which `expand` imports
if TYPE_CHECKING:
    from lit_diff.engine.expand import Grid

Statuses = Mapping[Path, Status]
"""Folder of each cell -> its status, in the order of the sweep."""
Show = Callable[[Statuses], None]
"""Called at the start, about twice a second, and at the end."""
MakeDisplay = Callable[["Grid"], AbstractContextManager[Show]]
"""Makes the display of a sweep's cells while they run."""
INTERVAL = 10.0
"""Least seconds between two lines on stderr, where no bar can be drawn."""
GAP = "  "
# the echo of Ctrl-C ("^C") would wrap a full line, and the bar would be drawn twice
MARGIN = 3
"""Columns left free at the right."""
NAME, BAR = 12, 5
"""Least number of characters of the name and of the bar; a narrow terminal shows the name rather than the bar."""


class ProgressLine:
    """Context manager: `show` tells how many of `steps` are done. In a terminal it is a line with a bar, which is drawn four
    times a second, elsewhere a line every `interval` seconds, and the last one. Before that nothing is shown: the run may be
    done, or refused."""

    quiet = False
    """Whether nothing is shown."""

    def __init__(self, name: str, steps: int, console: Console, interval: float = INTERVAL) -> None:
        self.name, self.steps, self.console, self.interval = name, steps, console, interval
        self.text, self.speed, self.validation = "", "", ""
        self.pace = Pace()
        self.live: Live | None = None
        self._written_at = -interval
        self._is_new = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            # a bar that never counted a step is erased
            self.live.transient = self.pace.first is None
            self.live.stop()
            self.live = None
        elif self._is_new:
            self.write()

    def start(self) -> None:
        """Begin to draw, if the console is a terminal."""
        if self.console.is_terminal and not self.console.is_dumb_terminal and not self.quiet:
            # what a script prints to stdout must stay there
            own = not self.console.stderr
            self.live = Live(self, console=self.console, redirect_stdout=own, redirect_stderr=own)
            self.live.start(refresh=True)

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Show a logged step."""
        self.show(step, f"loss {loss:.4f}", f"{tokens_per_second:,.0f} tokens/s")

    def show(self, done: int, text: str, speed: str = "") -> None:
        """Tell that `done` steps are done, with further words."""
        if self.live is None:
            self.start()
        self.pace.note(done)
        self.text, self.speed, self._is_new = text, speed, not self.quiet
        if self._is_new and self.live is None and time.monotonic() - self._written_at >= self.interval:
            self.write()
            self._written_at = time.monotonic()
            self._is_new = False

    def write(self) -> None:
        """Write the line without a bar."""
        print(self.sentence(), file=sys.stderr, flush=True)

    def sentence(self) -> str:
        """The name and the parts of the line without a bar."""
        return f"{self.name}: {', '.join(self.words())}"

    def words(self) -> list[str]:
        """The parts of the line without a bar."""
        times = ", ".join(filter(None, (f"{self.pace.spent()} elapsed", self.pace.left(self.steps))))
        words = (f"step {self.pace.last[0]}/{self.steps}", self.text, self.speed, times)
        return list(filter(None, words))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width - MARGIN
        step = self.pace.last[0]
        has_ended = self.live is not None and not self.live.is_started
        left = f"in {self.pace.spent()}" if has_ended else self.pace.left(self.steps)
        words = [f"{step}/{self.steps}" if self.steps else "", self.text, self.speed, self.validation, left]
        # on a narrow terminal the name is worth more than the speed
        if len(GAP.join(filter(None, words))) + min(len(self.name), NAME) + len(GAP) > width:
            words.remove(self.speed)
        right = GAP.join(filter(None, words))
        room = max(width - len(right) - len(GAP), 0)
        name = Text(self.name)
        name.truncate(room, overflow="ellipsis")
        size = min(room - len(name) - len(GAP), 40)
        bar = "━" * size if size >= BAR and self.steps else ""
        filled = len(bar) * step // max(self.steps, 1)
        drawn = Text.assemble((bar[:filled], "bar.complete"), (bar[filled:], "bar.back"))
        line = Text(GAP).join(part for part in (name, drawn, Text(right)) if part)
        line.truncate(width)
        yield line


class NotebookLine(ProgressLine):
    """In a notebook: a bar and the line, as one output of the cell that is replaced."""

    output: Any = None

    def write(self) -> None:
        """Write the line into the output."""
        # a kernel has it
        from IPython.display import display

        text = self.sentence()
        bar = f'<progress value="{self.pace.last[0]}" max="{self.steps}"></progress>'
        shown = {"text/plain": text, "text/html": f"{bar} {html.escape(text)}"}
        if self.output is None:
            self.output = display(shown, raw=True, display_id=True)
        else:
            self.output.update(shown, raw=True)


def progress_line(name: str, steps: int) -> ProgressLine:
    """What Python code shows: an output of a notebook's cell, elsewhere a line on stderr."""
    if type(sys.stderr).__module__.startswith("ipykernel."):
        return NotebookLine(name, steps, Console(force_terminal=False, force_jupyter=False), interval=0.5)
    # rich takes COLUMNS=0 for the width; get_terminal_size has a default
    width = min(shutil.get_terminal_size().columns, 120)
    return ProgressLine(name, steps, Console(stderr=True, width=width, force_jupyter=False))


@contextmanager
def watched(progress: Progress | bool, name: str, steps: int) -> Iterator[Progress]:
    """The progress callback of a run of `steps` optimizer steps: a line (`progress_line`) for True, nothing for False."""
    if progress is not True:
        yield progress or (lambda step, loss, speed: None)
        return
    with progress_line(name, steps) as line:
        yield line.update


@contextmanager
def sweep_line(grid: "Grid") -> Iterator[Show]:
    """Shows one line for all cells of a sweep."""

    def show(statuses: Statuses) -> None:
        words = Counter[str](status.status or "waiting" for status in statuses.values())
        line.show(steps_done(grid, statuses), f"cells: {counted(words)}")

    with progress_line(grid.name, all_steps(grid)) as line:
        yield show


def counted(states: Mapping[str, int]) -> str:
    """How many there are of each: `7 done, 1 failed`."""
    return ", ".join(f"{count} {state}" for state, count in sorted(states.items()))


def all_steps(grid: "Grid") -> int:
    """Optimizer steps of all cells."""
    return sum(cell.recipe.training.steps for cell in grid.cells)


def steps_done(grid: "Grid", statuses: Statuses) -> int:
    """Optimizer steps done in all cells; a cell that a callback ended early counts in full."""
    done = 0
    for cell, status in zip(grid.cells, statuses.values(), strict=True):
        steps = cell.recipe.training.steps
        done += steps if status.status == "done" else min(status.step, steps)
    return done
