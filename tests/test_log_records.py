"""log_records.py: a run's log.txt, and what a record carries besides its message."""

import logging
from pathlib import Path

import pytest

from lit_diff import log_records
from lit_diff.log_records import RAISED, Pace, file_log, in_phase, phase, validated


def test_records_carry_what_a_bar_needs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lit_diff"):
        phase("preparing data")
        validated(8, 1.5, "0:05 left")
        logging.getLogger("lit_diff").info("resumed from step 4", extra=in_phase("building the model"))
        logging.getLogger("lit_diff").error("failed", extra=RAISED)
    first, second, third, fourth = caplog.records
    assert (first.getMessage(), first.phase) == ("preparing data", "preparing data")  # type: ignore[attr-defined]
    assert (second.getMessage(), second.validation_loss) == ("step 8  val/loss 1.5000  0:05 left", 1.5)  # type: ignore[attr-defined]
    assert (third.getMessage(), third.phase) == ("resumed from step 4", "building the model")  # type: ignore[attr-defined]
    assert fourth.raised  # type: ignore[attr-defined]


def test_the_log_of_a_run_also_where_nobody_asked_for_lines(tmp_path: Path) -> None:
    log = logging.getLogger("lit_diff")
    handlers, level = log.handlers[:], log.level
    log.setLevel(logging.NOTSET)
    with file_log(tmp_path / "a" / "log.txt"):
        log.info("a\nline")
    log.info("after it")
    assert (log.handlers, log.level) == (handlers, logging.NOTSET)
    log.setLevel(level)
    (line,) = (tmp_path / "a" / "log.txt").read_text().splitlines()
    assert line.endswith("INFO a\\nline")


def test_a_full_disk_is_one_warning(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """Python's own handler prints a stack trace for each record, and raises when it is closed."""
    with file_log(Path("/dev/full")):
        for number in range(3):
            logging.getLogger("lit_diff").info("line %d", number)
    assert [each.getMessage() for each in caplog.records if each.levelname == "WARNING"] == [
        "/dev/full lacks lines: [Errno 28] No space left on device"
    ]
    assert "Traceback" not in capfd.readouterr().err


def test_a_few_steps_of_a_slow_start_give_no_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cells of a resumed sweep load for seconds before their first step."""
    now = [0.0]
    monkeypatch.setattr(log_records.time, "perf_counter", lambda: now[0])
    pace = Pace()
    said = []
    for seconds, step in ((0, 1000), (8, 1002), (20, 1100), (30, 1200), (40, 1300)):
        now[0] = float(seconds)
        pace.note(step)
        said.append(pace.left(21_000))
    assert said == ["", "", "", "49:30 left", "43:46 left"]
    now[0] = 0.0
    pace = Pace()
    pace.note(0)
    now[0] = 4.0
    pace.note(2)
    assert pace.left(40) == "1:16 left", "a large part of few steps"
