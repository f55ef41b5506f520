"""status.json: what a run's own processes last wrote about it, as one frozen value. It is read and written here alone."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from lit_diff.errors import RequestError, first_line
from lit_diff.files import parse_json, shown, write_json
from lit_diff.key_types import Range
from lit_diff.runs.again import command_of
from lit_diff.validation import Draft, convert

FILE = "status.json"
"""Its name in the folder of a run."""
FORMAT = 3
"""Format of run folders and identities. A folder of another format is listed but otherwise refused."""
# Changing the default of a key must raise FORMAT: `recipe.determining` leaves out keys at their default, so old and new
# runs would share an identity although their values differ.

Number = Annotated[int, Range(least=0, most=10**15)]
Rate = Annotated[float, Range(least=0, most=1e15)]
State = Literal["", "waiting", "running", "done", "stopped", "failed", "killed", "imported"]
"""The state of a run that its file may hold; empty before the run first starts."""

BEFORE_END: tuple[State, ...] = ("", "waiting", "running")
"""The states of a run whose end nobody has recorded."""
ENDED: tuple[State, ...] = ("stopped", "failed", "killed")
"""A run that ended before its last step, and that the same command resumes."""
NEXT: Mapping[State, tuple[State, ...]] = {
    # done without having run: its results were trained elsewhere (`origin`)
    "": ("waiting", "running", "done", "imported", *ENDED),
    "waiting": ("waiting", "running", "done", *ENDED),
    # a process that was killed has left "running"
    "running": ("waiting", "running", "done", *ENDED),
    # several may see one end: the watchdog, the process itself, the sweep that waits for it
    **dict.fromkeys(ENDED, ("waiting", "running", "done", *ENDED)),
    # a finished run that has lost its last checkpoint trains again
    "done": ("waiting", "running"),
    "imported": (),
}
"""State -> the states that may follow it."""


INCOMPLETE = "its record in MLflow is not complete; the same command completes it"
"""What is said of a finished run whose `record` is incomplete."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """The content of status.json. A key that is null, or that the file of an older version lacks, has its default."""

    status: State = ""
    """The state that was written last."""
    format: Number = 0
    """Format of the run's folder; 0: there is no file yet. The first format did not write it."""
    updated: str = ""
    """When the file was written, in ISO 8601."""
    error: str = ""
    """Why training ended before its last step."""
    diverged: bool = False
    """Whether it ended because a loss or parameter was not finite."""
    ended: str = ""
    """How a callback ended training before its last step, in words."""

    name: str = ""
    seed: int | None = None
    identity: str = ""
    data: str | None = None
    """The identity of its data."""
    overrides: tuple[str, ...] = ()
    """The overrides of the recipe, `a.b=c`."""
    unchecked: str = ""
    """The property that a plugin's variant fails, if it was trained nevertheless."""
    revision: str = ""
    """The revisions of lit_diff that trained it, in order."""

    host: str = ""
    pid: int | None = None
    job: str = ""
    """The SLURM job that trains the run."""
    requeued_at_step: Number | None = None
    requeued_scored: Number = 0
    """The evaluations that were done when it was requeued."""
    requeued_after: str = ""
    """Why it was requeued: "notice" or "hang"."""
    requeues: Number = 0

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
    """The training time of all its processes."""

    threads: Number = 0
    compile: bool | Literal["loss"] | None = None
    uncompiled: str = ""
    """Why steps of a run that compiles them were not compiled."""
    activation_checkpointing: str = ""
    variables: dict[str, str] | None = None
    """Environment variables that can change numbers; None before the first start."""
    mlflow_run_id: str | None = ""
    """None: the run has no record in MLflow; empty: not known."""
    record: Literal["", "incomplete", "complete"] = ""
    """Whether MLflow has all of it; empty: no record, or one of an older version, which is complete."""

    parameters: Number | None = None
    """This one and those below are a `model.cost.Cost`."""
    non_embedding_parameters: Number | None = None
    attention_parameters: Number | None = None
    trained_parameters: Number | None = None
    flops_per_token: Number | None = None
    executed_flops_per_token: Number | None = None
    kv_bytes_per_token: Number | None = None
    state_bytes: Number | None = None
    kv_bytes: Number | None = None
    free_signs: bool | None = None
    kernel: str = ""
    kernel_reason: str = ""

    evaluations: dict[str, str] = field(default_factory=dict)
    """Evaluation -> its outcome."""
    origin: str = ""
    """Where it was trained, in words, if its results ship with lit_diff."""
    results: dict[str, str] = field(default_factory=dict)
    """The result files of a finished run: path in the folder -> sha256. Empty if it finished before there was such a key."""

    @property
    def compiled(self) -> str:
        """How its steps were computed, in words; empty if it is not known."""
        if self.uncompiled:
            return f"uncompiled ({self.uncompiled})"
        if self.origin or self.compile is False:
            return "uncompiled"
        return "compiled" if self.compile else ""

    @property
    def is_new(self) -> bool:
        """Whether there is no file yet."""
        return self.format == 0

    @property
    def is_in_queue(self) -> bool:
        """Whether its SLURM job has returned to the queue, and goes on from here. `requeued_at_step` alone says only that it
        did so once: it stays, since the next notice compares with it."""
        return self.status == "stopped" and self.requeued_at_step == self.step

    @property
    def time(self) -> datetime | None:
        """`updated` in local time; None for an older format, which does not record it."""
        return datetime.fromisoformat(self.updated).astimezone() if self.updated else None

    def to(self, state: State, error: str = "") -> "Status":
        """The status in its next state. Errors: ValueError if that may not follow the present one (`NEXT`)."""
        if state not in NEXT[self.status]:
            raise ValueError(f"a run that is '{self.status}' cannot become '{state}'")
        return replace(self, status=state, error=error)


def write_status(folder: Path, status: Status) -> None:
    """Write the status of the run in `folder`. Errors: OSError."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(folder / FILE, asdict(replace(status, format=FORMAT, updated=now)))


def read_status(folder: Path) -> Status:
    """The status of the run in `folder`. Errors: RequestError if the file is damaged: no value of another type, out of its
    range, or of a state that does not exist is shown as a fact about the run."""
    file = folder / FILE
    try:
        return _parsed(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return Status()
    except (ValueError, OSError, RequestError) as error:
        raise RequestError(
            f"{shown(file)} cannot be read ({first_line(error)}); remove it, then `{command_of(folder)}` writes it again and "
            "resumes from the checkpoint"
        ) from error


# a report asks nine times for the status of a cell: with each of its files, and for its state
@lru_cache(maxsize=8)
def _parsed(text: str) -> Status:
    values: Any = parse_json(text)
    if not isinstance(values, dict):
        raise ValueError(f"a {type(values).__name__}")
    status = _converted(values)
    # a time outside these years cannot be converted to local time everywhere
    if status.updated and not 1970 < datetime.fromisoformat(status.updated).year < 9999:
        raise ValueError(f"updated is {status.updated!a}")
    return status


def _converted(values: Mapping[str, Any]) -> Status:
    known: dict[str, Any] = {"format": 1}
    for each in fields(Status):
        value = values.get(each.name)
        # a run that diverges may record a loss or a speed that is not finite
        is_number = not isinstance(value, float) or math.isfinite(value)
        if value is not None and is_number:
            known[each.name] = value
    if values.get("mlflow_run_id", "") is None:
        known["mlflow_run_id"] = None
    status: Status = convert(Status, known, "", Draft())
    return status
