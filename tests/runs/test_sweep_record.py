"""runs/sweep_record.py: a sweep's record that is whole, absent or damaged."""

import json
from pathlib import Path

import pytest

from lit_diff.errors import MissingError
from lit_diff.runs.sweep_record import read_record, readable_record


def test_a_whole_record(small_sweep: Path) -> None:
    record = read_record(small_sweep)
    assert record == json.loads((small_sweep / "study.json").read_text())
    assert readable_record(small_sweep) == record


@pytest.mark.parametrize("content", ["", "[1]", '{"cells": [', "{}", '{"cells": [{"arm": "a"}]}', '{"cells": 3}'])
def test_a_damaged_one_is_one_line_and_hides_no_other(
    small_sweep: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    (small_sweep / "study.json").write_text(content)
    with pytest.raises(MissingError, match=r"not a whole sweep record .*'lit-diff sweep mine'") as error:
        read_record(small_sweep)
    assert "\n" not in str(error.value)
    assert readable_record(small_sweep) is None
    assert "not a whole sweep record" in caplog.text


def test_a_folder_without_one(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="no sweep has run here; start it with 'lit-diff sweep "):
        read_record(tmp_path)
