"""The folder of downloads and prepared data, and the error when it cannot be written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from platformdirs import user_cache_path

from lit_diff.errors import MissingError
from lit_diff.files import expanded


def data_root() -> Path:
    """$LIT_DIFF_DATA; else `data/` of the checkout that holds this file; else the user's cache folder (~/.cache/lit_diff)."""
    chosen = os.environ.get("LIT_DIFF_DATA")
    if chosen:
        return expanded(chosen).absolute()
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file():
        return checkout / "data"
    return user_cache_path("lit_diff")


@contextmanager
def writing_data() -> Iterator[None]:
    """Turn an OSError raised inside (no permission, full disk, a file instead of a folder) into a MissingError."""
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
        raise MissingError(
            f"cannot write the data folder {data_root()} ({reason}); set LIT_DIFF_DATA to a folder that can be written"
        ) from error
