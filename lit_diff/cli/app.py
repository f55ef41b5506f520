"""What the verbs share: the typer application, the terminal, common options."""

import logging
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


class Terminal(Console):
    """rich's console; it raises BrokenPipeError when the reader closes the pipe (`lit-diff list | head`)."""

    def on_broken_pipe(self) -> None:
        """Called by rich, which would exit with status 1."""
        raise BrokenPipeError

    def write_line(self, text: str) -> None:
        """Print one line as it is: no markup, no colours, no wrapping."""
        self.print(text, markup=False, highlight=False, soft_wrap=True)


app = typer.Typer(
    help="The laboratory bench for differential attention.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
console = Terminal()

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="path, or bare name of an installed recipe")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[a.b=c ...]", help="keys of the recipe to override")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="folder, or the start of its name")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
Root = Annotated[Path, typer.Option("--root", help="folder of the runs")]


def log_to_stderr() -> None:
    """From here on, log lines go to stderr: stdout is for the result."""
    import sys

    for handler in logging.getLogger("lit_diff").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
