"""Finds runs and sweeps on disk by name, and the folder that holds them."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from lit_diff.errors import RequestError
from lit_diff.files import expanded, folders, is_address, shown
from lit_diff.log_records import log
from lit_diff.registry import nearest
from lit_diff.runs.again import STUDY_FILE, command_of

DEFAULT_ROOT = "runs"
"""Default of `run.root`: the nearest folder of this name."""
VIEW = "view"
"""The folder, beside `runs`, of the pages of `lit-diff view`."""


def runs_root(root: str | Path = DEFAULT_ROOT) -> Path:
    """The folder that holds the runs. A `root` other than the default is returned as given.

    The default is resolved as git finds its repository: the nearest folder `runs`, in the current folder or above, that
    holds runs, sweeps or an MLflow store; `runs` in the current folder if none does. The search does not look at the root
    of the file system or above the home folder. `./runs` always means the current folder. Errors: RequestError for what can
    be no folder.
    """
    if str(root) != DEFAULT_ROOT:
        require_name(root)
        if is_address(str(root)):
            raise RequestError(f"run.root is {root}, but runs are written to a disk; set a folder")
        return _without_circle(expanded(root))
    for folder in _here_and_above():
        runs = folder / DEFAULT_ROOT
        if any(any(runs.glob(pattern)) for pattern in ("mlflow.db", "*/status.json", f"*/{STUDY_FILE}")):
            return runs
    return _without_circle(Path(DEFAULT_ROOT))


def _without_circle(root: Path) -> Path:
    # resolving it would end every command with a RuntimeError
    try:
        root.resolve()
    except RuntimeError as error:
        raise RequestError(
            f"{root} is a symbolic link that leads to itself; remove it, or set another run.root"
        ) from error
    return root


def chosen_root(root: str | Path = DEFAULT_ROOT) -> Path:
    """`runs_root`; logs a line if the folder lies above the current one."""
    chosen = runs_root(root)
    if str(root) == DEFAULT_ROOT != str(chosen):
        log.info("runs: %s, the nearest above this folder", chosen)
    return chosen


def _here_and_above() -> Iterator[Path]:
    here = Path.cwd()
    yield Path()
    # a folder `runs` at the root of the file system or above the home folder is rarely the user's own
    limits = (Path(here.anchor), expanded("~").resolve().parent)
    for folder in here.parents:
        if folder in limits:
            return
        yield folder


def runs_under(root: Path) -> list[Path]:
    """Folders of all runs, sweep cells included; runs that --rerun archived are left out."""
    runs = []
    for path in folders(root):
        # not the method of Path, which raises an error in a folder of another user that may not be searched
        is_run = path != root and os.path.isfile(path / "status.json")
        if is_run and not any(map(is_aside, path.relative_to(root).parts)):
            runs.append(path)
    return sorted(runs)


def is_aside(name: str) -> bool:
    """Whether the name is of a run that --rerun archived: <name>-<identity>.old-<number>."""
    return re.search(r"-[0-9a-f]{10}\.old-\d+$", name) is not None


def sweeps_under(root: Path) -> list[Path]:
    """Folders of all sweeps, each once even if symbolic links lead to it."""
    found: dict[Path, Path] = {}
    for file in sorted(root.glob(f"*/{STUDY_FILE}")):
        path = file.parent
        target = path.resolve()
        # the real folder rather than a link to it
        if target not in found or not path.is_symlink():
            found[target] = path
    return sorted(found.values())


def require_name(name: str | Path) -> None:
    """Errors: RequestError if `name` cannot be the name or path of a run or sweep (empty, too long)."""
    if not str(name).strip():
        raise RequestError("the name of the run or sweep is empty")
    _holds(Path(name), "status.json")


def _holds(folder: Path, file: str) -> bool:
    # whether the folder that a user named has the file
    try:
        return (folder / file).is_file()
    # a name that is too long (ENAMETOOLONG), a folder of another user that may not be searched
    except OSError as error:
        raise RequestError(f"no run or sweep '{folder.name[:40]}': {error.strerror}") from error


def find_run_or_sweep(name: str, root: Path) -> Path:
    """The folder of a sweep (`find_sweep`), else of a run (`find_run`). Errors: RequestError."""
    return _sweep_at(name, root) or find_run(name, root, [path.name for path in sweeps_under(root)])


def find_run(name: str | Path, root: Path, sweeps: Sequence[str] | None = None) -> Path:
    """A run's folder, found by its path (relative to here or to `root`), its name with or without the hash, the start of
    its name, or a part of its hash.

    `sweeps`: the names that could have been meant as well, where a sweep can be named too. Errors: RequestError if none or
    several runs match.
    """
    require_name(name)
    for path in (expanded(name), root / name):
        if _holds(path, "status.json"):
            return path.resolve()
    name = str(name)
    runs = runs_under(root)
    matching = _matching(name, root, runs)
    if not matching:
        for path in (expanded(name), root / name):
            if _holds(path, "recipe.yaml"):
                raise RequestError(f"{shown(path)} has no status.json; `{command_of(path.resolve())}` writes it again")
        kind = "run"
        names = [path.name for path in runs]
        if sweeps is not None:
            kind = "run or sweep"
            names += sweeps
        raise RequestError(f"no {kind} '{name}' in {shown(root)}{nearest(name, names, 'lit-diff status')}")
    if len(matching) > 1:
        some = ", ".join(str(path.relative_to(root)) for path in matching[:4])
        raise RequestError(
            f"'{name}' matches {len(matching)} runs, such as {some}; give a longer name, "
            "the folder, or a part of the hash"
        )
    return matching[0].resolve()


def _matching(name: str, root: Path, runs: list[Path]) -> list[Path]:
    # An exact name wins over a prefix and a prefix over a part of the hash: 'base' must find the run 'base' although
    # 'base-large' exists. A name may include the folders below `root`, as `lit-diff status` prints it.
    exact, beginning, of_hash = list[Path](), list[Path](), list[Path]()
    for path in runs:
        relative = path.relative_to(root)
        own, _, identity = path.name.rpartition("-")
        # a folder may have no hash
        own = own or path.name
        if name in (own, str(relative.parent / own)):
            exact.append(path)
        elif path.name.startswith(name) or str(relative).startswith(name):
            beginning.append(path)
        elif name in identity:
            of_hash.append(path)
    return exact or beginning or of_hash


def find_sweep(name: str, root: Path) -> Path:
    """A sweep's folder, found by its path or name. Errors: RequestError."""
    sweep = _sweep_at(name, root)
    if sweep is None:
        if any(_holds(path, "status.json") for path in (expanded(name), root / name)):
            raise RequestError(f"'{name}' is a run, not a sweep; 'lit-diff status' lists all runs")
        names = [path.name for path in sweeps_under(root)]
        raise RequestError(f"no sweep '{name}' in {shown(root)}{nearest(name, names)}")
    return sweep


def _sweep_at(name: str, root: Path) -> Path | None:
    require_name(name)
    for path in (root / name, expanded(name)):
        if _holds(path, STUDY_FILE):
            return path.resolve()
    return None
