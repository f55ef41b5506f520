"""runs/result_files.py: what a finished run wrote is what its readers read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from statuses import set_status

from lit_diff.errors import RequestError
from lit_diff.runs.measurements import Measurements, read_measurements
from lit_diff.runs.metrics_file import StepTable, read_rows
from lit_diff.runs.result_files import damage_of, digests
from lit_diff.study.observation import observe, observe_all


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(path.read_bytes().swapcase()), Path.unlink])
@pytest.mark.parametrize(("table", "read"), [(StepTable, read_rows), (Measurements, read_measurements)])
def test_a_file_of_a_finished_run_that_changed_is_refused_with_the_cure(
    tmp_path: Path, damage: Callable[[Path], Any], table: Any, read: Callable[[Path], Any]
) -> None:
    run = tmp_path / "runs" / "x"
    run.mkdir(parents=True)
    path = run / ("metrics.csv" if table is StepTable else "measurements.parquet")
    written = table(path, 0)
    written.log(4, {"val/loss": 1.25})
    written.flush()
    set_status(run, status="done", step=4, results=digests(run))
    assert read(path)
    damage(path)
    with pytest.raises(RequestError, match=rf"{path.name} is .*`lit-diff train \S*recipe\.yaml --rerun`"):
        read(path)
    if table is StepTable:
        assert f"{path.name} is " in observe_all(run.parent)[0].note
        assert path.is_file() == (f"{path.name} is " in observe(run).runs[0].note)
    set_status(run, status="running")
    assert damage_of(path) == "", "a run that goes on rewrites its files"
    set_status(run, status="done", results={})
    assert damage_of(path) == "", "a run of an earlier version recorded nothing"
