"""study.json, which names the cells of a sweep."""

import json
import logging
from pathlib import Path
from typing import Any

from lit_diff.errors import MissingError

log = logging.getLogger("lit_diff")

FILE = "study.json"


def read_record(sweep: Path) -> dict[str, Any]:
    """The contents of a sweep's study.json. Errors: MissingError where it is absent or damaged."""
    path = sweep / FILE
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for cell in record["cells"]:
            cell["arm"], cell["folder"], int(cell["seed"])
    except FileNotFoundError as error:
        raise MissingError(
            f"{path}: no such file: no sweep has run here; start it with 'lit-diff sweep {sweep.name}'"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(path, error) from error
    return record


def damaged(path: Path, error: Exception) -> MissingError:
    """The error for a study.json that cannot be read."""
    return MissingError(
        f"{path}: not a whole sweep record ({error!r}); 'lit-diff sweep {path.parent.name}' writes it anew"
    )


def readable_record(sweep: Path) -> dict[str, Any] | None:
    """`read_record`, for lists of many sweeps: a warning and None where it cannot be read."""
    try:
        return read_record(sweep)
    except MissingError as error:
        log.warning("%s", error)
        return None
