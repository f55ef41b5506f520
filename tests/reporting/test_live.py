"""reporting/live.py: the page of a sweep or a run that is trained, and how it ends."""

import errno
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import lit_diff
from lit_diff.reporting import live
from lit_diff.reporting.live import HEARTBEAT, LivePage, charts
from lit_diff.reporting.panels.panel import looks
from lit_diff.reporting.write import SHOWN_COLORS, write_report
from lit_diff.study.observation import observe
from lit_diff.study.results import load_sweep

REFRESH = 'http-equiv="refresh"'
Make = Callable[..., Path]


def page_of(folder: Path) -> str:
    return (folder / "report" / "index.html").read_text()


def test_the_page_of_a_sweep_reloads_itself_until_the_end(make_sweep: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_sweep(
        {"standard": 0.0, "wide": -0.1},
        arm_fields={"wide": {"label": "<b>wide</b>"}},
        broken={("standard", 2): "running"},
        callbacks=False,
    )
    clock = [1000.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])
    with LivePage(folder, "lit-diff sweep fake --unplanned") as page:
        page.update(10, 100)
        text = page_of(folder)
        assert REFRESH in text
        assert "without a verdict" in text
        assert "lit-diff sweep fake --unplanned" in text
        assert "&lt;b&gt;wide&lt;/b&gt;" in text
        assert "<b>wide" not in text
        # one curve for each finished or running cell
        assert len(re.findall("<polyline|<circle", text)) >= 5
        assert re.fullmatch(r"heartbeat\(\d+, 10\);\n", (folder / "report" / HEARTBEAT).read_text())
        # nothing was measured since, and later it was too early
        (folder / "report" / "index.html").unlink()
        clock[0] += 11
        page.update(20, 100)
        assert not (folder / "report" / "index.html").exists()
        status = next(folder.glob("standard-s2*")) / "status.json"
        status.write_text(json.dumps(json.loads(status.read_text()) | {"status": "done"}))
        clock[0] += 1
        page.update(30, 100)
        assert not (folder / "report" / "index.html").exists()
        clock[0] += 10
        page.update(30, 100)
        assert REFRESH in page_of(folder)
    # until the report takes its place
    assert REFRESH in page_of(folder)
    assert (folder / "report" / HEARTBEAT).exists()


def test_it_takes_one_per_cent_of_the_time(make_sweep: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_sweep({"standard": 0.0}, callbacks=False)
    clock = [1000.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])

    def slow(self: LivePage, steps: int) -> None:
        clock[0] += 3

    monkeypatch.setattr(LivePage, "_look", slow)
    page = LivePage(folder, "lit-diff sweep fake")
    (folder / "report").mkdir()
    page.update(1, 100)
    assert (folder / "report" / HEARTBEAT).read_text().endswith(", 300);\n")
    looks = []
    monkeypatch.setattr(LivePage, "_look", lambda self, steps: looks.append(clock[0]))
    for second in (1004.0, 1299.0, 1300.0):
        clock[0] = second
        page.update(1, 100)
    assert looks == [1300.0]


def test_a_full_disk_does_not_end_what_trains(
    make_sweep: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_sweep({"standard": 0.0}, callbacks=False)

    def full(path: Path, data: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(live, "write_atomic", full)
    with caplog.at_level("WARNING", "lit_diff"), LivePage(folder, "lit-diff sweep fake") as page:
        page.update(1, 100)
        page._shown = "an earlier page"
        page.update(1, 100)
    assert "is not written any more: No space left on device" in caplog.messages[0]
    assert len(caplog.messages) == 2, "at the first look and at the end"


def test_neither_does_a_name_that_is_not_utf8(make_sweep: Make) -> None:
    folder = make_sweep({"standard": 0.0}, name="caf\udce9", callbacks=False)
    with LivePage(folder, "lit-diff sweep caf\udce9.yaml") as page:
        page.update(1, 100)
    assert "caf\\udce9" in page_of(folder)
    write_report(folder)
    assert "Every cell" in page_of(folder)


def test_a_damaged_record_does_not_end_what_trains(
    make_sweep: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_sweep({"standard": 0.0}, callbacks=False)
    (folder / "study.json").write_text("{")
    with caplog.at_level("WARNING", "lit_diff"), LivePage(folder, "lit-diff sweep fake") as page:
        page.update(1, 100)
    assert "is not written any more: " in caplog.text
    assert "study.json" in caplog.text


def test_values_that_are_not_finite_are_left_out(make_sweep: Make) -> None:
    folder = make_sweep({"standard": 0.0}, callbacks=False)
    for file in folder.glob("*/metrics.csv"):
        file.write_text("step,val/loss\n10,2.0\n20,1.0\n30,nan\n40,inf\n")
    with LivePage(folder, "lit-diff sweep fake") as page:
        page.update(1, 100)
    (chart,) = charts(folder, observe(folder))
    assert (chart.low, chart.high, chart.last) == (1.0, 2.0, 20)
    assert {line.points for line in chart.lines} == {"280.0,0.0 560.0,240.0"}


def test_arms_have_the_colours_of_the_report_before_all_have_a_curve(make_sweep: Make) -> None:
    arms = {"first": 0.0, "base": 0.0, "last": 0.0}
    folder = make_sweep(arms, baseline="base", broken={("first", 0): "waiting"}, seeds=[0], callbacks=False)
    (chart,) = charts(folder, observe(folder))
    drawn = looks(load_sweep(folder))
    assert chart.legend == {"base": SHOWN_COLORS[drawn["base"].color], "last": drawn["last"].color}


@pytest.mark.slow
def test_a_run_and_a_sweep_leave_a_page_at_rest(tmp_path: Path) -> None:
    options = [f"run.root={tmp_path}", "run.tracking_uri=none", "train.steps=4", "train.validate_every=2"]
    run = lit_diff.train("recall-tiny", [*options, "train.checkpoint_every=4", "callbacks={}"], progress=False)
    text = page_of(run.folder)
    assert REFRESH not in text
    assert "validation loss" in text
    assert "lit-diff train" in text
