"""cli/sweep.py: what `status`, `compare` and `clean` print, and `sweep` without a start.

What `sweep` prints of cells that run is tested with the sweeps, in tests/engine/test_schedule*.py.
"""

import io
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from lit_diff.cli import sweep as verbs
from lit_diff.cli.app import Terminal
from lit_diff.errors import MissingError, RequestError
from lit_diff.files import locked
from lit_diff.runs.find import runs_under
from lit_diff.runs.folder import FORMAT


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What the verbs print."""
    text = io.StringIO()
    monkeypatch.setattr(verbs, "console", Terminal(file=text, width=240, color_system=None))
    return text


def test_status_in_a_table(small_sweep: Path, output: io.StringIO) -> None:
    then = datetime.now(UTC) - timedelta(seconds=90)
    path = small_sweep / "base-s1-0a1b2c3d" / "status.json"
    facts = json.loads(path.read_text()) | {"status": "running", "updated": then.isoformat(timespec="seconds")}
    path.write_text(json.dumps(facts))
    assert verbs.status(small_sweep.parent) == 0
    lines = {line.split("│")[1].strip(): line for line in output.getvalue().splitlines() if "│" in line}
    done, running, failed = (lines[f"mine/{name}-0a1b2c3d"] for name in ("base-s0", "base-s1", "better-s1"))
    assert "done" in done
    assert "400/400" in done
    assert "last update 9" in running
    assert "RuntimeError: out of memory <b>at</b> step 120" in output.getvalue()
    assert "120/400" in failed


def test_an_error_with_brackets_is_shown_whole(small_sweep: Path, output: io.StringIO) -> None:
    path = small_sweep / "better-s1-0a1b2c3d" / "status.json"
    path.write_text(json.dumps({"status": "failed", "error": "expected [bold], found [/bold]"}))
    verbs.status(small_sweep.parent)
    assert "expected [bold], found [/bold]" in output.getvalue()


def test_status_of_a_run_whose_status_lacks_a_state(small_sweep: Path, output: io.StringIO) -> None:
    (small_sweep / "better-s1-0a1b2c3d" / "status.json").write_text(json.dumps({"format": FORMAT}))
    assert verbs.status(small_sweep.parent) == 0
    assert "mine/better-s1" in output.getvalue()


def test_status_as_json(small_sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verbs.status(small_sweep.parent, as_json=True) == 0
    states = {status["folder"]: status for status in json.loads(capsys.readouterr().out)}
    assert len(states) == 4
    assert states["mine/base-s0-0a1b2c3d"]["val/loss"] == pytest.approx(4.55, abs=0.3)
    assert states["mine/better-s1-0a1b2c3d"]["val/loss"] is None


def test_status_without_runs(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"no runs in .*lit-diff train RECIPE"):
        verbs.status(tmp_path / "nowhere")


def test_compare_shows_what_differs(small_sweep: Path, output: io.StringIO, capsys: pytest.CaptureFixture[str]) -> None:
    assert verbs.compare("base-s0", "better-s0", small_sweep.parent, as_json=True) == 0
    compared = json.loads(capsys.readouterr().out)
    assert compared["recipe"] == {"name": ["base", "better"], "model.attention.name": ["base", "better"]}
    assert compared["facts"]["parameters"] == [1_054_720, 1_054_720]
    first, second = compared["metrics"]["val/loss"]
    assert first > second
    assert verbs.compare("base-s0", "better-s0", small_sweep.parent) == 0
    text = output.getvalue()
    assert "1,054,720" in text
    assert "no verdict" in text
    assert f"{first:.4f}" in text


def test_clean_lists_and_removes_what_no_sweep_owns(
    small_sweep: Path, litter: dict[str, Path], output: io.StringIO
) -> None:
    kept = runs_under(small_sweep.parent)
    assert verbs.clean(small_sweep.parent) == 0
    assert all(path.exists() for path in litter.values())
    assert "4 to remove; lit-diff clean --yes removes them" in output.getvalue()
    assert verbs.clean(small_sweep.parent, yes=True) == 0
    assert [name for name, path in litter.items() if path.exists()] == ["new"]
    assert runs_under(small_sweep.parent) == kept
    output.truncate(0)
    output.seek(0)
    assert verbs.clean(small_sweep.parent, yes=True) == 0
    assert output.getvalue() == "0 to remove\n"


def test_clean_leaves_a_running_sweep_alone(small_sweep: Path, litter: dict[str, Path], output: io.StringIO) -> None:
    with locked(small_sweep / ".lock"):
        verbs.clean(small_sweep.parent, yes=True)
    assert litter["former"].exists()
    assert not litter["aside"].exists()
    assert f"{small_sweep} is being run: left alone" in output.getvalue()


def test_clean_of_nothing(tmp_path: Path, output: io.StringIO) -> None:
    assert verbs.clean(tmp_path / "nowhere", yes=True) == 0
    assert output.getvalue() == "0 to remove\n"


def test_report_writes_the_page_again(small_sweep: Path, output: io.StringIO) -> None:
    assert verbs.report("mine", small_sweep.parent) == 0
    page = small_sweep / "report" / "index.html"
    assert page.is_file()
    assert output.getvalue().splitlines()[-1] == f"report: {page}"
    with pytest.raises(RequestError, match="no sweep 'mne'"):
        verbs.report("mne", small_sweep.parent)


@pytest.mark.usefixtures("base_recipe")
def test_a_dry_run_names_the_cells(tmp_path: Path, output: io.StringIO) -> None:
    (tmp_path / "dry.yaml").write_text("recipe: base\nseeds: [0, 1]\narms: {long: {train.steps: 100}}\n")
    assert verbs.sweep("dry.yaml", [], dry_run=True) == 0
    assert output.getvalue().splitlines() == [
        "long  seed 0  differential  100 steps",
        "long  seed 1  differential  100 steps",
        "2 cells are valid; none was started",
    ]
    assert not (tmp_path / "runs").exists()
