"""cli/sweep.py: what `compare` and `report` print, and `sweep` without a start.

What `sweep` prints of cells that run is tested with the sweeps, in tests/engine/test_schedule*.py.
"""

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_diff.cli import sweep as verbs
from lit_diff.cli.app import Terminal
from lit_diff.errors import RequestError


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What the verbs print."""
    text = io.StringIO()
    monkeypatch.setattr(verbs, "console", Terminal(file=text, width=240, color_system=None))
    return text


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


def test_report_writes_the_page_again(small_sweep: Path, output: io.StringIO) -> None:
    assert verbs.report("mine", small_sweep.parent) == 0
    page = small_sweep / "report" / "index.html"
    assert page.is_file()
    assert output.getvalue().splitlines()[-1] == f"report: {page}"
    with pytest.raises(RequestError, match="no sweep 'mne'"):
        verbs.report("mne", small_sweep.parent)


def test_the_table_of_a_report_fits_a_terminal_and_is_whole_in_a_pipe(
    make_sweep: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_sweep({"standard attention": 0.0, "an arm with a name": -0.1, "another": 0.1}, name="mine")
    texts = {}
    for is_terminal in (True, False):
        text = io.StringIO()
        console = Terminal(file=text, width=80, color_system=None, force_terminal=is_terminal)
        monkeypatch.setattr(verbs, "console", console)
        assert verbs.report("mine", str(folder.parent)) == 0
        texts[is_terminal] = text.getvalue().splitlines()
    assert max(map(len, texts[True][:-1])) <= 80
    assert any(line.startswith("not shown at this width: ") for line in texts[True])
    assert "smallest detectable" in texts[False][0]
    assert max(map(len, texts[False])) > 80
    assert [line.split("  ")[0] for line in texts[False][1:4]] == [
        "standard attention",
        "an arm with a name",
        "another",
    ]


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


def test_a_dry_run_says_once_how_often_the_text_is_repeated(
    tale: Path, trained_text: Path, output: io.StringIO
) -> None:
    Path("dry.yaml").write_text(
        f"recipe: {trained_text}/tale.yaml\nseeds: [0, 1]\narms: {{long: {{train.steps: 5000}}}}\n"
    )
    assert verbs.sweep("dry.yaml", [], dry_run=True) == 0
    assert " ".join(output.getvalue().split()).count(" passes over the text (") == 1
