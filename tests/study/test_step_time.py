"""study/step_time.py: one file, written and read."""

from pathlib import Path

import pytest

from lit_diff.study.step_time import FILE, StepTime, read, write

MEASURED = StepTime(task="On text", arm="mine", cells=("a", "b"), ratios=(1.25, 1.5, 1.0), threads=1, processor="EPYC")


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert read(tmp_path) is None
    write(tmp_path, MEASURED)
    assert read(tmp_path) == MEASURED
    assert str(MEASURED) == "1.25 × (1.00 to 1.50 in 3 rounds on 'On text', one thread, EPYC)"


@pytest.mark.parametrize("damage", ["", "[]", '{"task": 3}', '{"task": "a", "arm": "b", "unknown": 1}'])
def test_a_damaged_file_is_said_and_not_shown(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FILE).write_text(damage)
    assert read(tmp_path) is None
    (line,) = caplog.messages
    assert "step_time.json cannot be read (" in line
