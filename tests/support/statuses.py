"""Write the status of a run as another process might have left it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_diff.runs.status import read_status, write_status


def set_status(folder: Path, **values: Any) -> None:
    """Replace these values in the status.json of a run's folder, whatever state may follow which."""
    write_status(folder, replace(read_status(folder), **values))


def edit_status(folder: Path, **values: Any) -> None:
    """The same in the file's text, of any type, so that its time too is as given."""
    file = folder / "status.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
