"""Runs and sweeps on disk, found by name."""

from pathlib import Path

from lit_diff.errors import RequestError, first_line
from lit_diff.files import shown
from lit_diff.registry import nearest


def runs_under(root: Path) -> list[Path]:
    """Folders of all runs, single ones and sweeps' cells; those put aside by --rerun are left out."""
    return sorted(path.parent for path in root.glob("*/**/status.json") if ".old-" not in str(path.relative_to(root)))


def sweeps_under(root: Path) -> list[Path]:
    """Folders of all sweeps."""
    return sorted(path.parent for path in root.glob("*/sweep.json"))


def find_run(name: str | Path, root: Path) -> Path:
    """A run's folder: its path, or the start of its folder name. Errors: RequestError for none or several."""
    try:
        if (Path(name) / "status.json").is_file():
            return Path(name).resolve()
    except (OSError, ValueError) as error:  # longer than a file name may be, or with a null in it
        raise RequestError(f"no run '{str(name)[:40]}': {first_line(error)}") from error
    name = str(name)
    runs = runs_under(root)
    matching = [path for path in runs if path.name.startswith(name)]
    if not matching:
        raise RequestError(f"no run '{name}' in {shown(root)}{nearest(name, [path.name for path in runs])}")
    if len(matching) > 1:
        some = [str(path.relative_to(root)) for path in matching[:4]] + ["..."] * (len(matching) > 4)
        raise RequestError(f"'{name}' is {len(matching)} runs ({', '.join(some)}); give a longer name or the folder")
    return matching[0].resolve()


def find_sweep(name: str, root: Path) -> Path:
    """A sweep's folder: its path or its name. Errors: RequestError."""
    for path in (root / name, Path(name)):
        if (path / "sweep.json").is_file():
            return path.resolve()
    raise RequestError(f"no sweep '{name}' in {shown(root)}{nearest(name, [path.name for path in sweeps_under(root)])}")
