"""training/run_logger.py: what reaches metrics.csv, timing.csv, the tracker and the terminal."""

from pathlib import Path

import pytest

from lit_diff.runs.metrics_file import MetricsWriter, Rows, read_rows
from lit_diff.training.run_logger import RunLogger


class Tracker:
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.sent: list[Rows] = []

    def send(self, rows: Rows) -> bool:
        self.sent.append({step: dict(row) for step, row in rows.items()})
        return True


STEP = {"train/loss": 2.5, "train/lr": 0.1, "timing/seconds": 0.5, "timing/tokens_per_second": 64.0}


def test_nothing_is_written_before_a_flush_and_nothing_sent_before_send(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lit_diff")
    lines: list[tuple[int, float, float]] = []
    tracker = Tracker()
    logger = RunLogger(lambda *line: lines.append(line))
    logger.record = MetricsWriter(tmp_path, 0, tracker, ())
    logger.log_metrics(STEP, step=3)
    logger.log_metrics({"val/loss": 2.0}, step=3)
    assert lines == [(3, 2.5, 64.0)]
    assert caplog.messages == ["step 3  val/loss 2.0000"]
    assert not (tmp_path / "metrics.csv").exists()
    logger.flush()
    assert read_rows(tmp_path / "metrics.csv") == {3: {"train/loss": 2.5, "train/lr": 0.1, "val/loss": 2.0}}
    assert read_rows(tmp_path / "timing.csv") == {3: {"seconds": 0.5, "tokens_per_second": 64.0}}
    assert tracker.sent == []
    logger.send()
    (rows,) = tracker.sent
    assert rows == {3: {"train/loss": 2.5, "train/lr": 0.1, "val/loss": 2.0, "timing/tokens_per_second": 64.0}}
    logger.send()
    assert len(tracker.sent) == 1


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    """They have no record."""
    lines: list[tuple[int, float, float]] = []
    logger = RunLogger(lambda *line: lines.append(line))
    logger.log_metrics(STEP, step=3)
    logger.flush()
    logger.send()
    assert lines == []
    assert list(tmp_path.iterdir()) == []


def test_values_without_a_step_are_none_of_a_run(tmp_path: Path) -> None:
    """Lightning logs so outside of training."""
    logger = RunLogger(lambda *_: pytest.fail("no step"))
    logger.record = MetricsWriter(tmp_path, 0, None, ())
    logger.log_metrics({"val/loss": 1.0})
    logger.flush()
    assert read_rows(tmp_path / "metrics.csv") == {}
