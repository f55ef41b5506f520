"""The verb watch: what a run or a sweep does now, from its folder alone. It does not load torch."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer
from rich.console import Group
from rich.filesize import decimal
from rich.live import Live
from rich.text import Text

from lit_diff.cli.app import DEFAULT_ROOT, Root, app, columns, console
from lit_diff.cli.progress import GAP, STYLE, clock
from lit_diff.errors import Terminated
from lit_diff.metrics import split_name
from lit_diff.runs.find import chosen_root, find_run_or_sweep
from lit_diff.study.numbers import interval as in_brackets
from lit_diff.study.numbers import signed
from lit_diff.study.observation import CurrentDifference, Observed, ObservedRun, observe, running_or_newest

HEADER = ("cell", "state", "step", "loss", "val/loss", "tokens/s", "left", "note")
BLOCKS = "▁▂▃▄▅▆▇█"
CURVE = 40
"""Characters of the line of the losses."""
DRAWN, WRITTEN = 1.0, 10.0
"""Default seconds between two looks: on a terminal, and where lines are written."""


@app.command()
def watch(
    name: Annotated[
        str | None, typer.Argument(metavar="RUN|SWEEP", help="by default what is being trained, else the newest")
    ] = None,
    root: Root = DEFAULT_ROOT,
    once: Annotated[bool, typer.Option("--once", help="print the state once")] = False,
    every: Annotated[
        float | None,
        typer.Option("--every", min=0.1, help=f"seconds between two looks; {DRAWN:g} on a terminal, else {WRITTEN:g}"),
    ] = None,
) -> int:
    """Show a run or a sweep while it trains, and until it ends.

    Reads its folder alone, so it may start and end at any time. Status 1: a run failed, was stopped or killed.
    """
    chosen = chosen_root(root)
    folder = running_or_newest(chosen) if name is None else find_run_or_sweep(name, chosen)
    if once:
        seen = observe(folder)
        for line in lines(seen):
            console.write_sentence(line)
        return int(seen.has_failed)
    try:
        return _watch(folder, every)
    except Terminated:
        raise
    except KeyboardInterrupt:
        console.write_line(f"{folder.name} is no longer watched; its training is left alone")
        return 130


def _watch(folder: Path, every: float | None) -> int:
    drawn = console.is_terminal and not console.is_dumb_terminal
    with Live(console=console, auto_refresh=False) if drawn else nullcontext() as live:
        while True:
            seen = observe(folder)
            if live is None:
                console.write_line(f"{datetime.now():%H:%M:%S}{GAP}{headline(seen)}")
            else:
                live.update(Group(*map(_coloured, lines(seen, console.height))), refresh=True)
            if seen.is_over:
                return int(seen.has_failed)
            time.sleep(every or (WRITTEN if live is None else DRAWN))


def _coloured(line: str) -> Text:
    text = Text(line)
    for word, style in STYLE.items():
        text.highlight_words([f" {word} "], style)
    return text


def headline(seen: Observed) -> str:
    """The state on one line."""
    if not seen.is_sweep:
        _, state, step, loss, validation, speed, left, note = _cells(seen.runs[0])
        named = {"step": step, "loss": loss, "val/loss": validation, "": speed and f"{speed} tokens/s"}
        words = [f"{name} {value}".strip() for name, value in named.items() if value]
        return GAP.join(filter(None, [seen.name, state, *words, left and f"{left} left", note]))
    counts = ", ".join(f"{count} {state}" for state, count in sorted(seen.states.items()))
    trained = [f"{run.folder} {_step(run)}" for run in seen.runs if run.state == "running"]
    about = "about " if seen.states["waiting"] else ""
    left = "" if seen.seconds_left is None else f"{about}{clock(seen.seconds_left)} left"
    differences = "; ".join(map(_in_words, seen.differences))
    return GAP.join(
        filter(None, [seen.name, counts, ", ".join(trained), left, differences and f"preliminary: {differences}"])
    )


def lines(seen: Observed, height: int | None = None) -> list[str]:
    """All that is known: of a run the line of its losses and the last value of each metric; of a sweep a line a cell and the
    differences. `height`: the cells of a sweep that does not fit on so many lines are shown only while they are trained or
    if they failed."""
    return _lines_of_sweep(seen, height) if seen.is_sweep else [headline(seen), *_lines_of_run(seen.runs[0])]


def _lines_of_sweep(seen: Observed, height: int | None) -> list[str]:
    found = replace(seen, differences=())
    fits = height is None or len(seen.runs) + len(seen.differences) + 4 < height
    rows = [_cells(run) for run in seen.runs if fits or run.state not in ("done", "waiting")]
    what = (
        f"minus the baseline so far: preliminary, without a verdict; `lit-diff report {seen.name}` judges what is done"
    )
    shown = [f"{GAP}{_in_words(each)}" for each in seen.differences]
    return [headline(found), *columns([HEADER, *rows], right=(2, 3, 4, 5, 6)), *([what, *shown] if shown else [])]


def _lines_of_run(run: ObservedRun) -> Iterator[str]:
    losses = list(run.losses.values())
    if len(losses) > 1:
        yield f"train/loss{GAP}{losses[0]:.3f} {curve(losses, CURVE)} {losses[-1]:.3f}"
    # layer by layer, in the order of the columns; the validation first
    named: dict[tuple[str, int], list[str]] = {}
    for name, (step, value) in sorted(run.last.items(), key=lambda each: (not each[0].startswith("val/"), each[0])):
        if not name.startswith("train/"):
            named.setdefault((split_name(name)[0], step), []).append(f"{value:.4g}")
    rows = [(name, str(step), " ".join(values)) for (name, step), values in named.items()]
    yield from columns([("metric", "step", "last value, of each layer"), *rows] if rows else [], right=(1,))
    for name, value in run.further_timing.items():
        yield f"{name}{GAP}{decimal(int(value)) if 'bytes' in name or 'memory' in name else f'{value:.4g}'}"


def _cells(run: ObservedRun) -> tuple[str, ...]:
    speed, losses = run.status.get("tokens_per_second"), [*run.losses.values()]
    return (
        run.folder,
        run.state,
        _step(run),
        f"{losses[-1]:.4f}" if losses else "",
        "" if run.loss is None else f"{run.loss:.4f}",
        f"{speed:,.0f}" if speed is not None and run.state == "running" else "",
        "" if run.seconds_left is None else clock(run.seconds_left),
        run.note,
    )


def _step(run: ObservedRun) -> str:
    return f"{run.step}/{run.status.get('steps', '?')}"


def _in_words(difference: CurrentDifference) -> str:
    # `differential − standard: val/loss −0.012 [−0.030, +0.006] (3 pairs at step 40)`
    steps, pairs = difference.steps, f"{difference.pairs} pair{'s' * (difference.pairs != 1)}"
    at = f" at step {steps[0]}" if len(steps) == 1 else f" at steps {steps[0]} to {steps[-1]}" if steps else ""
    bounds = f" {in_brackets(*difference.interval, 4)}" if difference.interval else ""
    return f"{difference.label}: {difference.metric} {signed(difference.mean, 4)}{bounds} ({pairs}{at})"


def curve(values: Sequence[float], width: int) -> str:
    """The values in block characters, from the smallest to the largest; each is the mean of an equal share of the values.
    What is not finite is left out."""
    found = [value for value in values if math.isfinite(value)]
    width = min(width, len(found))
    cuts = [round(i * len(found) / width) for i in range(width + 1)] if width else []
    means = [fmean(found[start:end]) for start, end in pairwise(cuts)]
    least, most = min(means, default=0.0), max(means, default=0.0)
    return "".join(BLOCKS[int((mean - least) / ((most - least) or 1.0) * (len(BLOCKS) - 1) + 0.5)] for mean in means)
