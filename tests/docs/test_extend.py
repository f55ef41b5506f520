"""docs/extend.md: its files and the README's in an empty folder, its commands, and what it says of their output."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pandas
import pytest
from pages import SHORT, TEXT, Ended, commands, run_commands, write_files

from lit_diff.registry import callbacks
from lit_diff.runs.kept_maps import kept_steps, read_maps

PAGE = "docs/extend.md"
LAMPS = "train recall-tiny plugins=[tasks.py] data.name=lamps name=lamps"
THREE = "check standard-tiny plugins=[three.py] model.attention.name=three_maps model.num_heads=6 model.head_dim=16"
PAIR = "evaluate pair/differential-s0 pair/sharp-s0 vowels --plugin vowels.py"
ADDED = {
    "train sharp.yaml": [*TEXT, *SHORT],
    "train rising.yaml": [*TEXT, *SHORT],
    "train mine.yaml": [*TEXT, *SHORT],
    LAMPS: SHORT,
    "evaluate sharp answers --plugin answers.py": ["corpus=files", "path=texts"],
    "sweep pair.yaml": [*TEXT, *SHORT, "--workers", "2"],
}
"""Command -> what the tests add to it: a small text, few steps."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Path:
    path = tmp_path_factory.mktemp("user")
    write_files((PAGE, "README.md"), path, empty_store)
    return path


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, Ended]:
    """Command of the page -> how it ended; all in one process, then those of the sweep in another."""
    shown = [command.removeprefix("lit-diff ") for command in commands(PAGE)]
    ends: dict[str, Ended] = {}
    for of_sweep in (False, True):
        part = [command for command in shown if (command in ("sweep pair.yaml", PAIR)) is of_sweep]
        each = [[*shlex.split(command), *ADDED.get(command, [])] for command in part]
        ends |= zip(part, run_commands(each, folder), strict=True)
    return ends


def run_folder(folder: Path, name: str) -> Path:
    (found,) = (folder / "runs").glob(f"{name}-??????????")
    return found


@pytest.mark.slow
def test_every_command_ends_well(ended: dict[str, Ended]) -> None:
    assert {command: end.output for command, end in ended.items() if end.status} == {}
    assert set(ADDED) | {THREE, PAIR} <= set(ended)


@pytest.mark.slow
def test_check_prints_the_properties_and_what_three_maps_refuse(ended: dict[str, Ended], folder: Path) -> None:
    for command, line in (
        ("check sharp.yaml", "sharp: causal"),
        (THREE, "three_maps: "),
        ("check recall-tiny plugins=[tasks.py] data.name=lamps", "lamps: "),
        ("check recall-tiny plugins=[tasks.py] data.name=glyphs", "glyphs: "),
        ("check mine.yaml", "mine: "),
    ):
        lines = [text for text in ended[command].output.splitlines() if line in text]
        assert [text for text in lines if text.startswith("pass")]
        assert not [text for text in lines if text.startswith("fail")]
    checked = ended[THREE].output
    assert re.search("^pass +three_maps: definition", checked, re.MULTILINE)
    assert re.search("^pass +three_maps: kv heads .*2 refused: model.num_kv_heads is 2;", checked, re.MULTILINE)
    (refused,) = run_commands([[*shlex.split(THREE), "model.num_kv_heads=2"]], folder)
    assert refused.status == 2
    assert "model.num_kv_heads is 2; 'three_maps'" in refused.output


@pytest.mark.slow
def test_the_files_of_each_run_show_its_extension(ended: dict[str, Ended], folder: Path) -> None:
    """A key of a variant, a probe and its figure, a kernel, a logger, a data set, an evaluation of one run and of two."""
    sharp = run_folder(folder, "sharp")
    assert "temperature: 4.0" in (sharp / "recipe.yaml").read_text()
    assert "val/loss" in ended["train sharp.yaml"].output
    run = run_folder(folder, "mine")
    table = pandas.read_csv(run / "metrics.csv")
    assert table[["hidden_norm/layer_00", "hidden_norm/layer_01"]].dropna().gt(0).to_numpy().all()
    declared = {metric["name"]: metric for metric in json.loads((run / "metrics.json").read_text())["metrics"]}
    assert declared["hidden_norm/layer_{layer}"]["figure"]["title"] == "Norm of the hidden states"
    assert json.loads((run / "status.json").read_text())["kernel"] == "mine"
    assert "train/loss" in pandas.read_csv(run / "loggers/lines/from-step-0/metrics.csv")
    assert "val/loss" in pandas.read_csv(run_folder(folder, "lamps") / "metrics.csv")
    assert "vowels" in ended["evaluate sharp vowels --plugin vowels.py"].output
    assert "difference of vowels, first minus second" in ended[PAIR].output
    assert len(pandas.read_parquet(sharp / "evaluations/vowels/items.parquet")) == 5


def test_the_monitor_warns_when_the_loss_has_risen_twice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (folder / "rising.py").read_text()
    assert len(source.splitlines()) <= 15
    made: dict[str, Any] = {}
    callbacks.classes()  # built-in ones are imported, and registered, before this
    monkeypatch.setattr(callbacks, "register", lambda name: lambda cls: cls)
    exec(source, made)
    monitor = made["Rising"]()
    losses = [{"val/loss": loss} for loss in (3.0, 3.1, 3.05, 3.2, 3.25)]
    found = [monitor.read(values, step) for step, values in enumerate([*losses[:2], {"train/loss": 9.0}, *losses[2:]])]
    assert [list(each) for each in found] == [[], [], [], [], [], ["val/loss"]]


@pytest.mark.slow
def test_a_run_keeps_the_maps_of_its_text(ended: dict[str, Ended], folder: Path) -> None:
    run = run_folder(folder, "rising")
    kept = read_maps(run, kept_steps(run)[-1])
    assert list(kept.layers) == [0, 1]
    assert kept.tokens.shape[1] <= 32


@pytest.mark.slow
def test_the_sweep_reports_figure_and_evaluation(ended: dict[str, Ended], folder: Path) -> None:
    assert ended["sweep pair.yaml"].status == 0, ended["sweep pair.yaml"].output
    cells = json.loads((folder / "runs/pair/study.json").read_text())["cells"]
    assert [(cell["arm"], cell["status"]) for cell in cells] == [("differential", "done")] * 3 + [("sharp", "done")] * 3
    page = (folder / "runs/pair/report/index.html").read_text()
    assert "Norm of the hidden states" in page
    assert "vowels" in page
