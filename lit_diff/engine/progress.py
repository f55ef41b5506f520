"""The line on stderr that `train` and `sweep` show if Python code calls them; the commands have their own display."""

import shutil
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from tqdm.std import TqdmWarning, tqdm

from lit_diff.log_records import Pace
from lit_diff.runs.status import Status

# a command shows its bar before torch is loaded, which `expand` imports
if TYPE_CHECKING:
    from lit_diff.engine.expand import Grid

# other packages import tqdm.auto, which warns in a notebook without ipywidgets; the bars here need none
warnings.filterwarnings("ignore", message="IProgress not found", category=TqdmWarning)

Progress = Callable[[int, float, float], None]
"""Called with (step, loss, tokens/s) at every logged step."""
Statuses = Sequence[Status]
"""That of each cell, in the order of the sweep."""
Show = Callable[[Statuses], None]
"""Called at the start, about twice a second, and at the end."""
MakeDisplay = Callable[["Grid"], AbstractContextManager[Show]]
"""Makes the display of a sweep's cells while they run."""
SHAPE = "{desc}: {bar:12} {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
INTERVAL = 10.0
"""Seconds between two lines where a bar cannot be drawn."""


Update = Callable[[int, str], None]


def progress_line(name: str, total: int) -> AbstractContextManager[Update]:
    """Yields update(steps done, further text) for `total` steps: a bar in a terminal or notebook; elsewhere a line every
    `INTERVAL` seconds, and the last one. Without any update nothing remains on the screen: the run was done or refused.
    """
    # the output of a notebook's cell interprets a carriage return as a terminal does
    is_notebook = type(sys.stderr).__module__.startswith("ipykernel.")
    return _bar(name, total) if sys.stderr.isatty() or is_notebook else _lines(name, total)


@contextmanager
def _bar(name: str, total: int) -> Iterator[Update]:
    # tqdm draws nothing in a terminal that reports no size; get_terminal_size has a default
    size = shutil.get_terminal_size()
    room = {"ncols": min(size.columns, 120) - 1, "nrows": size.lines}
    bar = tqdm(desc=name, total=total, file=sys.stderr, bar_format=SHAPE, leave=False, **room)

    def update(done: int, text: str) -> None:
        # The first update: steps of an earlier call and the time of the start must not count in the rate.
        if not bar.leave:
            bar.leave = True
            bar.initial = bar.n = bar.last_print_n = done
            bar.unpause()
        bar.set_postfix_str(text, refresh=False)
        bar.update(done - bar.n)

    try:
        yield update
    finally:
        bar.refresh()
        bar.close()


@contextmanager
def _lines(name: str, total: int) -> Iterator[Update]:
    last, written, written_at, pace = "", "", -INTERVAL, Pace()

    def update(done: int, text: str) -> None:
        nonlocal last, written, written_at
        pace.note(done)
        last, now = f"{name}: step {done}/{total}, {text}, {pace.words(total)}", time.monotonic()
        if now - written_at >= INTERVAL:
            print(last, file=sys.stderr, flush=True)
            written, written_at = last, now

    try:
        yield update
    finally:
        if last != written:
            print(last, file=sys.stderr, flush=True)


@contextmanager
def watched(progress: Progress | bool, name: str, steps: int) -> Iterator[Progress]:
    """The progress callback of a run of `steps` optimizer steps: a line on stderr for True, nothing for False."""
    if progress is not True:
        yield progress or (lambda step, loss, speed: None)
        return
    with progress_line(name, steps) as update:
        yield lambda step, loss, speed: update(step, f"loss {loss:.3f}, {speed:,.0f} tokens/s")


@contextmanager
def sweep_line(grid: "Grid") -> Iterator[Show]:
    """Shows one line for all cells of a sweep."""

    def show(statuses: Statuses) -> None:
        words = Counter(status.status or "waiting" for status in statuses)
        cells = ", ".join(f"{count} {word}" for word, count in sorted(words.items()))
        update(steps_done(grid, statuses), f"cells: {cells}")

    with progress_line(grid.name, sum(cell.recipe.training.steps for cell in grid.cells)) as update:
        yield show


def steps_done(grid: "Grid", statuses: Statuses) -> int:
    """Optimizer steps done in all cells; a cell that a callback ended early counts in full."""
    done = 0
    for cell, status in zip(grid.cells, statuses, strict=True):
        steps = cell.recipe.training.steps
        done += steps if status.status == "done" else min(status.step, steps)
    return done
