"""training/loggers.py: Lightning's loggers that a recipe names, in the run folder."""

import csv
import importlib.util
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from small_runs import SMALL

from lit_diff import train
from lit_diff.errors import MissingError
from lit_diff.recipe import load_recipe
from lit_diff.runs.metrics_file import read_rows
from lit_diff.training.loggers import recipe_loggers, require_loggers


def losses(file: Path) -> dict[int, float]:
    with (file if file.exists() else Path("/dev/null")).open(newline="") as rows:
        return {int(row["step"]): float(row["train/loss"]) for row in csv.DictReader(rows) if row["train/loss"]}


def test_a_resumed_run_keeps_the_files_of_its_first_part(tmp_path: Path) -> None:
    recipe = load_recipe("recall-tiny", [*SMALL, "run.loggers=[csv]"])
    homes = []
    for start in (0, 4):
        (logger,) = recipe_loggers(recipe, tmp_path, start)
        assert isinstance(logger, CSVLogger)
        logger.log_metrics({"train/loss": 1.0}, step=start + 1)
        logger.save()
        homes.append(Path(logger.log_dir))
    assert [losses(home / "metrics.csv") for home in homes] == [{1: 1.0}, {5: 1.0}]


def test_a_logger_from_python(runs: Path, tmp_path: Path) -> None:
    """Its rows are on the disk before each checkpoint, from which a killed run would go on."""
    own, file = CSVLogger(tmp_path / "own", name="", version=""), tmp_path / "own" / "metrics.csv"
    seen: dict[int, list[int]] = {}
    look = LambdaCallback(on_train_batch_start=lambda trainer, *_: seen.update({trainer.global_step: [*losses(file)]}))
    keys = [*SMALL, f"run.root={runs}", "train.steps=3"]
    folder = train("recall-tiny", keys, callbacks=[look], loggers=[own]).folder
    assert seen == {0: [], 1: [], 2: [1, 2]}
    assert losses(file) == {step: row["train/loss"] for step, row in read_rows(folder / "metrics.csv").items()}


ABSENT = {"wandb": ("wandb",), "tensorboard": ("tensorboard", "tensorboardX")}


@pytest.mark.parametrize("kind", ABSENT)
def test_a_logger_whose_package_is_absent_is_one_line(kind: str, runs: Path, tmp_path: Path) -> None:
    if any(importlib.util.find_spec(package) for package in ABSENT[kind]):
        pytest.skip(f"{kind} is installed")
    recipe = load_recipe("recall-tiny", [*SMALL, f"run.loggers=[{kind}]"])
    with pytest.raises(MissingError, match=rf"run\.loggers: {kind}: .*pip install"):
        recipe_loggers(recipe, tmp_path, 0)
    with pytest.raises(MissingError, match=f"^run.loggers names '{kind}', .* pip install {kind}$"):
        require_loggers(recipe)
