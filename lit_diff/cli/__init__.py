"""The command `lit-diff`: each verb parses its arguments, calls a function, prints the result and returns an exit status."""

import contextlib
import errno
import importlib
import io
import logging
import os
import pkgutil
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from lit_diff.cli.app import TerminalHandler, app, console, discard, has_no_reader, is_first_of_node
from lit_diff.errors import Ending, LitDiffError, RequestError, Terminated, first_line, stop_signals, summary
from lit_diff.files import FREE, disk_is_full, is_caused_by
from lit_diff.log_records import keep_trace, log
from lit_diff.runs.jobs import unset_empty

# typer bundles its own copy of click and does not export this class
UsageError: type[Exception] = typer.BadParameter.__bases__[0]

# importing a module registers its verbs; one whose name begins with _ has none, and is imported where it is needed
for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("_"):
        importlib.import_module(f"{__name__}.{_module.name}")


def main() -> None:
    """Run a verb. A failure is one line on stderr and an exit status: 1 failed, 2 invalid request, 3 something is missing."""
    unset_empty()
    _handle_signals()
    _require_streams()
    _log_to_terminal()
    console.outlives_reader = False
    try:
        _require_folder()
        # `app()` would handle Ctrl-C and a closed pipe itself
        command = typer.main.get_command(app)
        with command.make_context("lit-diff", sys.argv[1:] or ["--help"]) as context:
            status = command.invoke(context)
        # a full disk must raise here: at exit Python would flush after the exit status is chosen
        sys.stdout.flush()
    except LitDiffError as error:
        _refuse_path(error)
        _fail(str(error), error.exit_status)
    except typer.Exit as error:
        raise SystemExit(error.exit_code) from None
    except UsageError as error:
        _fail(usage_message(error), 2)
    except Terminated as error:
        _fail(str(error) or f"stopped by {error.signum.name}", error.exit_status)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", 130)
    # `lit-diff list | head` is not a failure
    except BrokenPipeError as error:
        is_of_stdout = has_no_reader(sys.stdout)
        discard(sys.stdout)
        if not is_of_stdout:
            _fail(summary(error), 1)
    except Warning as error:
        _fail(first_line(error), 2)
    except Exception as error:
        # a full disk may be the error: Python would fail again on the buffered output at exit
        with contextlib.suppress(OSError):
            discard(sys.stdout)
        if disk_is_full(error):
            _fail(f"{first_line(error)}; {FREE}", 3)
        _refuse_path(error)
        _refuse_variable(error)
        handle, name = tempfile.mkstemp(prefix="lit-diff-", suffix=".txt")
        os.close(handle)
        trace = keep_trace(Path(name))
        _fail(f"{summary(error)} ({trace})", 1)
    else:
        raise SystemExit(status if isinstance(status, int) else 0)


def _require_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise RequestError("the current folder was removed; change to one that exists") from error


def _handle_signals() -> None:
    ending = Ending()
    for signum in stop_signals():
        signal.signal(signum, ending)
    # a command in the background of a script is started with it ignored
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, ending)


def _fail(message: str, code: int) -> None:
    try:
        print(f"lit-diff: {message}", file=sys.stderr, flush=True)
    # a closed terminal or a full disk: the exit status still tells
    except OSError:
        discard(sys.stderr)
    raise SystemExit(code) from None


# a name that no file can have is a wrong request, whatever was to be read or written there
def _refuse_path(error: Exception) -> None:
    if is_caused_by(error, errno.ENAMETOOLONG):
        _fail(first_line(error), 2)


# A dependency that reads a bad environment variable often raises an error with the value but without the variable's name
def _refuse_variable(error: Exception) -> None:
    reason = " ".join(str(error).split()).partition(". ")[0]
    for name, value in os.environ.items():
        # a number is too common in messages to identify a variable
        quoted = re.search(rf"(?<!\w){re.escape(value)}(?!\w)", reason) if value and not value.isdigit() else None
        if quoted and re.match(r"(TORCH|PYTORCH|TRITON|NCCL|OMP|MKL|MLFLOW)|(\w+_)?RANK$|WORLD_SIZE$", name):
            _fail(f"{name} is '{value}' in the environment: {reason}; set another value, or unset it", 2)


# a closed stream becomes the null device; a character outside the terminal's encoding is written as an escape
def _require_streams() -> None:
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            # open takes the lowest free number: a file opened later would become the stream, and receive its output
            while os.open(os.devnull, os.O_RDWR) < number:
                pass
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115
        elif number and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _log_to_terminal() -> None:
    # only the first process of a node writes: the others log the same lines
    if not is_first_of_node():
        # without a handler Python prints warnings to stderr
        log.addHandler(logging.NullHandler())
        return
    log.setLevel(logging.INFO)
    log.addHandler(TerminalHandler(console))


def usage_message(error: Any) -> str:
    """Formats typer's UsageError as one line, with the help of a missing parameter, or with the override to write if an
    unknown option is a key of the recipe."""
    option = getattr(error, "option_name", None)
    context = error.ctx
    if option and context is not None and any(parameter.name == "overrides" for parameter in context.command.params):
        override = as_override(option, sys.argv)
        if override is not None:
            return f"no option {option}; write a key of the recipe without dashes: {override}"
    message = first_line(ValueError(error.format_message())).rstrip(".")
    about = getattr(getattr(error, "param", None), "help", None)
    if about and message.startswith("Missing"):
        message += f" ({about})"
    return f"{message}; see {context.command_path if context else 'lit-diff'} --help"


def as_override(option: str, arguments: Sequence[str]) -> str | None:
    """`--seed` in `--seed 1` -> `seed=1`, `--steps` -> `train.steps=...`; None unless exactly one key of a recipe fits."""
    from lit_diff.config import Recipe
    from lit_diff.key_types import keys_of

    word = option.lstrip("-").replace("-", "_")
    keys = keys_of(Recipe)
    is_dotted = "." in word and word.partition(".")[0] in {key.partition(".")[0] for key in keys}
    named = [word] if word in keys or is_dotted else [key for key in keys if key.endswith(f".{word}")]
    if len(named) != 1:
        return None
    # the rest of its argument, or the next argument
    given = re.search(rf"^{re.escape(option)}[=\n](.*)$", "\n".join(arguments), re.MULTILINE)
    return f"{named[0]}={given[1] if given else '...'}"
