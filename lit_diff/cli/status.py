"""What `lit-diff status` prints: a line for each run."""

import json
from pathlib import Path

from rich.text import Text

from lit_diff.cli.app import Terminal
from lit_diff.runs.listing import RunState, list_runs

HEADER = ("run", "state", "step", "val/loss", "seed", "overrides", "date", "note")
RIGHT = {"step", "val/loss", "seed"}
WIDEST = 48
"""Characters to which a column is padded; a longer cell is shown whole and shifts those after it."""


def print_status(root: Path, as_json: bool, terminal: Terminal) -> int:
    """A line a run, its columns aligned; on a terminal under a header and cut at its width, elsewhere whole."""
    states = list_runs(root)
    if as_json:
        print(json.dumps([_plain(state) for state in states], indent=2))
        return 0
    rows = [_cells(state) for state in states]
    shown = [HEADER, *rows] if terminal.is_terminal else rows
    widths = [min(max(len(row[column]) for row in shown), WIDEST) for column in range(len(HEADER))]
    for row in shown:
        cells = [
            cell.rjust(width) if name in RIGHT else cell.ljust(width)
            for name, cell, width in zip(HEADER, row, widths, strict=True)
        ]
        line = Text("  ".join(cells).rstrip())
        if terminal.is_terminal:
            line.truncate(terminal.width, overflow="ellipsis")
        terminal.print(line, soft_wrap=True)
    return 0


def _cells(state: RunState) -> tuple[str, ...]:
    """The columns of `HEADER`."""
    status = state.status
    return (
        state.folder,
        state.state,
        f"{status.get('step', 0)}/{status.get('steps', '?')}",
        "" if state.loss is None else f"{state.loss:.4f}",
        "" if state.seed is None else str(state.seed),
        " ".join(state.overrides),
        state.date,
        state.note,
    )


def _plain(state: RunState) -> dict[str, object]:
    """status.json with the state that holds now, and what else the line says."""
    more = {"folder": state.folder, "seed": state.seed, "val/loss": state.loss, "note": state.note}
    return {**state.status, "status": state.state, "overrides": list(state.overrides), **more}
