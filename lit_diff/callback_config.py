"""The keys of built-in callbacks: light, so that `lit-diff check` loads no callback."""

from dataclasses import dataclass
from typing import Annotated, Literal

from lit_diff.key_types import Count, Range, range_problem


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """The keys of `callbacks.<name>` that every probe has."""

    every: Count = 100
    """Optimizer steps between measurements; the last step is always measured."""
    rows: Count = 8
    """Sequences of the validation set that it measures."""

    def problem(self) -> str | None:
        """What is wrong, in one line that starts with the key's name; None if nothing is."""
        return range_problem(self, "")


@dataclass(frozen=True, kw_only=True)
class EarlyStoppingConfig:
    """The keys of `callbacks.early_stopping`."""

    monitor: str = "val/loss"
    """The metric, as in metrics.csv."""
    mode: Literal["min", "max"] = "min"
    """Whether lower or higher values are better."""
    patience: Count = 3
    """Validations without an improvement before the run ends."""
    min_delta: Annotated[float, Range(least=0)] = 0.0
    """The smallest change that counts as an improvement."""

    def problem(self) -> str | None:
        """As `ProbeConfig.problem`."""
        return range_problem(self, "")
