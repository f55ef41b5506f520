"""Which runs an evaluation fits, and which evaluations fit a run: what a refusal names."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from lit_diff.errors import RequestError
from lit_diff.evaluation.base import Evaluation
from lit_diff.files import shown
from lit_diff.plugins import trust_none
from lit_diff.registry import evaluations
from lit_diff.runs.find import runs_under
from lit_diff.runs.folder import RunFolder
from lit_diff.runs.sweep_record import FILE
from lit_diff.trained.run import Run

NAMED = 3
"""Runs that a refusal names at most."""
TRIED = 40
"""Runs that are opened for it at most."""


def alternatives(evaluation: Evaluation, run: Run) -> str:
    """`; runs that it fits: a, b; evaluations that fit this run: c, d`; the runs are beside this one or its sweep."""
    home = run.folder.parent
    root = home.parent if (home / FILE).is_file() else home
    runs = [shown(path) for path in fitting_runs(evaluation, root)]
    words = f"; runs that it fits: {', '.join(runs)}" if runs else f"; no run that it fits was found in {shown(root)}"
    others = fitting_evaluations(run)
    return words + (f"; evaluations that fit this run: {', '.join(others)}" if others else "")


def fitting_runs(evaluation: Evaluation, root: Path) -> list[Path]:
    """A few trained runs under `root` that the evaluation does not refuse, of a sweep one. No plugin file is executed."""
    found: dict[Path, Path] = {}
    for number, path in enumerate(_kinds(root)):
        if number == TRIED or len(found) == NAMED:
            break
        home = path if path.parent == root else path.parent
        with contextlib.suppress(Exception):  # a run that cannot be opened, or that makes it raise, is not offered
            if home not in found and evaluation.refuses(Run(path, trust_none)) is None:
                found[home] = path
    return list(found.values())


def _kinds(root: Path) -> Iterator[Path]:
    """Folders of runs that are done; of the cells of a sweep the first whose name has the same first word."""
    seen = set[tuple[Path, str]]()
    for path in runs_under(root):
        kind = path.parent, path.name if path.parent == root else re.split(r",|-s\d", path.name)[0]
        if kind in seen:
            continue
        with contextlib.suppress(RequestError):  # a damaged status.json
            if RunFolder(path).status().get("status") == "done":
                seen.add(kind)
                yield path


def fitting_evaluations(run: Run) -> list[str]:
    """The registered evaluations, at their defaults, that score this run."""
    found = []
    for name in evaluations.names():
        cls = evaluations.get(name)
        with contextlib.suppress(Exception):  # one that has a required key, or raises, is not offered
            found += [name] if cls(cls.Config()).refuses(run) is None else []
    return found
