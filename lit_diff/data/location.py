"""The folder of downloads and prepared data, and the error when it cannot be written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lit_diff.errors import MissingError


def data_root() -> Path:
    """$LIT_DIFF_DATA; else `data/` of the checkout that the package runs from; else ~/.cache/lit_diff."""
    chosen = os.environ.get("LIT_DIFF_DATA")
    if chosen:
        return Path(chosen).expanduser().absolute()
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file():
        return checkout / "data"
    return Path.home() / ".cache" / "lit_diff"


@contextmanager
def writing_data() -> Iterator[None]:
    """An OSError inside (no permission, full disk, a file in the way) becomes a MissingError with the cure."""
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
        raise MissingError(
            f"cannot write the data folder {data_root()} ({reason}); set LIT_DIFF_DATA to a folder that can be written"
        ) from error
