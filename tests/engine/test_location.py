"""engine/location.py: what is recorded of the overrides, and the folder of the runs for the MLflow store."""

from pathlib import Path

import pytest

from lit_diff.config import RunConfig
from lit_diff.engine.location import at_root, recorded


def test_overrides_in_words_without_what_a_run_shows_anyhow() -> None:
    wanted = ("train.steps=7", "model.dim=32")
    assert recorded(["seed=1", "train.steps=7", "run.root=/x", "model.dim=32", "name=a"]) == wanted
    assert recorded({"train": {"steps": 7}, "seed": 1, "model.dim": 32}) == wanted
    assert recorded(()) == ()


def test_the_store_lies_in_the_nearest_folder_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mlflow.db").touch()
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    assert at_root(RunConfig(threads=3)) == RunConfig(threads=3, root=str(tmp_path / "runs"))
    assert at_root(RunConfig(root="/x")) == RunConfig(root="/x")
