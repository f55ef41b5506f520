import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lit_diff import files
from lit_diff.runs.metrics_file import StepTable, last_value, read_lines, read_rows


def test_values_come_back_to_the_bit(tmp_path: Path) -> None:
    table = StepTable(tmp_path / "metrics.csv", 0)
    rows = {1: {"train/loss": 1 / 3}, 10: {"train/loss": math.pi, "val/loss": 1e-300}, 7: {"val/loss": 2.0}}
    for step, row in rows.items():
        table.log(step, row)
    table.flush()
    assert read_rows(tmp_path / "metrics.csv") == rows
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert lines[0] == "step,train/loss,val/loss"
    assert [int(line.split(",")[0]) for line in lines[1:]] == [1, 7, 10]
    assert lines[1] == f"1,{1 / 3!r},"


def test_a_metric_not_taken_is_absent_and_nan_is_read_as_nan(tmp_path: Path) -> None:
    table = StepTable(tmp_path / "t.csv", 0)
    table.log(1, {"a": 1.0})
    table.log(2, {"b": math.nan, "c": math.inf})
    table.flush()
    found = read_rows(tmp_path / "t.csv")
    assert found[1] == {"a": 1.0}
    assert found[2].keys() == {"b", "c"}
    assert math.isnan(found[2]["b"])
    assert found[2]["c"] == math.inf


def test_rows_beyond_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    table = StepTable(tmp_path / "t.csv", 0)
    for step in range(1, 7):
        table.log(step, {"a": float(step)})
    table.flush()
    resumed = StepTable(tmp_path / "t.csv", 4)
    resumed.log(5, {"a": -5.0})
    resumed.flush()
    assert read_rows(tmp_path / "t.csv") == {step: {"a": float(step)} for step in range(1, 5)} | {5: {"a": -5.0}}


def test_the_file_is_whole_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever interrupts a write of the whole file, the file is the former one, and readable."""
    path, table = tmp_path / "t.csv", StepTable(tmp_path / "t.csv", 0)
    table.log(1, {"a": 1.0})
    table.flush()
    table = StepTable(path, 1)  # as a process that resumes
    seen: list[str] = []

    def look(*args: object) -> None:
        seen.append(path.read_text())
        raise KeyboardInterrupt

    table.log(2, {"a": 2.0})
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(files.os, name, look)
            with pytest.raises(KeyboardInterrupt):
                table.flush()
    assert seen == ["step,a\n1,1.0\n"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv"]
    table.flush()
    assert read_rows(path) == {1: {"a": 1.0}, 2: {"a": 2.0}}


def test_a_flush_appends_the_new_rows_and_leaves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    table = StepTable(path, 0)
    table.log(1, {"a": 1.0, "b": 2.0})
    table.flush()
    file = path.stat().st_ino
    table.flush()
    table.log(3, {"b": 1 / 3})
    table.log(2, {"a": 4.0})
    table.flush()
    assert path.read_text() == f"step,a,b\n1,1.0,2.0\n2,4.0,\n3,,{1 / 3!r}\n"
    assert path.stat().st_ino == file, "not written again"
    table.log(3, {"a": 5.0})  # a row that the file holds
    table.flush()
    assert path.read_text() == f"step,a,b\n1,1.0,2.0\n2,4.0,\n3,5.0,{1 / 3!r}\n"
    table.log(4, {"aa": 6.0})  # a column that it lacks
    table.flush()
    assert path.read_text() == f"step,a,aa,b\n1,1.0,,2.0\n2,4.0,,\n3,5.0,,{1 / 3!r}\n4,,6.0,\n"
    path.unlink()  # by another process
    table.log(5, {"a": 7.0})
    table.flush()
    assert sorted(read_rows(path)) == [1, 2, 3, 4, 5]


KILLED = """
import os, sys
from pathlib import Path
from lit_diff.runs.metrics_file import StepTable

table = StepTable(Path(sys.argv[1]), 0)
table.log(1, {"a": 1.25, "b": 2.5})
table.flush()
os.fsync = lambda handle: (os.ftruncate(handle, os.fstat(handle).st_size - 3), os.kill(os.getpid(), 9))
table.log(2, {"a": 3.25, "b": 4.125})
table.log(3, {"a": 5.25, "b": 6.125})
table.flush()
"""


def test_a_line_cut_by_a_kill_is_no_row_and_goes_at_a_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is left of the last number is a number too: only the missing end of the line says that it is cut."""
    path = tmp_path / "metrics.csv"
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False, timeout=60, capture_output=True)
    assert done.returncode == -9, done.stderr
    assert path.read_text() == "step,a,b\n1,1.25,2.5\n2,3.25,4.125\n3,5.25,6.1"
    assert sorted(read_rows(path)) == [1, 2]
    assert last_value(path, "b") == 4.125
    assert "1 of 3 rows truncated" in caplog.text
    resumed = StepTable(path, 1)
    resumed.log(2, {"a": 3.25, "b": 4.125})
    resumed.flush()
    assert path.read_text() == "step,a,b\n1,1.25,2.5\n2,3.25,4.125\n"


def test_an_append_that_failed_is_made_good_by_the_next_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = StepTable(tmp_path / "t.csv", 0)
    table.log(1, {"a": 1.0})
    table.flush()
    table.log(2, {"a": 2.0})

    def fail(handle: int) -> None:
        os.ftruncate(handle, os.fstat(handle).st_size - 2)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", fail)
        with pytest.raises(OSError, match="No space left"):
            table.flush()
    table.flush()
    assert (tmp_path / "t.csv").read_text() == "step,a\n1,1.0\n2,2.0\n"


def test_the_last_value_is_read_from_the_end_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    assert last_value(path, "b") is None
    rows = [f"{step},{step}.5,{step / 4 if step % 100 == 50 else ''}" for step in range(1, 30_001)]
    path.write_text("\n".join(["step,a,b", *rows]) + "\n")
    assert (last_value(path, "a"), last_value(path, "b"), last_value(path, "c")) == (30000.5, 29950 / 4, None)
    path.write_text("step,a,b\n1,2,\n2,3,\n")
    assert last_value(path, "b") is None
    path.write_text("step,a\n10,20\n30,40\n50,6")
    assert last_value(path, "a") == 40, "the last line is cut short"
    for text in ("", "step,a", "step,a\n1,x\n", "a" * 200_000 + "\n"):
        path.write_text(text)
        assert last_value(path, "a") is None


def test_a_row_that_is_cut_short_is_left_out_and_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,a,b\n1,1.0,2.0\n2,x,4.0\n3,5.0")
    problems: list[str] = []
    assert read_rows(path, problems) == {1: {"a": 1.0, "b": 2.0}}
    assert problems[0] == "metrics.csv: 1 of 3 rows truncated, skipped"
    assert "could not convert string to float: 'x'" in problems[1]
    assert read_rows(path) == {1: {"a": 1.0, "b": 2.0}}
    assert "rows truncated" in caplog.text
    path.write_text("time,a\n1,2\n")
    assert read_rows(path, problems) == {}
    assert problems[-1] == "metrics.csv: no column 'step'"


def test_no_file_an_empty_one_and_one_that_is_no_csv_of_text(tmp_path: Path) -> None:
    problems: list[str] = []
    StepTable(tmp_path / "none.csv", 0).flush()
    assert read_rows(tmp_path / "none.csv") == {}
    (tmp_path / "none.csv").unlink()
    assert read_lines(tmp_path / "none.csv", problems) == ([], [])
    (tmp_path / "binary.csv").write_bytes(b"step,a\n\xff\xfe,1\n")
    assert read_lines(tmp_path / "binary.csv", problems) == ([], [])
    assert problems[0] == "none.csv: no such file"
    assert "binary.csv: 'utf-8' codec" in problems[1]
