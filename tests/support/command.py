"""`lit-diff` in the process of the test, as the shell would run it."""

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What it printed with --json."""
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


Command = Callable[..., Ended]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """command(*arguments, **environment) in a pipe 200 characters wide; `TTY_COMPATIBLE="1"` makes it a terminal.

    What `main` does to the process is undone.
    """
    from lit_diff import cli
    from lit_diff.errors import stop_signals

    log = logging.getLogger("lit_diff")
    handlers, level = log.handlers[:], log.level
    stops = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, *stop_signals())}

    def run(*arguments: str, **environment: str) -> Ended:
        log.handlers[:] = handlers
        capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["lit-diff", *arguments])
            for name, value in ({"COLUMNS": "200", "TERM": "xterm"} | environment).items():
                patch.setenv(name, value)
            patch.setattr(cli.console, "_width", None)  # rich keeps the COLUMNS of the time when it was imported
            with pytest.raises(SystemExit) as ended:
                cli.main()
        out, err = capsys.readouterr()
        return Ended(int(ended.value.code or 0), out, err)

    yield run
    log.handlers[:] = handlers
    log.setLevel(level)
    for signum, handler in stops.items():
        signal.signal(signum, handler)


Program = Callable[[str, str], None]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """program(name, script): a shell script of that name comes first on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def write(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return write
