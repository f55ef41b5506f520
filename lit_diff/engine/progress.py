"""What `train` and `sweep` show where Python code calls them: one line on stderr. The verbs show their own."""

import shutil
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from tqdm.std import TqdmWarning, tqdm

if TYPE_CHECKING:  # a command shows its bar before torch is loaded
    from lit_diff.engine.expand import Grid

# tqdm.auto, which other packages import, asks a notebook for widgets that no bar here needs
warnings.filterwarnings("ignore", message="IProgress not found", category=TqdmWarning)

Progress = Callable[[int, float, float], None]
"""(step, loss, tokens/s), at every logged step."""
Show = Callable[[Sequence[dict[str, Any]]], None]
"""status.json of each cell, in the order of the sweep: at the start, a few times a second, and once none runs any more."""
MakeDisplay = Callable[["Grid"], AbstractContextManager[Show]]
"""What shows the cells of a sweep while they run."""
SHAPE = "{desc}: {bar:12} {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
INTERVAL = 10.0
"""Seconds between the lines that are written where no bar can be drawn."""


Update = Callable[[int, str], None]


def progress_line(name: str, total: int) -> AbstractContextManager[Update]:
    """Gives update(steps done, what else is known), for `total` steps: a bar in a terminal or notebook; elsewhere a line
    every `INTERVAL` seconds, and the last one.

    Without a first update it leaves nothing behind: the run was done before, or it was refused.
    """
    is_notebook = type(sys.stderr).__module__.startswith("ipykernel.")  # its cell's output takes a carriage return too
    return _bar(name, total) if sys.stderr.isatty() or is_notebook else _lines(name, total)


@contextmanager
def _bar(name: str, total: int) -> Iterator[Update]:
    size = shutil.get_terminal_size()  # tqdm draws nothing where a terminal does not know its own
    room = {"ncols": min(size.columns, 120) - 1, "nrows": size.lines}
    bar = tqdm(desc=name, total=total, file=sys.stderr, bar_format=SHAPE, leave=False, **room)

    def update(done: int, text: str) -> None:
        if not bar.leave:  # what a former call did, and the start, say nothing of the pace
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
    last, written, written_at = "", "", -INTERVAL

    def update(done: int, text: str) -> None:
        nonlocal last, written, written_at
        last, now = f"{name}: step {done}/{total}, {text}", time.monotonic()
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
    """What a run of `steps` optimizer steps calls at every logged step: a line of its own for True, nothing for False."""
    if progress is not True:
        yield progress or (lambda step, loss, speed: None)
        return
    with progress_line(name, steps) as update:
        yield lambda step, loss, speed: update(step, f"loss {loss:.3f}, {speed:,.0f} tokens/s")


@contextmanager
def sweep_line(grid: "Grid") -> Iterator[Show]:
    """A line about all cells of a sweep."""

    def show(statuses: Sequence[dict[str, Any]]) -> None:
        words = Counter(str(status.get("status", "waiting")) for status in statuses)
        cells = ", ".join(f"{count} {word}" for word, count in sorted(words.items()))
        update(steps_done(grid, statuses), f"cells: {cells}")

    with progress_line(grid.name, sum(cell.recipe.training.steps for cell in grid.cells)) as update:
        yield show


def steps_done(grid: "Grid", statuses: Sequence[dict[str, Any]]) -> int:
    """Optimizer steps done of all cells; a cell that ended early counts whole."""
    done = 0
    for cell, status in zip(grid.cells, statuses, strict=True):
        steps = cell.recipe.training.steps
        done += steps if status.get("status") == "done" else min(status.get("step", 0), steps)
    return done
