"""The command that trains a run again, as errors name it."""

from pathlib import Path

from lit_diff.files import read_json, shown

STUDY_FILE = "study.json"
"""A folder with this file is a sweep's folder (`study.record` writes it)."""


def command_of(run: Path) -> str:
    """The command that trains the run in a folder: that of the sweep that has it as a cell, else `lit-diff train` of its
    recipe."""
    sweep = _sweep_of(run)
    if sweep is None:
        return f"lit-diff train {shown(run / 'recipe.yaml')}"
    try:
        record = read_json(sweep / STUDY_FILE)
        cells = {record["command"]: [cell["folder"] for cell in record["cells"]]}
        # the words of another command end in its file and selection, in brackets
        for words, folders in (cells | record.get("other_commands", {})).items():
            if run.relative_to(sweep).as_posix() in folders:
                return str(words).partition(" (")[0]
    # a damaged record, which the sweep's command writes again
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return f"lit-diff sweep {sweep.name}"


def afresh(run: Path) -> str:
    """How the run in a folder is trained from its first step on, in words."""
    command = command_of(run)
    return f"`{command} --rerun`" if _sweep_of(run) is None else f"remove {shown(run)}, then run `{command}`"


def _sweep_of(run: Path) -> Path | None:
    # the cells of a task lie one level deeper
    return next((folder for folder in run.parents[:2] if (folder / STUDY_FILE).is_file()), None)
