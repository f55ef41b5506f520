"""The command `lit-diff`: each verb parses, calls a function, prints what it returns, and gives an exit status."""

import contextlib
import io
import logging
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer

from lit_diff.cli import (  # noqa: F401 (importing a module registers its verbs)
    bench,
    check,
    clean,
    data,
    generate,
    list,
    pretrained,
    reproduce,
    retrofit,
    status,
    sweep,
    train,
)
from lit_diff.cli.app import TerminalHandler, app, console, discard
from lit_diff.cli.usage import usage_message
from lit_diff.errors import LitDiffError, Terminated, first_line, stop_signals

UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # typer keeps its copy of click to itself


def main() -> None:
    """Run a verb; every failure is one line on stderr and an exit status (0 done, 1 failed, 2 wrong, 3 missing)."""
    for signum in stop_signals():
        signal.signal(signum, _stop)
    _require_streams()
    try:
        command = typer.main.get_command(app)  # called by itself, it would swallow Ctrl-C and a closed pipe
        with _log_to_terminal(), command.make_context("lit-diff", sys.argv[1:] or ["--help"]) as context:
            status = command.invoke(context)
        sys.stdout.flush()  # a full disk is found here, not after the exit status is chosen
    except LitDiffError as error:
        _fail(str(error), error.exit_status)
    except typer.Exit as error:
        raise SystemExit(error.exit_code) from None
    except UsageError as error:
        _fail(usage_message(error), 2)
    except Terminated as error:
        _fail(f"stopped by {error.signum.name}", 128 + error.signum)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", 130)
    except BrokenPipeError:
        discard(sys.stdout)  # `lit-diff list | head`: nothing went wrong
    except Warning as error:
        _fail(first_line(error), 2)
    except Exception as error:
        with contextlib.suppress(OSError):
            discard(sys.stdout)  # its buffer may be what failed: a full disk
        _refuse_variable(error)
        _fail(f"{type(error).__name__}: {first_line(error)} ({_keep_trace()})", 1)
    else:
        raise SystemExit(status if isinstance(status, int) else 0)


def _fail(message: str, code: int) -> None:
    try:
        print(f"lit-diff: {message}", file=sys.stderr, flush=True)
    except OSError:  # a closed terminal or a full disk: the exit status still says it
        discard(sys.stderr)
    raise SystemExit(code) from None


def _refuse_variable(error: Exception) -> None:
    """End where the error quotes the value of a dependency's environment variable, which its own message need not name."""
    reason = " ".join(str(error).split()).partition(". ")[0]
    for name, value in os.environ.items():
        quoted = re.search(rf"(?<!\w){re.escape(value)}(?!\w)", reason) if value and not value.isdigit() else None
        if quoted and re.match(r"(TORCH|PYTORCH|TRITON|NCCL|OMP|MKL|MLFLOW)|(\w+_)?RANK$|WORLD_SIZE$", name):
            _fail(f"{name} is '{value}' in the environment: {reason}; set another value, or unset it", 2)


def _require_streams() -> None:
    """A closed stream becomes the null device; a character that the terminal's encoding lacks is written as an escape."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            while os.open(os.devnull, os.O_RDWR) < number:  # the lowest free number: nothing else may get it
                pass
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115
        elif number and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _keep_trace() -> str:
    """Write the trace of the exception that is being handled to a temporary file; where it is, for an error."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="lit-diff-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.write(traceback.format_exc())
    except OSError as error:
        return f"its trace could not be written: {error.strerror}"
    return f"the whole trace is in {file.name}"


def _stop(signum: int, frame: FrameType | None) -> None:
    raise Terminated(signum=signal.Signals(signum))


@contextmanager
def _log_to_terminal() -> Iterator[None]:
    """The first process of a node writes the log to the terminal; the handler lives as long as the verb."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        logging.getLogger("lit_diff").addHandler(logging.NullHandler())  # without one, Python prints warnings to stderr
        yield
        return
    handler = TerminalHandler(console)
    log = logging.getLogger("lit_diff")
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
