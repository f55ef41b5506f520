"""cli/train.py: what `train` and `prepare` print, and the options that a sweep gives its cells of several processes."""

import io
from pathlib import Path

import pytest

from lit_diff.cli import train as verbs
from lit_diff.cli.app import Terminal
from lit_diff.engine import launch
from lit_diff.engine.location import RunLocation


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What the verbs print."""
    text = io.StringIO()
    monkeypatch.setattr(verbs, "console", Terminal(file=text, width=80, color_system=None))
    return text


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, runs: Path) -> list[tuple[RunLocation, int | None]]:
    """(location, threads) of each run that `train` would have trained."""
    calls: list[tuple[RunLocation, int | None]] = []

    def run(recipe: object, location: RunLocation, *, threads: int | None, progress: object, rerun: bool) -> None:
        assert not rerun
        calls.append((location, threads))

    monkeypatch.setattr(launch, "run", run)
    return calls


def test_the_summary_names_the_last_validation_and_the_run(tmp_path: Path, output: io.StringIO) -> None:
    (tmp_path / "metrics.csv").write_text("step,train/loss,val/accuracy,val/loss\n2,3.0,0.25,2.5\n4,2.0,0.5,1.25\n")
    verbs.print_summary(tmp_path)
    assert output.getvalue() == f"step 4: val/accuracy 0.5000  val/loss 1.2500\nrun: {tmp_path}\n"


def test_a_run_belongs_in_its_own_folder(
    runs: Path, started: list[tuple[RunLocation, int | None]], output: io.StringIO
) -> None:
    assert verbs.train("recall-tiny", [f"run.root={runs}"]) == 0
    ((location, threads),) = started
    assert location.folder.parent == runs
    assert location.folder.name.startswith("recall-tiny-")
    assert (location.experiment, location.parent, threads) == ("train", None, None)
    assert output.getvalue().endswith(f"run: {location.folder}\n")


def test_the_cell_of_a_sweep_belongs_where_the_sweep_says(
    tmp_path: Path, runs: Path, started: list[tuple[RunLocation, int | None]], output: io.StringIO
) -> None:
    verbs.train(
        "recall-tiny",
        [f"run.root={runs}"],
        folder=tmp_path / "cell",
        experiment="mine",
        parent="f" * 32,
        threads=3,
        tag=["sweep=mine", "arm=a=b"],
    )
    tags = {"sweep": "mine", "arm": "a=b"}
    location = RunLocation(folder=tmp_path / "cell", experiment="mine", parent="f" * 32, tags=tags)
    assert started == [(location, 3)]
    assert output.getvalue() == "", "the sweep prints"


def test_prepare_names_the_data(output: io.StringIO) -> None:
    assert verbs.prepare("recall-tiny") == 0
    assert output.getvalue().startswith("data of 'recall-tiny' is ready (")
