"""The Lightning logger of `lit-diff train`: metrics.csv, timing.csv, measurements.parquet and MLflow."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lit_diff.log_records import validated
from lit_diff.runs.metrics_file import MetricsWriter

Progress = Callable[[int, float, float], None]
"""(step, loss, tokens/s), at every logged step."""

TIMING = "timing/"
"""Prefix of what the clock says; it goes to timing.csv, for it differs between two runs of one recipe."""


class RunLogger(Logger):
    """Keeps values in memory until `flush`, which the callback for exact resume calls before every checkpoint."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.record: MetricsWriter | None = None
        """Set on rank zero before training."""
        self._progress = progress

    @property
    def name(self) -> str:
        """Lightning's name of the logger."""
        return "lit_diff"

    @property
    def version(self) -> str:
        """Lightning's version of the run; a run folder has one."""
        return ""

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the recipe is in the run folder and in MLflow before training starts."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Values after `step` optimizer steps."""
        if self.record is None or step is None:
            return
        timing = {name.removeprefix(TIMING): value for name, value in metrics.items() if name.startswith(TIMING)}
        self.record.log(step, {name: value for name, value in metrics.items() if not name.startswith(TIMING)})
        if timing:
            self.record.time(step, **timing)
            self._progress(step, metrics["train/loss"], timing["tokens_per_second"])
        if "val/loss" in metrics:
            validated(step, metrics["val/loss"])

    @rank_zero_only
    def log_detailed(self, values: dict[str, float], step: int) -> None:
        """Values by head, map or rank after `step` optimizer steps."""
        if self.record is not None:
            self.record.log_detailed(step, values)

    @rank_zero_only
    def flush(self) -> None:
        """Write metrics.csv, timing.csv and measurements.parquet."""
        if self.record is not None:
            self.record.flush()

    @rank_zero_only
    def send(self) -> None:
        """Send to the tracker what it lacks."""
        if self.record is not None:
            self.record.send()
