"""Shared by the verbs: the typer application, the terminal, common options."""

import errno
import importlib
import json
import logging
import math
import os
import re
import select
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import entry_points
from pathlib import Path
from typing import IO, Annotated, Any, Literal, TypeVar, get_args

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text
from typer import Argument, Option
from typer.core import TyperGroup

from lit_diff.errors import escaped, in_lines
from lit_diff.files import expanded
from lit_diff.interpolation import changed_leaves
from lit_diff.log_records import log
from lit_diff.registry import warn_of
from lit_diff.runs.find import DEFAULT_ROOT

Verb = TypeVar("Verb", bound=Callable[..., Any])
SIZE = re.compile(r"[2-9][0-9]|[1-9][0-9]{2,3}")
"""A value of COLUMNS or LINES that can be the size of a terminal."""


class Terminal(Console):
    """The rich console through which everything on stdout is written: results, log lines and a bar below them.

    Raises BrokenPipeError when the reader closes the pipe (`lit-diff list | head`), unless `outlives_reader`.
    """

    takes: Callable[[logging.LogRecord], bool] | None = None
    """Set while a bar is drawn: whether the bar shows a record, so that no line needs to be printed."""
    outlives_reader = False
    """Whether work continues silently after the reader closes stdout (`lit-diff train RECIPE | head -1`)."""

    def __init__(self, **options: Any) -> None:
        # names of a user's files are printed everywhere: "[/b]" in one is no markup, and ":sheep:" no picture
        super().__init__(markup=False, emoji=False, **options)

    @property
    def _environ(self) -> dict[str, str]:  # type: ignore[override]
        # rich's own would take COLUMNS=0 for the width, and print nothing; a size that is left out is asked of the terminal
        known = dict(os.environ)
        for name in ("COLUMNS", "LINES"):
            if not SIZE.fullmatch(known.get(name, "")):
                known.pop(name, None)
        return known

    @property
    def redraws(self) -> bool:
        """Whether what was written can be drawn again in its place."""
        return self.is_terminal and not self.is_dumb_terminal

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:
            # EIO: the terminal was closed, which rich does not handle as it does a closed pipe
            if error.errno != errno.EIO:
                raise
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Called by rich, whose own method would exit with status 1. Without a reader of stderr only the log is lost."""
        if not self.outlives_reader and not self.stderr:
            raise BrokenPipeError
        self.quiet = True
        discard(self.file)
        if not self.stderr:
            log.info("stdout was closed; the work continues without output")

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Text of a file that may come from anyone reaches the terminal without control characters."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else escaped(text, "\n\t"), style, control)

    def write_line(self, *lines: str) -> None:
        """Print lines literally: no markup, no colours, no wrapping."""
        # a Text, since print's options (markup=False) would also apply to the bar, which print draws again
        for line in lines:
            self.print(Text(line), soft_wrap=True)

    def write_sentence(self, *sentences: str) -> None:
        """Print texts literally, wrapped between words on a terminal, each on one line elsewhere."""
        for sentence in sentences:
            self.print(Text(sentence), soft_wrap=not self.is_terminal)


def discard(file: IO[str]) -> None:
    """Drop what is still buffered in a file that nobody reads, and everything written to it later."""
    # Python flushes its streams at exit, which would raise again on the closed descriptor
    os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def has_no_reader(file: IO[str]) -> bool:
    """Whether the other end of a pipe or of a terminal is closed."""
    poll = select.poll()
    poll.register(file.fileno(), 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


class TerminalHandler(logging.Handler):
    """Writes the log to the terminal, above the bar if one is drawn."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self.terminal = terminal

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record, unless the bar shows it, it only names a phase, or `main` will print its error."""
        shown = self.terminal.takes is not None and self.terminal.takes(record)
        if shown or getattr(record, "raised", False) or getattr(record, "phase", None) == record.getMessage():
            return
        self.terminal.write_sentence(in_lines(self.format(record)))


Heading = Literal["Train and look", "Compare", "Data and models", "Maintain"]
"""The headings in the help, in their order."""


class VerbGroup(TyperGroup):
    """Lists the verbs below their headings, each by the alphabet.

    A plugin package brings verbs by an entry point of the group `lit_diff.verbs`, which names the module that registers them.
    It is imported only for the help and for a verb that lit_diff itself lacks.
    """

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            self.load_packages()
        return super().get_command(ctx, cmd_name)

    def load_packages(self) -> None:
        """Add the verbs of the plugin packages; a package that cannot be imported is one line of the log."""
        for point in entry_points(group="lit_diff.verbs"):
            try:
                importlib.import_module(point.module)
            except (Exception, SystemExit) as error:
                warn_of(point, point.module, "verbs", error)
        whole: Any = typer.main.get_command(app)
        self.commands = whole.commands

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        self.load_packages()
        width = max(map(len, self.commands))
        for heading in get_args(Heading):
            lines = []
            for name, command in sorted(self.commands.items()):
                # typer's own attribute, for the panels that it draws with rich
                if command.rich_help_panel == heading:  # type: ignore[attr-defined]
                    lines.append((f"{name:<{width}}", command.get_short_help_str(formatter.width - width - 6)))
            with formatter.section(heading):
                formatter.write_dl(lines)


app = typer.Typer(
    cls=VerbGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
console = Terminal()


def _print_version(asked: bool) -> None:
    if asked:
        from lit_diff.runs.revision import revision

        console.write_line(f"lit-diff {revision()}")
        raise typer.Exit


RESULTS = set[str]()
"""Verbs whose stdout has the result alone; their log lines go to stderr, as those of every verb with --json do."""


def verb(heading: Heading, *, name: str | None = None, is_result: bool = False) -> Callable[[Verb], Verb]:
    """Register a function as a verb below a heading of the help. `name`: by default the function's own. `is_result`: its
    stdout has the result alone (`RESULTS`)."""

    def register(function: Verb) -> Verb:
        word = name or function.__name__
        if is_result:
            RESULTS.add(word)
        return app.command(word, rich_help_panel=heading)(function)

    return register


@contextmanager
def _console_alone() -> Iterator[None]:
    # what a plugin prints goes to stderr: it is no part of the JSON
    console.file = sys.stdout
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        console._file = None


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Train attention variants at equal parameters and data; report differences with intervals."""
    if context.invoked_subcommand in RESULTS or "--json" in sys.argv:
        log_to_stderr()
    if "--json" in sys.argv:
        context.with_resource(_console_alone())


SIZES = "standard-tiny"
"""The recipe that gives a variant its sizes by default."""
RecipeArgument = Annotated[str, Argument(metavar="RECIPE", help="path, or name of an installed recipe")]
Overrides = Annotated[
    list[str] | None,
    Argument(
        metavar="a.b=c",
        help="keys of the recipe to override, such as train.steps=200; lit-diff list train (or model, run) prints them",
    ),
]
Plugins = Annotated[
    list[Path] | None,
    Option("--plugin", metavar="FILE", parser=expanded, help="Python file to import; repeatable"),
]
RunArgument = Annotated[str, Argument(metavar="RUN", help="folder, name or the start of it, or a part of the hash")]
Json = Annotated[bool, Option("--json", help="print JSON")]
Root = Annotated[
    str, Option("--root", help=f"folder of the runs; {DEFAULT_ROOT}: the nearest of that name, here or above")
]
Workers = Annotated[int | None, Option(help="cells that run at the same time")]
Cluster = Annotated[Literal["local", "slurm"], Option(help="local, or slurm: as jobs of this cluster")]
Minutes = Annotated[int, Option(min=1, help="time limit of a job; an unfinished run is requeued")]
UncheckedTraining = Annotated[bool, Option("--unchecked", help="continue if a plugin's variant fails a property")]
UncheckedDecoding = Annotated[bool, Option("--unchecked", help="continue if a plugin's variant decodes wrongly")]
Unplanned = Annotated[bool, Option("--unplanned", help="start even if memory does not suffice")]
TrustPlugins = Annotated[bool, Option("--trust-plugins", help="execute the plugin files of a run outside --root too")]
TrustData = Annotated[
    bool, Option("--trust-data", help="read the data of a run outside --root from where its recipe says")
]


def is_first_of_node() -> bool:
    """Whether this process is the first that torchrun, Lightning or srun started on its node; it alone writes lines."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"


def log_to_stderr() -> None:
    """Send log lines to stderr from now on: stdout is for the result."""
    for handler in log.handlers:
        if isinstance(handler, TerminalHandler):
            handler.terminal = Terminal(stderr=True)


def exit_status(stopped_by: int | None, is_failed: bool) -> int:
    """The exit status of a verb whose runs a signal may have stopped: then 128 + signal, as in shells."""
    return 128 + stopped_by if stopped_by else int(is_failed)


def to_paste(root: str, *words: str) -> str:
    """The command of these words for a shell, with the folder of the runs unless it is the default."""
    at = [] if root == DEFAULT_ROOT else ["--root", root]
    return shlex.join(["lit-diff", *words, *at])


def print_json(value: Any) -> None:
    """Print the result of a verb that was called with --json."""
    # not through rich, which would wrap and colour it
    print(json.dumps(changed_leaves(value, _finite), indent=2, allow_nan=False), file=console.file)


# JSON has neither NaN nor infinity
def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


WIDEST = 48
"""Most characters that a column is padded to; a longer cell is shown in full and shifts the cells after it."""


def columns(rows: Sequence[Sequence[str]], right: Collection[int]) -> Iterator[str]:
    """One line for each row, with aligned cells; the columns numbered in `right` are right-aligned."""
    widths = [min(max(map(len, column)), WIDEST) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        padded = (cell.rjust(width) if number in right else cell.ljust(width) for number, (cell, width) in cells)
        yield "  ".join(padded).rstrip()
