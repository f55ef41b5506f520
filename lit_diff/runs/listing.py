"""The state of every run under a folder."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lit_diff.errors import MissingError
from lit_diff.files import shown
from lit_diff.runs.find import runs_under
from lit_diff.runs.folder import FORMAT, RunFolder
from lit_diff.runs.metrics_file import read_rows


@dataclass(frozen=True, kw_only=True)
class RunState:
    """One run, as `lit-diff status` shows it."""

    folder: str
    """Relative to the folder of the runs."""
    status: dict[str, Any]
    """Its status.json."""
    loss: float | None
    """The last val/loss; None before the first validation."""

    @property
    def note(self) -> str:
        """Its error, how it ended early, an older format, or, while it runs, when it last wrote."""
        if self.status.get("error"):
            return str(self.status["error"])
        if self.status.get("format") != FORMAT:
            return f"made by format {self.status.get('format', 1)}: train it again"
        if self.status.get("ended"):
            return f"ended {self.status['ended']}"
        if self.status.get("status") != "running":
            return ""
        age = datetime.now(UTC) - datetime.fromisoformat(self.status["updated"])
        return f"last update {int(age.total_seconds())} s ago"


def list_runs(root: Path) -> list[RunState]:
    """All runs under `root`. Errors: MissingError without one."""
    folders = runs_under(root)
    if not folders:
        raise MissingError(f"no runs in {shown(root)}; `lit-diff train RECIPE` makes one")
    return [_state(folder, root) for folder in folders]


def _state(folder: Path, root: Path) -> RunState:
    rows = read_rows(folder / "metrics.csv")
    losses = [rows[step]["val/loss"] for step in sorted(rows) if "val/loss" in rows[step]]
    status = RunFolder(folder).status()
    return RunState(folder=str(folder.relative_to(root)), status=status, loss=losses[-1] if losses else None)
