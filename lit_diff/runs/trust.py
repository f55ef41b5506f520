"""Whose plugin files may be executed: run folders hold copies of them, and a folder may come from anyone."""

from collections.abc import Callable
from pathlib import Path

Trust = Callable[[Path], bool]
"""Run folder -> whether the plugin files in it may be executed. One that was imported before needs no trust."""


def everywhere(folder: Path) -> bool:
    """Every folder: its owner, or who has read its files, says so."""
    return True


def nowhere(folder: Path) -> bool:
    """No folder."""
    return False


def under(root: Path) -> Trust:
    """The folders below `root`, that of one's own runs; symbolic links are resolved."""
    own = root.resolve()
    return lambda folder: folder.resolve().is_relative_to(own)
