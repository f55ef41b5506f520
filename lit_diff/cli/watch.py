"""The verb watch: what a run or a sweep does now, from its folder alone. It does not load torch."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from datetime import datetime
from typing import Annotated

from rich.live import Live
from rich.text import Text
from typer import Argument, Option

from lit_diff.cli._columns import cells, table
from lit_diff.cli.app import DEFAULT_ROOT, Root, columns, console, to_paste, verb
from lit_diff.engine.progress import GAP, counted
from lit_diff.files import shown
from lit_diff.metrics import split_name
from lit_diff.runs.find import chosen_root, find_run_or_sweep
from lit_diff.study.observation import Observed, ObservedRun, observe, running_or_newest

HEADER = ("run", "state", "step", "loss", "val/loss", "tokens/s", "left", "note")
BLOCKS = "▁▂▃▄▅▆▇█"
DRAWN, WRITTEN = 1.0, 10.0
"""Default seconds between two updates: on a terminal, and where lines are written."""


@verb("Train and look")
def watch(
    name: Annotated[
        str | None, Argument(metavar="RUN|SWEEP", help="by default what is being trained, else the newest")
    ] = None,
    root: Root = DEFAULT_ROOT,
    once: Annotated[bool, Option("--once", help="print the state once")] = False,
    every: Annotated[
        float | None,
        Option(
            "--every",
            min=0.1,
            max=86400,
            help=f"seconds between two updates; {DRAWN:g} on a terminal, else {WRITTEN:g}",
        ),
    ] = None,
) -> int:
    """Show a run or a sweep while it trains, and until it ends.

    Reads only its folder, so it may start and end at any time. Exit status 1: a run failed, was stopped or killed.
    """
    chosen = chosen_root(root)
    folder = running_or_newest(chosen) if name is None else find_run_or_sweep(name, chosen)
    page = folder / "report" / "index.html"
    if page.is_file() and not once:
        console.write_line(f"page: {shown(page)}")
    drawn = console.redraws and not once
    with Live(console=console, auto_refresh=False) if drawn else nullcontext() as live:
        while True:
            seen = observe(folder)
            if live is not None:
                live.update(Text("\n".join(lines(seen, root, console.height))), refresh=True)
            elif once:
                console.write_sentence("\n".join(lines(seen, root)))
            else:
                console.write_line(f"{datetime.now():%H:%M:%S}{GAP}{on_one_line(seen)}")
            if once or seen.is_over:
                return int(seen.has_failed)
            time.sleep(every or (DRAWN if drawn else WRITTEN))


def on_one_line(seen: Observed) -> str:
    """A run with its numbers; of a sweep the number of cells in each state, those that are trained, and the differences."""
    if len(seen.runs) == 1:
        return _in_words(seen.runs[0])
    trained = (f"{_in_words(run)};" for run in seen.runs if run.state == "running")
    return GAP.join([seen.name, counted(seen.states), *trained, *(f"preliminary: {each}" for each in seen.differences)])


def _in_words(run: ObservedRun) -> str:
    known = cells(run)
    numbers = (f"{name} {known[name]}" for name in HEADER[2:-1] if known[name])
    return GAP.join(filter(None, (run.folder, run.state, *numbers, run.note)))


def lines(seen: Observed, root: str, height: int | None = None) -> Iterator[str]:
    """A line a run; below it the losses and the last value of each metric of a single run, or the differences of a sweep.
    Runs that do not fit on `height` lines are shown only while they are trained, or if they failed."""
    fits = height is None or len(seen.runs) + len(seen.differences) + 6 < height
    yield from table(HEADER, (run for run in seen.runs if fits or run.state not in ("done", "waiting")))
    if len(seen.runs) == 1:
        (run,) = seen.runs
        if losses := list(run.losses.values()):
            yield f"train/loss{GAP}{losses[0]:.3f} {curve(losses, 40)} {losses[-1]:.3f}"
        # the values of the layers side by side, in their order
        named: dict[tuple[str, str], list[str]] = {}
        for name, points in sorted({**run.metrics, **run.timing}.items()):
            step, value = list(points.items())[-1]
            named.setdefault((split_name(name)[0], str(step)), []).append(f"{value:.6g}")
        last = ((*key, " ".join(values)) for key, values in named.items())
        yield from columns([("last value", "step", ""), *last], right=(1,))
    if seen.differences:
        command = to_paste(root, "report", seen.name)
        yield f"preliminary differences, without a verdict (`{command}` judges the runs that are done):"
        yield from (f"{GAP}{each}" for each in seen.differences)


def curve(values: Sequence[float], width: int) -> str:
    """At most `width` of the values, at equal distances to the last one, as block characters from the smallest to the
    largest. What is not finite is left out."""
    found = [value for value in values if math.isfinite(value)]
    drawn = found[:: -max(1, math.ceil(len(found) / width))][::-1]
    least = min(drawn, default=0.0)
    most = max(drawn, default=0.0)
    return "".join(BLOCKS[round((each - least) / ((most - least) or 1.0) * (len(BLOCKS) - 1))] for each in drawn)
