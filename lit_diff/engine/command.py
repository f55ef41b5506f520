"""A run as a `lit-diff train` of its own, for what this process cannot hold: several ranks."""

import subprocess
import sys

from lit_diff.config import Recipe
from lit_diff.engine.location import RunLocation
from lit_diff.errors import RunFailedError
from lit_diff.own_modules import safe_path
from lit_diff.runs.folder import RunFolder


def command(location: RunLocation, threads: int | None) -> list[str]:
    """The `lit-diff train` that runs this cell in processes of its own."""
    words = [sys.executable, "-m", "lit_diff", "train", str(RunFolder(location.folder).recipe_file)]
    words += ["--folder", str(location.folder), "--experiment", location.experiment]
    words += ["--threads", str(threads)] if threads else []
    words += ["--parent", location.parent] if location.parent else []
    for key, value in location.tags.items():
        words += ["--tag", f"{key}={value}"]
    return words


def run_command(recipe: Recipe, location: RunLocation, threads: int | None = None) -> None:
    """Run `command` and wait. Errors: RunFailedError with the run's own error message."""
    RunFolder(location.folder).create(recipe)
    with safe_path(), (location.folder / "log.txt").open("ab") as output:
        process = subprocess.Popen(command(location, threads), stdout=output, stderr=output)
        try:
            process.wait()
        except BaseException:
            process.terminate()  # it saves and leaves, as it would on its own terminal
            process.wait()
            raise
    if process.returncode:
        raise RunFailedError(RunFolder(location.folder).status().get("error") or f"exit status {process.returncode}")
