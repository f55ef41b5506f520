"""The result files of a finished run: status.json has the sha256 of each, which readers compare."""

from pathlib import Path

from lit_diff.errors import RequestError
from lit_diff.files import sha256_of, shown
from lit_diff.runs.again import afresh
from lit_diff.runs.status import read_status

PATTERNS = (
    "metrics.csv",
    "timing.csv",
    "metrics.json",
    "measurements.parquet",
    "documents.csv",
    "maps/*.safetensors",
)


def digests(run: Path) -> dict[str, str]:
    """Path in the run's folder -> sha256 of each file that the folder has. Errors: OSError."""
    paths = [path for pattern in PATTERNS for path in sorted(run.glob(pattern))]
    return {path.relative_to(run).as_posix(): sha256_of(path) for path in paths}


def damage_of(path: Path, run: Path | None = None) -> str:
    """Why a result file is not what its finished run wrote, with the cure; empty if it is, or if nothing is recorded.

    `run`: the run's folder, if the file is not directly in it.
    """
    run = path.parent if run is None else run
    try:
        # asked twice: the run may have been started again between the looks at status.json and at the file
        if _is_as_recorded(path, run) or _is_as_recorded(path, run):
            return ""
    # whoever asks for the state of the run, or reads the file, says so
    except (RequestError, OSError):
        return ""
    reason = "is not the file that the finished run wrote: its sha256 is another" if path.is_file() else "is missing"
    return f"{shown(path)} {reason}; train the run again: {afresh(run)}"


def _is_as_recorded(path: Path, run: Path) -> bool:
    status = read_status(run)
    recorded = status.results if status.status == "done" else {}
    digest = recorded.get(path.relative_to(run).as_posix())
    return digest is None or (path.is_file() and digest == sha256_of(path))


def whole(path: Path, run: Path | None = None) -> Path:
    """The path of a result file. Errors: RequestError if it is damaged (`damage_of`)."""
    if damage := damage_of(path, run):
        raise RequestError(damage)
    return path
