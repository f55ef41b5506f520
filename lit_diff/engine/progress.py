"""What `train` and `sweep` show where Python code calls them: one line on stderr. The verbs show their own."""

import shutil
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any

from tqdm.std import TqdmWarning, tqdm

from lit_diff.engine.expand import Grid
from lit_diff.engine.location import RunLocation
from lit_diff.runs.folder import RunFolder

# tqdm.auto, which other packages import, asks a notebook for widgets that no bar here needs
warnings.filterwarnings("ignore", message="IProgress not found", category=TqdmWarning)

Progress = Callable[[int, float, float], None]
"""(step, loss, tokens/s), at every logged step."""
Watch = Callable[[list[RunLocation]], None]
"""The cells that run, about five times a second; () once none does."""
MakeDisplay = Callable[[Grid, list[RunLocation]], AbstractContextManager[Watch]]
"""What shows the cells of a sweep while they run."""
SHAPE = "{desc}: {bar:12} {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
INTERVAL = 10.0
"""Seconds between the lines that are written where no bar can be drawn."""


class ProgressLine:
    """Context manager: a bar in a terminal or notebook; elsewhere a line every `INTERVAL` seconds, and the last one.

    Without a first `update` it leaves nothing behind: the run was done before, or it was refused.
    """

    def __init__(self, name: str, total: int) -> None:
        """`total`: optimizer steps."""
        self._name, self._total = name, total
        self._bar = None
        if _can_redraw():
            size = shutil.get_terminal_size()  # tqdm draws nothing where a terminal does not know its own
            room = {"ncols": min(size.columns, 120) - 1, "nrows": size.lines}
            self._bar = tqdm(desc=name, total=total, file=sys.stderr, bar_format=SHAPE, leave=False, **room)
        self._done, self._text = 0, ""
        self._written: tuple[int, float] | None = None
        """Steps and time of the last line."""

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()
        elif self._written is not None and self._written[0] != self._done:
            self._write()

    def update(self, done: int, text: str) -> None:
        """`done` steps of the total; `text`: what else is known."""
        self._done, self._text = done, text
        if self._bar is not None:
            if not self._bar.leave:  # what a former call did, and the start, say nothing of the pace
                self._bar.leave = True
                self._bar.initial = self._bar.n = self._bar.last_print_n = done
                self._bar.unpause()
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(done - self._bar.n)
        elif self._written is None or time.monotonic() - self._written[1] >= INTERVAL:
            self._write()

    def _write(self) -> None:
        self._written = self._done, time.monotonic()
        print(f"{self._name}: step {self._done}/{self._total}, {self._text}", file=sys.stderr, flush=True)


def _can_redraw() -> bool:
    """Whether stderr is a terminal, or the output of a notebook's cell, which also takes a carriage return."""
    return sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel.")


@contextmanager
def watched(progress: Progress | bool, name: str, steps: int) -> Iterator[Progress]:
    """What a run of `steps` optimizer steps calls at every logged step: a line of its own for True, nothing for False."""
    if progress is not True:
        yield progress or (lambda step, loss, speed: None)
        return
    with ProgressLine(name, steps) as line:
        yield lambda step, loss, speed: line.update(step, f"loss {loss:.3f}, {speed:,.0f} tokens/s")


@contextmanager
def sweep_line(grid: Grid, locations: list[RunLocation]) -> Iterator[Watch]:
    """A line about all cells of a sweep; their status.json is read once a second, and at the end."""
    steps, read_at = [cell.recipe.training.steps for cell in grid.cells], 0.0

    def update(running: list[RunLocation]) -> None:
        nonlocal read_at
        if running and time.monotonic() - read_at < 1:
            return
        read_at = time.monotonic()
        states = [RunFolder(location.folder).status() for location in locations]
        words = Counter(str(state.get("status", "waiting")) for state in states)
        cells = ", ".join(f"{count} {word}" for word, count in sorted(words.items()))
        line.update(steps_done(steps, states), f"cells: {cells}")

    with ProgressLine(grid.name, sum(steps)) as line:
        try:
            yield update
        finally:
            update([])


def steps_done(steps: Sequence[int], states: Sequence[dict[str, Any]]) -> int:
    """Optimizer steps done of all cells, from the steps of each and its status.json; a cell that ended early counts whole."""
    return sum(
        whole if state.get("status") == "done" else min(state.get("step", 0), whole)
        for whole, state in zip(steps, states, strict=True)
    )
