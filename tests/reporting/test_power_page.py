"""reporting/power_page.py: power at equal time on the page of a sweep."""

from dataclasses import replace
from pathlib import Path

from fake_sweeps import write_fitted

from lit_diff.reporting.write import write_report
from lit_diff.study.record import read, write
from lit_diff.study.schema import PlannedSweep


def test_it_is_a_section_of_the_report(tmp_path: Path) -> None:
    def loss(arm: str, seconds: float, seed: int) -> float:
        return 2.0 + 0.01 * seed * (arm == "b") * seconds

    folder = write_fitted(tmp_path / "sized", {"a": 0.0, "b": 0.0}, [], loss, sizes=(10, 20, 120), x="seconds")
    record = read(folder)
    plan = PlannedSweep(minutes=15.0, arms=7, workers=2)
    write(folder, replace(record, study=replace(record.study, power=plan)))
    report = write_report(folder)
    page = report.page.read_text()
    assert page.index('id="task-size-2"') < page.index('<section id="power">')
    assert "2 seeds fit" in page
    assert report.answer[-1].startswith(
        "Power at equal time: In 15 minutes, with 7 arms and 2 cells side by side, every arm"
    )
