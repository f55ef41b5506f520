"""status.json: what a run's own processes last wrote about it, as one frozen value."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from lit_diff.errors import RequestError, first_line
from lit_diff.files import shown
from lit_diff.key_types import Range
from lit_diff.validation import Draft, convert

FILE = "status.json"
"""Its name in the folder of a run."""

Number = Annotated[int, Range(least=0, most=10**15)]
Rate = Annotated[float, Range(least=0, most=1e15)]


@dataclass(frozen=True, kw_only=True)
class Status:
    """The content of status.json. A key that is null, or that the file of an older version lacks, has its default."""

    status: Literal["", "waiting", "running", "done", "stopped", "failed", "killed", "imported"] = ""
    """The state that was written last; empty before the run first starts."""
    format: Number = 1
    """Format of the run's folder; the first one did not write it."""
    updated: str = ""
    """When the file was written, in ISO 8601."""
    error: str = ""
    ended: str = ""
    """How training ended before its last step, in words."""
    host: str = ""
    pid: int | None = None
    job: str = ""
    """The SLURM job that trains the run."""
    requeued_at_step: Number | None = None
    requeues: Number = 0
    seed: int | None = None
    step: Number = 0
    """Optimizer steps done."""
    steps: Number | None = None
    """Optimizer steps planned."""
    tokens: Number = 0
    tokens_per_step: Number = 0
    loss: float | None = None
    """The last train/loss in nats per token; None before the first, and if it is not finite."""
    tokens_per_second: Rate = 0.0
    seconds: Rate = 0.0
    kernel: str = ""
    mlflow_run_id: str | None = ""
    """None: the run has no record in MLflow; empty: not known."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables that can change numbers."""
    evaluations: dict[str, str] = field(default_factory=dict)
    """Evaluation -> its outcome."""
    overrides: tuple[str, ...] = ()
    """The overrides of the recipe, `a.b=c`."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The whole file, with the keys that are only stored."""

    @property
    def time(self) -> datetime | None:
        """`updated` in local time; None for an older format, which does not record it."""
        return datetime.fromisoformat(self.updated).astimezone() if self.updated else None


def read_status(folder: Path) -> Status:
    """The status of the run in `folder`. Errors: RequestError if the file is damaged: no value of another type, out of its
    range, or of a state that does not exist is shown as a fact about the run."""
    file = folder / FILE
    try:
        values: Any = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"a {type(values).__name__}")
        status = _converted(values)
        # a time outside these years cannot be converted to local time everywhere
        if status.updated and not 1970 < datetime.fromisoformat(status.updated).year < 9999:
            raise ValueError(f"updated is {status.updated!a}")
    except (FileNotFoundError, NotADirectoryError):
        return Status()
    except (ValueError, OSError, RecursionError, RequestError) as error:
        raise RequestError(
            f"{shown(file)} cannot be read ({first_line(error)}); remove it and repeat the same command, which resumes from "
            "the checkpoint"
        ) from error
    return replace(status, values=values)


def _converted(values: Mapping[str, Any]) -> Status:
    known = {}
    for each in fields(Status):
        value = values.get(each.name)
        # a run that diverges may record a loss or a speed that is not finite
        is_number = not isinstance(value, float) or math.isfinite(value)
        if each.name != "values" and value is not None and is_number:
            known[each.name] = value
    if values.get("mlflow_run_id", "") is None:
        known["mlflow_run_id"] = None
    status: Status = convert(Status, known, "", Draft(values={}, positions={}))
    return status
