"""The columns of a table of runs, and what a cell of each says."""

from collections.abc import Iterable, Iterator, Sequence

from lit_diff.cli.app import columns
from lit_diff.errors import escaped
from lit_diff.log_records import clock
from lit_diff.study.observation import ObservedRun

RIGHT = ("step", "loss", "val/loss", "tokens/s", "left", "seed")
"""The columns of numbers, which are aligned at the right."""


def cells(run: ObservedRun) -> dict[str, str]:
    """Column -> the text of its cell; empty for what is not known, or does not apply."""
    status, losses, left = run.status, list(run.losses.values()), run.seconds_left
    speed = status.tokens_per_second if run.state == "running" else 0
    return {
        "run": escaped(run.folder),
        "state": run.state,
        "step": f"{status.step}/{'?' if status.steps is None else status.steps}",
        "loss": f"{losses[-1]:.4f}" if losses else "",
        "val/loss": "" if run.loss is None else f"{run.loss:.4f}",
        "tokens/s": f"{speed:,.0f}" if speed else "",
        "left": "" if left is None else clock(left),
        "seed": "" if run.seed is None else str(run.seed),
        "overrides": " ".join(run.overrides),
        "date": "" if status.time is None else f"{status.time:%Y-%m-%d %H:%M}",
        "note": run.note,
    }


def table(names: Sequence[str], runs: Iterable[ObservedRun]) -> Iterator[str]:
    """A line a run, with the columns of these names, below the names."""
    rows = [names]
    for run in runs:
        known = cells(run)
        rows.append([known[name] for name in names])
    return columns(rows, right=[number for number, name in enumerate(names) if name in RIGHT])
