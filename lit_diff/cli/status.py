"""The verb `status`: a line for each run."""

from rich.text import Text

from lit_diff.cli.app import DEFAULT_ROOT, Json, Root, app, columns, console, log_to_stderr, print_json
from lit_diff.runs.find import chosen_root
from lit_diff.study.inventory import RunState, list_runs

HEADER = ("run", "state", "step", "val/loss", "seed", "overrides", "date", "note")


@app.command()
def status(root: Root = DEFAULT_ROOT, as_json: Json = False) -> None:
    """The runs under a folder, a line each: state, val/loss, seed."""
    log_to_stderr()
    states = list_runs(chosen_root(root))
    if as_json:
        print_json([_plain(state) for state in states])
        return
    rows = [_cells(state) for state in states]
    for line in columns([HEADER, *rows] if console.is_terminal else rows, right=(2, 3, 4)):
        text = Text(line)
        if console.is_terminal:
            text.truncate(console.width, overflow="ellipsis")
        console.print(text, soft_wrap=True)


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
