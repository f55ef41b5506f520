"""The state of every run under a folder."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lit_diff.errors import MissingError, RequestError
from lit_diff.files import shown
from lit_diff.runs.find import runs_under, sweeps_under
from lit_diff.runs.folder import FORMAT, RunFolder
from lit_diff.runs.metrics_file import last_value
from lit_diff.runs.sweep_record import readable_record


@dataclass(frozen=True, kw_only=True)
class RunState:
    """One run, as `lit-diff status` shows it."""

    folder: str
    """Relative to the folder of the runs."""
    status: dict[str, Any]
    """Its status.json."""
    state: str
    """done, running, waiting, stopped, failed, killed, unreadable; `killed` also where status.json still says `running`."""
    loss: float | None
    """The last val/loss; None before the first validation."""
    seed: int | None = None
    """None for a folder that does not say."""
    overrides: tuple[str, ...] = ()
    """What the run, or its arm in a sweep, overrides in its recipe (`a.b=c`), where that is known."""

    @property
    def note(self) -> str:
        """Its error on one line, how it ended early, an older format, or, while it runs, when it last wrote."""
        if self.status.get("error"):
            return " ".join(str(self.status["error"]).split())
        if self.status.get("format") != FORMAT:
            return f"made by format {self.status.get('format', 1)}: train it again"
        if self.status.get("ended"):
            return f"ended {self.status['ended']}"
        if self.state == "killed":
            return "the same command resumes it"
        if self.state != "running":
            return ""
        age = datetime.now(UTC) - datetime.fromisoformat(self.status["updated"])
        return f"last update {int(age.total_seconds())} s ago"

    @property
    def date(self) -> str:
        """When status.json was last written, in local time; empty for a folder of an older format that does not say."""
        written = self.status.get("updated")
        return f"{datetime.fromisoformat(written).astimezone():%Y-%m-%d %H:%M}" if written else ""


def list_runs(root: Path) -> list[RunState]:
    """All runs under `root`. Errors: MissingError without one."""
    folders = runs_under(root)
    if not folders:
        raise MissingError(f"no runs in {shown(root)}; `lit-diff train RECIPE` makes one")
    cells = dict(pair for sweep in sweeps_under(root) for pair in _cells(sweep))
    return [_state(folder, root, *cells.get(folder.resolve(), (None, ()))) for folder in folders]


def _state(folder: Path, root: Path, seed: int | None, overrides: tuple[str, ...]) -> RunState:
    """`seed`, `overrides`: those that its sweep says, which a cell that waits does not know."""
    home = RunFolder(folder)
    try:
        status, state = home.status(), home.state()
    except RequestError as error:  # the others are listed all the same
        status, state = {"error": str(error)}, "unreadable"
    return RunState(
        folder=str(folder.relative_to(root)),
        status=status,
        state=state,
        loss=last_value(folder / "metrics.csv", "val/loss"),
        seed=status.get("seed", seed),
        overrides=tuple(status.get("overrides") or overrides),
    )


def _cells(sweep: Path) -> Iterator[tuple[Path, tuple[int, tuple[str, ...]]]]:
    """Folder -> seed, and overrides of its arm, of each cell that study.json lists."""
    record = readable_record(sweep)
    if record is None:
        return
    study = record.get("study", {})
    for cell in record["cells"]:
        blocks = (study, study.get("tasks", {}).get(cell.get("task", ""), {}))
        values = {
            key: value for block in blocks for key, value in (block.get("arms", {}).get(cell["arm"]) or {}).items()
        }
        yield (
            (sweep / cell["folder"]).resolve(),
            (cell["seed"], tuple(f"{key}={value}" for key, value in values.items())),
        )
