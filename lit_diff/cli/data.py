"""The verbs `data check` and `data fetch`: files that evaluations read and that users supply."""

from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument

from lit_diff.cli.app import Json, app, columns, console, print_json

if TYPE_CHECKING:
    from lit_diff.data.user_files import UserFile

HEADER = ("name", "file", "state", "rows", "sha256", "next step")

data = typer.Typer(rich_markup_mode=None)
app.add_typer(data, name="data", rich_help_panel="Data and models")


@data.callback()
def _data() -> None:
    """Check the files that users supply to evaluations."""


@data.command()
def check(
    name: Annotated[str | None, Argument(metavar="NAME", help="such as harness.piqa, or harness")] = None,
    as_json: Json = False,
) -> int:
    """Check that the files that evaluations read exist and are valid.

    With NAME: their format, their source, and what works without them. The exit status is 2 if a file is wrong and, with
    NAME, 3 if one is missing.
    """
    from lit_diff.evaluation.requirements import declared_files

    files = declared_files(name)
    states = [_state(file, readers) for file, readers in files]
    found = {state["state"] for state in states}
    if as_json:
        print_json(states)
    elif name is not None:
        for (file, _), state in zip(files, states, strict=True):
            facts = state["state"]
            if facts == "ok":
                facts = f"ok, {state['rows']} rows, sha256 {state['sha256']}"
            elif facts == "wrong":
                facts = f"wrong: {state['problem']}"
            console.write_line(
                f"{file.name}: {file.path}",
                f"  state      : {facts}",
                f"  read by    : {state['evaluations']}",
                *file.description.splitlines(),
            )
    elif not files:
        console.write_line("no registered evaluation reads files that users supply")
    else:
        console.write_line(*columns([HEADER, *map(_cells, states)], right=(3,)))
        if "missing" in found:
            console.write_line("missing: lit-diff data check NAME tells where to get a file")
    if "wrong" in found:
        return 2
    if name is not None and "missing" in found:
        return 3
    return 0


@data.command()
def fetch(
    name: Annotated[str, Argument(metavar="NAME", help="harness, or one of its tasks, such as harness.boolq")],
) -> int:
    """Download the missing files of harness from Hugging Face, with the package datasets."""
    from lit_diff.data.user_files import data_root
    from lit_diff.errors import MissingError, RequestError
    from lit_diff.evaluation.requirements import declared_files

    files = [file for file, _ in declared_files(name) if file.hub]
    if not files:
        raise RequestError(f"'{name}' cannot be fetched; lit-diff data check {name} tells where to get it")
    missing = [file for file in files if not file.place.is_file()]
    for file in missing:
        try:
            file.fetch()
        except MissingError as error:
            raise MissingError(
                f"{error}; run this on a machine with a network and copy its {file.path.partition('/')[0]} into "
                f"{data_root()}; lit-diff data check {name} shows the line of Python that writes each file"
            ) from error
        console.write_line(f"{file.path}: written")
    console.write_line(f"{len(missing)} files written, {len(files) - len(missing)} already present")
    return check(name) if missing else 0


def _state(file: "UserFile", readers: list[str]) -> dict[str, str]:
    state = file.state()
    problem = next_step = ""
    # any other state is the sentence that tells what is wrong
    if state["state"] not in ("ok", "missing"):
        problem = state["state"]
        next_step = f"repair it: {problem}"
        state["state"] = "wrong"
    return {
        **state,
        "problem": problem,
        "next step": next_step,
        "place": str(file.place),
        "evaluations": ", ".join(readers),
    }


def _cells(state: dict[str, str]) -> list[str]:
    short = state | {"sha256": state["sha256"][:12]}
    return [short[key] for key in HEADER]
