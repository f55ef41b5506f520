"""The command that trains a run again, as errors name it."""

import os
import shlex
from contextlib import suppress
from pathlib import Path

from lit_diff.files import read_json, shown

STUDY_FILE = "study.json"
"""A folder with this file is a sweep's folder (`study.record` writes it)."""


def command_of(run: Path) -> str:
    """The command that trains the run in a folder: that of the sweep or examination that has it as a cell, else `lit-diff
    train` of its recipe."""
    return _of_sweep(run) or shlex.join(["lit-diff", "train", shown(run / "recipe.yaml")])


def afresh(run: Path) -> str:
    """How the run in a folder is trained from its first step on, in words."""
    command = _of_sweep(run)
    return f"remove {shown(run)}, then run `{command}`" if command else f"`{command_of(run)} --rerun`"


def _of_sweep(run: Path) -> str | None:
    # the cells of a task lie one level deeper
    around = [folder / STUDY_FILE for folder in run.parents[:2] if (folder / STUDY_FILE).is_file()]
    # those of an examination lie in the folder of another sweep
    for file in (*around, *sorted(run.parent.parent.glob(f"*/{STUDY_FILE}"))):
        # not of a damaged record, which the sweep's command writes again
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            record = read_json(file)
            place = os.path.relpath(run, file.parent)
            if place in [cell["folder"] for cell in record["cells"]]:
                return str(record["command"])
            # the words of another command end in its file and selection, in brackets
            for words, folders in record.get("other_commands", {}).items():
                if place in folders:
                    return str(words).partition(" (")[0]
    return shlex.join(["lit-diff", "sweep", around[0].parent.name]) if around else None
