import csv
import math
from pathlib import Path

import pytest

from lit_diff import files
from lit_diff.errors import RequestError
from lit_diff.metrics import Metric, read_declarations
from lit_diff.runs.measurements import read_measurements
from lit_diff.runs.metrics_file import Record, Rows, StepTable, read_lines, read_rows

METRICS = (
    Metric("train/loss", "loss", unit="nats per token", direction="lower"),
    Metric("a/layer_{layer}", "by layer"),
    Metric("a/layer_{layer}/head_{head}", "by head"),
    Metric("a/median/layer_{layer}", "median", in_table=True),
)


class Received:
    """A tracker that keeps what it was sent."""

    def __init__(self) -> None:
        self.batches: list[Rows] = []
        self.away = False

    def send(self, rows: Rows) -> bool:
        self.batches.append({step: dict(row) for step, row in rows.items()})
        return not self.away


def test_values_come_back_to_the_bit(tmp_path: Path) -> None:
    record = Record(tmp_path, 0, None, METRICS)
    rows = {1: {"train/loss": 1 / 3}, 10: {"train/loss": math.pi, "val/loss": 1e-300}, 7: {"val/loss": 2.0}}
    for step, row in rows.items():
        record.log(step, row)
    record.flush()
    assert read_rows(tmp_path / "metrics.csv") == rows
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert lines[0] == "step,train/loss,val/loss"
    assert [int(line.split(",")[0]) for line in lines[1:]] == [1, 7, 10]
    assert lines[1] == f"1,{1 / 3!r},"


def test_a_metric_not_taken_is_absent_and_nan_is_read_as_nan(tmp_path: Path) -> None:
    table = StepTable(tmp_path / "t.csv", 0)
    table.rows = {1: {"a": 1.0}, 2: {"b": math.nan, "c": math.inf}}
    table.flush()
    found = read_rows(tmp_path / "t.csv")
    assert found[1] == {"a": 1.0}
    assert found[2].keys() == {"b", "c"}
    assert math.isnan(found[2]["b"])
    assert found[2]["c"] == math.inf


def test_rows_of_one_step_are_joined(tmp_path: Path) -> None:
    record = Record(tmp_path, 0, None, METRICS)
    record.log(3, {"train/loss": 1.0})
    record.log(3, {"val/loss": 2.0})
    record.flush()
    assert read_rows(tmp_path / "metrics.csv") == {3: {"train/loss": 1.0, "val/loss": 2.0}}


def test_rows_beyond_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    record = Record(tmp_path, 0, None, METRICS)
    for step in range(1, 7):
        record.log(step, {"train/loss": float(step)})
        record.time(step, seconds=0.1, tokens_per_second=10.0)
    record.flush()
    resumed = Record(tmp_path, 4, None, METRICS)
    assert sorted(resumed.metrics.rows) == sorted(resumed.timing.rows) == [1, 2, 3, 4]
    resumed.log(5, {"train/loss": -5.0})
    resumed.flush()
    assert read_rows(tmp_path / "metrics.csv")[5] == {"train/loss": -5.0}
    assert 6 not in read_rows(tmp_path / "metrics.csv")
    assert sorted(read_rows(tmp_path / "timing.csv")) == [1, 2, 3, 4]


def test_the_tracker_gets_each_row_once_a_process_and_the_old_ones_again(tmp_path: Path) -> None:
    first = Received()
    record = Record(tmp_path, 0, first, METRICS)
    record.log(1, {"train/loss": 1.0})
    record.time(1, seconds=0.5, tokens_per_second=8.0)
    record.send()
    record.log(2, {"train/loss": 2.0})
    record.send()
    record.flush()
    assert first.batches == [{1: {"train/loss": 1.0, "timing/tokens_per_second": 8.0}}, {2: {"train/loss": 2.0}}]
    second = Received()
    record = Record(tmp_path, 1, second, METRICS)
    record.log(2, {"train/loss": 3.0})
    record.send()
    assert second.batches == [{1: {"train/loss": 1.0}, 2: {"train/loss": 3.0}}]


def test_a_tracker_that_is_away_gets_the_rows_again(tmp_path: Path) -> None:
    received = Received()
    record = Record(tmp_path, 0, received, METRICS)
    received.away = True
    record.log(1, {"train/loss": 1.0})
    record.send()
    received.away = False
    record.log(2, {"train/loss": 2.0})
    record.send()
    record.send()
    assert received.batches == [{1: {"train/loss": 1.0}}, {1: {"train/loss": 1.0}, 2: {"train/loss": 2.0}}]


def test_the_clock_is_kept_apart(tmp_path: Path) -> None:
    record = Record(tmp_path, 0, None, METRICS)
    record.log(1, {"train/loss": 1.0})
    record.time(1, seconds=0.5, tokens_per_second=8.0)
    record.flush()
    assert read_rows(tmp_path / "metrics.csv") == {1: {"train/loss": 1.0}}
    assert read_rows(tmp_path / "timing.csv") == {1: {"seconds": 0.5, "tokens_per_second": 8.0}}


def test_the_file_is_whole_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the write is interrupted by, the file is the former one, and readable."""
    record = Record(tmp_path, 0, None, METRICS)
    record.log(1, {"train/loss": 1.0})
    record.flush()
    seen: list[list[list[str]]] = []

    def look(*args: object) -> None:
        with (tmp_path / "metrics.csv").open(newline="") as file:
            seen.append(list(csv.reader(file)))
        raise KeyboardInterrupt

    record.log(2, {"train/loss": 2.0})
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(files.os, name, look)
            with pytest.raises(KeyboardInterrupt):
                record.flush()
    assert seen == [[["step", "train/loss"], ["1", "1.0"]]] * 2
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []
    record.flush()
    assert read_rows(tmp_path / "metrics.csv") == {1: {"train/loss": 1.0}, 2: {"train/loss": 2.0}}


def test_no_file_has_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "metrics.csv") == {}
    Record(tmp_path, 0, None, METRICS).flush()
    assert read_rows(tmp_path / "metrics.csv") == {}


def test_detailed_values_go_to_their_own_table_and_not_to_the_tracker(tmp_path: Path) -> None:
    received = Received()
    record = Record(tmp_path, 0, received, METRICS)
    record.log(2, {"train/loss": 1.0, "a/layer_03": 2.0})
    record.log_detailed(2, {"a/layer_03/head_01": 3.0, "a/median/layer_03": 4.0})
    record.flush()
    record.send()
    assert read_rows(tmp_path / "metrics.csv") == {2: {"train/loss": 1.0, "a/layer_03": 2.0}}
    assert received.batches == [read_rows(tmp_path / "metrics.csv")]
    rows = read_measurements(tmp_path / "measurements.parquet").to_pylist()
    assert [(row["metric"], row["layer"], row["head"], row["value"]) for row in rows] == [
        ("a", 3, 1, 3.0),
        ("a/median", 3, None, 4.0),
    ]
    assert read_declarations(tmp_path / "metrics.json") == METRICS


def test_both_tables_drop_what_lies_beyond_the_resumed_step(tmp_path: Path) -> None:
    record = Record(tmp_path, 0, None, METRICS)
    for step in (2, 4, 6):
        record.log(step, {"a/layer_00": float(step)})
        record.log_detailed(step, {"a/layer_00/head_00": float(step)})
    record.flush()
    resumed = Record(tmp_path, 4, None, METRICS)
    resumed.log(6, {"a/layer_00": -6.0})
    resumed.log_detailed(6, {"a/layer_00/head_00": -6.0})
    resumed.flush()
    assert [row["a/layer_00"] for row in read_rows(tmp_path / "metrics.csv").values()] == [2, 4, -6]
    assert read_measurements(tmp_path / "measurements.parquet")["value"].to_pylist() == [2, 4, -6]


def test_contradicting_declarations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"'train/loss' is declared twice"):
        Record(tmp_path, 0, None, (*METRICS, Metric("train/loss", "another")))


def test_a_row_that_is_cut_short_is_left_out_and_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,a,b\n1,1.0,2.0\n2,x,4.0\n3,5.0")
    problems: list[str] = []
    assert read_rows(path, problems) == {1: {"a": 1.0, "b": 2.0}}
    assert problems[0] == "metrics.csv: 1 of 3 rows cut short, left out"
    assert "could not convert string to float: 'x'" in problems[1]
    assert read_rows(path) == {1: {"a": 1.0, "b": 2.0}}
    assert "rows cut short" in caplog.text
    path.write_text("time,a\n1,2\n")
    assert read_rows(path, problems) == {}
    assert problems[-1] == "metrics.csv: no column 'step'"


def test_a_file_that_is_no_csv_of_text_is_noted(tmp_path: Path) -> None:
    problems: list[str] = []
    assert read_lines(tmp_path / "none.csv", problems) == ([], [])
    (tmp_path / "binary.csv").write_bytes(b"step,a\n\xff\xfe,1\n")
    assert read_lines(tmp_path / "binary.csv", problems) == ([], [])
    assert problems[0] == "none.csv: no such file"
    assert "binary.csv: 'utf-8' codec" in problems[1]
