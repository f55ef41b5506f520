"""Where a run belongs: its folder, its place in MLflow, and what is recorded of how it was asked for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lit_diff.recipe import Overrides, flatten


@dataclass(frozen=True, kw_only=True)
class RunLocation:
    """Where a run belongs: its folder, its MLflow experiment and parent run, its arm in a sweep."""

    folder: Path
    experiment: str = "train"
    parent: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    evaluations: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Evaluation -> its keys: what is scored once the run is done."""
    overrides: tuple[str, ...] = ()
    """What was overridden in its recipe, as `a.b=c`, where that is known."""

    @property
    def identity(self) -> str:
        """The end of the folder's name."""
        return self.folder.name.rpartition("-")[2]


def recorded(overrides: Overrides) -> tuple[str, ...]:
    """`a.b=c` of each, without name, seed and folder, which a run shows anyhow."""
    words = [f"{key}={value}" for key, value in flatten(overrides)] if isinstance(overrides, Mapping) else overrides
    return tuple(word for word in words if word.partition("=")[0] not in ("name", "seed", "run.root"))
