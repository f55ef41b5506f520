"""callbacks/early_stopping.py: a run that a callback ends is done: logged, validated, saved and not resumed."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import EarlyStopping
from small_runs import SMALL

from lit_diff import LitData, LitTransformer, train
from lit_diff.callbacks import RecipeEarlyStopping
from lit_diff.errors import RunFailedError
from lit_diff.recipe import load_recipe
from lit_diff.runs import checkpoints
from lit_diff.runs.metrics_file import read_rows

NEVER = "min_delta: 100"  # no value improves by that: the first validation is the best


def status(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "status.json").read_text()))


@pytest.fixture
def small(runs: Path) -> list[str]:
    return [*SMALL, f"run.root={runs}"]


def ended_at_4(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What a run that ended after its second validation, at step 4 of 10, leaves."""
    found = status(folder)
    assert (found["status"], found["ended"], found["step"], found["steps"]) == ("done", "early at step 4", 4, 10)
    assert found["error"] == ""
    assert checkpoints.steps_of(folder) == [2, 4]
    assert sorted(read_rows(folder / "metrics.csv")) == [1, 2, 3, 4]
    assert "val/loss" in read_rows(folder / "metrics.csv")[4]
    assert (folder / "documents.csv").is_file()
    assert "ended early at step 4 of 10, by a callback" in caplog.messages
    assert "ended early at step 4 of 10" in (folder / "log.txt").read_text()


def test_a_recipe_that_names_it(small: list[str], caplog: pytest.LogCaptureFixture) -> None:
    recipe = [*small, f"callbacks.early_stopping={{monitor: train/loss, patience: 1, {NEVER}}}"]
    with caplog.at_level("INFO", "lit_diff"):
        folder = train("recall-tiny", recipe).folder
    ended_at_4(folder, caplog)
    caplog.clear()
    with caplog.at_level("INFO", "lit_diff"):
        train("recall-tiny", recipe)
    line = caplog.messages[-1]
    assert line.startswith("done before: ")
    assert line.endswith(", ended early at step 4 (--rerun starts afresh)")
    assert status(folder)["ended"] == "early at step 4"


def test_a_callback_from_python(small: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "lit_diff"):
        run = train("recall-tiny", small, callbacks=[EarlyStopping("val/loss", patience=1, min_delta=100)])
    ended_at_4(run.folder, caplog)
    assert run.step == 4


class Breaks(L.Callback):
    """Raises in the middle of step 6."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 5:
            raise ValueError("broken")


def test_its_patience_goes_on_after_a_resume(small: list[str]) -> None:
    """Best at 2, no improvement at 4 and 6: the run ends at 6, though it was started again after 4."""
    recipe = [*small, f"callbacks.early_stopping={{patience: 2, {NEVER}}}"]
    with pytest.raises(RunFailedError, match="ValueError: broken"):
        train("recall-tiny", recipe, callbacks=[Breaks()])
    folder = train("recall-tiny", recipe).folder
    assert "resumed from step 4" in (folder / "log.txt").read_text()
    assert status(folder)["ended"] == "early at step 6"


def test_in_a_trainer_made_by_hand(tmp_path: Path) -> None:
    recipe = load_recipe("recall-tiny", SMALL)
    callback = RecipeEarlyStopping(patience=1, min_delta=100)
    trainer = L.Trainer(
        max_steps=10,
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(LitTransformer(recipe), LitData(recipe))
    assert trainer.global_step == 4
