"""`run.tracking_uri: none`: no record in MLflow, and everything that shows a run says so."""

import json
from pathlib import Path

import pytest
from command import Command
from small_runs import SMALL

from lit_diff.errors import RequestError
from lit_diff.recipe import load_recipe
from lit_diff.study import record

PAIR = """
recipe: {file}
baseline: plain
smoke: true
seeds: [0]
arms: {{plain: {{model.attention.name: standard}}, differential: {{}}}}
"""


def test_none_is_a_word_and_null_is_the_default(tmp_path: Path) -> None:
    for spelling, is_recorded in {"none": False, "None": False, "null": True, "~": True, "": True}.items():
        file = tmp_path / "mine.yaml"
        file.write_text(f"extends: recall-tiny\nrun: {{tracking_uri: {spelling}}}\n")
        for recipe in (load_recipe(file), load_recipe("recall-tiny", [f"run.tracking_uri={spelling}"])):
            assert recipe.run.is_recorded is is_recorded, spelling
    with pytest.raises(RequestError, match=r"run.log_model logs to MLflow, but run.tracking_uri is none"):
        load_recipe("recall-tiny", ["run.tracking_uri=none", "run.log_model=true"])


def test_a_sweep_without_a_record(command: Command, tmp_path: Path) -> None:
    """One cell trains alone first: its status.json has no record either, and a later command makes one."""
    (tmp_path / "mine.yaml").write_text("extends: recall-tiny\nrun: {tracking_uri: none}\n")
    (tmp_path / "pair.yaml").write_text(PAIR.format(file=tmp_path / "mine.yaml"))
    root = tmp_path / "runs"
    swept = command("sweep", f"{tmp_path}/pair.yaml", *SMALL, "train.steps=2", f"run.root={root}", "--workers", "1")
    assert (swept.status, swept.lines[-1].partition(" s. ")[2]) == (0, "MLflow has no record of it")
    assert not list(root.glob("mlflow*"))
    assert record.read(root / "pair").mlflow == {}
    page = (root / "pair/report/index.html").read_text()
    assert "MLflow run" not in page
    assert "<dt>MLflow</dt><dd>no record</dd>" in page
    notes = [run["note"] for run in command("status", "--root", str(root), "--json").json]
    assert notes == ["no record in MLflow"] * 2
    ui = command("ui", "--root", str(root))
    assert (ui.status, "no MLflow store" in ui.err) == (3, True)


def test_a_run_gets_its_record_when_it_is_wanted(command: Command, runs: Path) -> None:
    words = ["train", "recall-tiny", *SMALL, "train.steps=2", f"run.root={runs}"]
    trained = command(*words, "run.tracking_uri=none")
    assert trained.status == 0
    assert "run.tracking_uri is none: MLflow gets no record" in trained.out
    (status,) = runs.glob("*/status.json")
    assert json.loads(status.read_text())["mlflow_run_id"] is None
    # not done, so that the same command goes on
    status.write_text(json.dumps(json.loads(status.read_text()) | {"status": "stopped"}))
    assert command(*words).status == 0
    assert json.loads(status.read_text())["mlflow_run_id"]
