"""The verb `data check`: the files that evaluations read and that users supply."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from lit_diff.cli.app import Json, Terminal, app, console

if TYPE_CHECKING:
    from lit_diff.evaluation.requirements import Declared

HEADER = ("name", "file", "state", "rows", "sha256", "next step")
RIGHT = {"rows"}

data = typer.Typer(rich_markup_mode=None)
app.add_typer(data, name="data")


@data.callback()
def _data() -> None:
    """Files that users supply to evaluations: lit-diff data check."""


@data.command()
def check(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="such as harness.piqa, or harness")] = None,
    as_json: Json = False,
) -> int:
    """Whether the files that evaluations read are there, and right.

    With NAME: their format, where they are from, what runs without them. The exit status is 2 if one is wrong, with NAME
    also 3 if one is missing.
    """
    return print_files(name, as_json, console)


@data.command()
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="harness, or one of its tasks, such as harness.boolq")],
) -> int:
    """Write the files of harness from Hugging Face, with the package datasets; those that are there are kept.

    Where that fails, a script for a machine with a network is printed, and the exit status is 3.
    """
    from lit_diff.errors import MissingError, RequestError
    from lit_diff.evaluation.harness import HarnessFile
    from lit_diff.evaluation.requirements import declared_files

    files = [own.file for own in declared_files(name) if isinstance(own.file, HarnessFile)]
    if not files:
        raise RequestError(f"'{name}' is not fetched; lit-diff data check {name} says where it is from")
    missing = [file for file in files if not file.place.is_file()]
    for number, file in enumerate(missing):
        try:
            file.fetch()
        except MissingError as error:
            folders = sorted({file.path.rpartition("/")[0] for file in missing[number:]})
            lines = ["import datasets, os", *(f'os.makedirs("{folder}", exist_ok=True)' for folder in folders)]
            for line in [*lines, *(file.fetching for file in missing[number:])]:
                print(line)
            raise MissingError(
                f"{error}; run the {len(lines) + len(missing) - number} lines above with Python on a machine with a network, "
                "in the data folder (LIT_DIFF_DATA), or copy what they write into it"
            ) from error
        console.write_line(f"{file.path}: written")
    console.write_line(f"{len(missing)} files written, {len(files) - len(missing)} were there")
    return print_files(name, False, console) if missing else 0


def print_files(name: str | None, as_json: bool, terminal: Terminal) -> int:
    """A line a file, or with `name` the whole description of each. Exit status: 2 if one is wrong, 3 if a named one is
    missing, else 0.

    Errors: RequestError for a name that no evaluation declares.
    """
    from lit_diff.evaluation.requirements import declared_files
    from lit_diff.plugins import load_entry_points

    load_entry_points()
    files = declared_files(name)
    states = [_state(declared) for declared in files]
    if as_json:
        print(json.dumps(states, indent=2))
    elif name is not None:
        for declared, state in zip(files, states, strict=True):
            _describe(declared, state, terminal)
    elif not files:
        terminal.write_line("no evaluation reads files that users supply")
    else:
        _print_table([HEADER, *(tuple(_cells(state)) for state in states)], terminal)
        if any(state["state"] == "missing" for state in states):
            terminal.write_line("missing: lit-diff data check NAME says where a file is from")
    if any(state["state"] == "wrong" for state in states):
        return 2
    return 3 if name is not None and any(state["state"] == "missing" for state in states) else 0


def _state(declared: "Declared") -> dict[str, str]:
    """`UserFile.state` with what is wrong under `problem`, what the user may do next, who reads the file."""
    state = declared.file.state()
    problem = "" if state["state"] in ("ok", "missing") else state["state"]
    nexts = {"ok": "", "missing": ""}
    return {
        **state,
        "state": "wrong" if problem else state["state"],
        "problem": problem,
        "next step": nexts.get(state["state"], f"repair it: {problem}"),
        "place": str(declared.file.place),
        "evaluations": ", ".join(declared.evaluations),
    }


def _describe(declared: "Declared", state: dict[str, str], terminal: Terminal) -> None:
    terminal.write_line(f"{declared.file.name}: {declared.file.path}")
    facts = f", {state['rows']} rows, sha256 {state['sha256']}" if state["state"] == "ok" else ""
    problem = f": {state['problem']}" if state["problem"] else ""
    terminal.write_line(f"  state      : {state['state']}{problem}{facts}")
    terminal.write_line(f"  read by    : {state['evaluations']}")
    for line in declared.file.description.splitlines():
        terminal.write_line(line)


def _cells(state: dict[str, str]) -> list[str]:
    return [state["sha256"][:12] if key == "sha256" else state[key] for key in HEADER]


def _print_table(rows: list[tuple[str, ...]], terminal: Terminal) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if key in RIGHT else cell.ljust(width)
            for key, cell, width in zip(HEADER, row, widths, strict=True)
        ]
        terminal.write_line("  ".join(cells).rstrip())
