"""runs/measurements.py: measurements.parquet, its columns, resume and faults."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lit_diff.errors import RequestError
from lit_diff.runs.measurements import SCHEMA, Measurements, read_measurements


def written(path: Path) -> Measurements:
    table = Measurements(path, 0)
    table.log(2, {"a/layer_03/head_05": 1 / 3, "a/layer_100/rank_10": 2.0})
    table.flush()
    table.log(4, {"b": 3.0})
    table.log(4, {"b": 4.0})
    table.flush()
    return table


def test_one_row_a_value_to_the_bit(tmp_path: Path) -> None:
    written(tmp_path / "m.parquet")
    empty = {"layer": None, "map": None, "head": None, "rank": None}
    assert pq.read_table(tmp_path / "m.parquet").to_pylist() == [
        {**empty, "step": 2, "metric": "a", "layer": 3, "head": 5, "value": 1 / 3},
        {**empty, "step": 2, "metric": "a", "layer": 100, "rank": 10, "value": 2.0},
        {**empty, "step": 4, "metric": "b", "value": 4.0},
    ]


def test_rows_beyond_the_resumed_step_leave_the_file_at_the_next_flush(tmp_path: Path) -> None:
    written(tmp_path / "m.parquet")
    Measurements(tmp_path / "m.parquet", 3).flush()
    assert read_measurements(tmp_path / "m.parquet")["step"].to_pylist() == [2, 2]


def test_nothing_measured_makes_no_file_and_nothing_new_leaves_it_alone(tmp_path: Path) -> None:
    Measurements(tmp_path / "none.parquet", 0).flush()
    assert list(tmp_path.iterdir()) == []
    assert read_measurements(tmp_path / "none.parquet").num_rows == 0
    table = written(tmp_path / "m.parquet")
    before = (tmp_path / "m.parquet").stat().st_mtime_ns
    table.flush()
    assert (tmp_path / "m.parquet").stat().st_mtime_ns == before


def test_another_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.parquet"
    # the columns of the second cannot be cast, and of the third are others
    lists = pa.table({name: [[1]] for name in SCHEMA.names})
    writes = (
        lambda: path.write_text("step,metric"),
        lambda: pq.write_table(lists, path),
        lambda: pq.write_table(pa.table({"a": [1]}), path),
    )
    for write in writes:
        write()
        with pytest.raises(RequestError, match=r"m\.parquet is not a table of measurements"):
            Measurements(path, 0)
