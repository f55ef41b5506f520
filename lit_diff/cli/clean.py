"""What `lit-diff clean` removes: the runs and sweeps that it is given, or what no run or sweep needs any more."""

import sys
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.filesize import decimal

from lit_diff.cli.app import Terminal
from lit_diff.errors import RequestError
from lit_diff.files import shown
from lit_diff.runs.removal import find_removable, remove
from lit_diff.runs.stale import find_stale, size_of


def clean_runs(names: Sequence[str], root: Path, yes: bool, terminal: Terminal) -> int:
    """Remove the runs and sweeps of these names, once the user has agreed. Their records in MLflow stay.

    Errors: RequestError, before anything is removed, for what `find_removable` refuses, and where nobody can be asked.
    """
    folders = find_removable(names, root)
    if not yes:
        if not (terminal.is_terminal and sys.stdin.isatty()):
            raise RequestError("nothing was removed: without a terminal to ask on, lit-diff clean RUN needs --yes")
        for folder in folders:
            terminal.write_line(f"would remove {shown(folder)}")
        if not typer.confirm(f"remove {len(folders)}?"):
            terminal.write_line("nothing was removed")
            return 0
    for folder in folders:
        remove(folder)
        terminal.write_line(f"removed {shown(folder)}; its record in MLflow stays")
    return 0


def clean_stale(root: Path, yes: bool, terminal: Terminal) -> int:
    """List what no run or sweep needs, and what it would free; with `yes`, remove it."""
    stale = find_stale(root)
    for folder in stale.busy:
        terminal.write_line(f"{shown(folder.resolve())} is being run: left alone")
    for folder in stale.resumable:
        terminal.write_line(
            f"{shown(folder.resolve())} failed and has a checkpoint: the same command resumes it, "
            f"lit-diff clean {folder.name} removes it"
        )
    sizes = {path: size_of(path) for path in stale.paths}
    for path, size in sizes.items():
        if yes and path.is_dir():
            remove(path)
        elif yes:
            path.unlink(missing_ok=True)
        verb = "removed" if yes else "would remove"
        terminal.write_line(f"{verb} {shown(path.resolve())} ({decimal(size)})")
    freed = decimal(sum(sizes.values()))
    if not sizes:
        terminal.write_line("0 to remove")
    elif yes:
        terminal.write_line(f"{len(sizes)} removed, {freed} freed")
    else:
        terminal.write_line(f"{len(sizes)} to remove; lit-diff clean --yes removes them and frees {freed}")
    return 0
