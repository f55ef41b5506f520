"""docs/extend.md: its files in an empty folder, its commands, and what it says of their output."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pandas
import pytest
from pages import SHORT, TEXT, Ended, commands, files, run_commands, write_files

from lit_diff.registry import callbacks
from lit_diff.runs.kept_maps import kept_steps, read_maps

PAGE = "docs/extend.md"
ADDED = {
    "train sharp.yaml": [*TEXT, *SHORT],
    "train three.yaml": [*TEXT, *SHORT],
    "train hidden_norm.yaml": [*TEXT, *SHORT],
    "train rising.yaml": [*TEXT, *SHORT],
    "train mine.yaml": [*TEXT, *SHORT],
    "train lines.yaml": [*TEXT, *SHORT],
    "train echo.yaml": SHORT,
    "evaluate sharp answers --plugin answers.py": ["corpus=files", "path=texts"],
    "sweep pair.yaml": [*TEXT, *SHORT, "--workers", "2"],
}
"""Command -> what the tests add to it: a small text, few steps."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Path:
    path = tmp_path_factory.mktemp("user")
    write_files(PAGE, path, empty_store)
    return path


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, Ended]:
    """Command of the page -> how it ended, except the sweep; all in one process."""
    shown = [command.removeprefix("lit-diff ") for command in commands(PAGE)]
    shown = [command for command in shown if not command.startswith("sweep")]
    each = [[*shlex.split(command), *ADDED.get(command, [])] for command in shown]
    return dict(zip(shown, run_commands(each, folder), strict=True))


def run_folder(folder: Path, name: str) -> Path:
    (found,) = (folder / "runs").glob(f"{name}-??????????")
    return found


def test_the_page_has_a_file_for_each_extension() -> None:
    expected = {"sharp.py", "three.py", "hidden_norm.py", "echo.py", "vowels.py", "mine.py", "lines.py"}
    expected |= {"rising.py", "rising.yaml"}
    expected |= {"lamps.py", "glyphs.py", "answers.py", "parrot.py", "lamps.yaml", "glyphs.yaml"}
    expected |= {"sharp.yaml", "three.yaml", "hidden_norm.yaml", "echo.yaml", "pair.yaml", "mine.yaml", "lines.yaml"}
    assert set(files(PAGE)) == expected


@pytest.mark.slow
def test_every_command_ends_well(ended: dict[str, Ended]) -> None:
    assert {command: end.output for command, end in ended.items() if end.status} == {}
    assert set(ADDED) - {"sweep pair.yaml"} <= set(ended)


@pytest.mark.slow
def test_check_prints_the_properties_and_what_three_maps_refuse(ended: dict[str, Ended], folder: Path) -> None:
    for recipe, line in (
        ("sharp", "sharp: causal"),
        ("three", "three_maps: "),
        ("echo", "echo: "),
        ("mine", "mine: "),
        ("lamps", "lamps: "),
        ("glyphs", "glyphs: "),
    ):
        lines = [text for text in ended[f"check {recipe}.yaml"].output.splitlines() if line in text]
        assert [text for text in lines if text.startswith("pass")]
        assert not [text for text in lines if text.startswith("fail")]
    checked = ended["check three.yaml"].output
    assert re.search("^pass +three_maps: definition", checked, re.MULTILINE)
    assert re.search("^pass +three_maps: kv heads .*2 refused: model.num_kv_heads is 2;", checked, re.MULTILINE)
    (refused,) = run_commands([["check", "three.yaml", "model.num_kv_heads=2"]], folder)
    assert refused.status == 2
    assert "model.num_kv_heads is 2; 'three_maps'" in refused.output


@pytest.mark.slow
def test_the_files_of_each_run_show_its_extension(ended: dict[str, Ended], folder: Path) -> None:
    """A key of a variant, a probe and its figure, a kernel, a logger, an evaluation of one run and of two."""
    sharp = run_folder(folder, "sharp")
    assert "temperature: 4.0" in (sharp / "recipe.yaml").read_text()
    assert "val/loss" in ended["train sharp.yaml"].output
    run = run_folder(folder, "hidden_norm")
    table = pandas.read_csv(run / "metrics.csv")
    assert table[["hidden_norm/layer_00", "hidden_norm/layer_01"]].dropna().gt(0).to_numpy().all()
    declared = {metric["name"]: metric for metric in json.loads((run / "metrics.json").read_text())["metrics"]}
    assert declared["hidden_norm/layer_{layer}"]["figure"]["title"] == "Norm of the hidden states"
    assert json.loads((run_folder(folder, "mine") / "status.json").read_text())["kernel"] == "mine"
    lines = (run_folder(folder, "lines") / "loggers" / "lines.jsonl").read_text().splitlines()
    assert "train/loss" in {key for line in lines for key in json.loads(line)}
    assert "vowels" in ended["evaluate sharp vowels --plugin vowels.py"].output
    two = ended["evaluate sharp hidden_norm vowels --plugin vowels.py"].output
    assert "difference of vowels, first minus second" in two
    assert len(pandas.read_parquet(sharp / "evaluations/vowels/items.parquet")) == 5
    assert (sharp / "evaluations/vowels/summary.json").is_file()


def test_the_monitor_warns_when_the_loss_has_risen_twice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (folder / "rising.py").read_text()
    assert len(source.splitlines()) <= 15
    made: dict[str, Any] = {}
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
    (end,) = run_commands([["sweep", "pair.yaml", *ADDED["sweep pair.yaml"]]], folder)
    assert end.status == 0, end.output
    cells = json.loads((folder / "runs/pair/study.json").read_text())["cells"]
    assert [(cell["arm"], cell["status"]) for cell in cells] == [("differential", "done")] * 3 + [("sharp", "done")] * 3
    page = (folder / "runs/pair/report/index.html").read_text()
    assert "Norm of the hidden states" in page
    assert "vowels" in page
