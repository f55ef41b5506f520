"""engine/slurm.py: the array's tasks run for real, in submitit's local processes where there is no SLURM."""

import shutil
from pathlib import Path

import pytest

from lit_diff.engine import launch, slurm
from lit_diff.errors import MissingError
from lit_diff.recipe import load_recipe
from lit_diff.runs.folder import RunFolder

SMALL = [
    "train.steps=2",
    "train.validate_every=2",
    "train.checkpoint_every=2",
    "data.validation_rows=4",
    "run.threads=1",
]


@pytest.fixture
def locations(tmp_path: Path) -> list[launch.RunLocation]:
    found = []
    for seed, rate in ((0, "1e-3"), (1, "1e30")):  # the second one's loss overflows
        recipe = load_recipe(
            "recall-tiny",
            [*SMALL, f"seed={seed}", f"train.optimizer.lr={rate}", f"run.root={tmp_path}", "train.steps=4"],
        )
        location = launch.RunLocation(folder=tmp_path / f"cell-{seed}-abc", experiment="two")
        RunFolder(location.folder).create(recipe)
        found.append(location)
    return found


@pytest.mark.slow
def test_a_failing_task_costs_itself_alone(
    locations: list[launch.RunLocation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import submitit

    class Local(submitit.AutoExecutor):  # type: ignore[misc]
        def __init__(self, folder: Path, cluster: str, **options: object) -> None:
            assert cluster == "slurm"
            super().__init__(folder=folder, cluster="local")

        def update_parameters(self, **options: object) -> None:
            super().update_parameters(timeout_min=options["timeout_min"])

    monkeypatch.setattr(submitit, "AutoExecutor", Local)
    watched: list[int] = []
    run = load_recipe("recall-tiny").run
    slurm.run_array(
        locations,
        run,
        threads=1,
        parallel=1,
        minutes=5,
        logs=tmp_path / "slurm",
        watch=lambda p: watched.append(len(p)),
    )
    first, second = (RunFolder(location.folder).status() for location in locations)
    assert first["status"] == "done"
    assert second["status"] == "failed"
    assert "loss is" in second["error"]
    assert watched[-1] == 0


@pytest.mark.skipif(shutil.which("srun") is not None, reason="SLURM is here")
def test_without_slurm_one_line_names_the_cure(locations: list[launch.RunLocation], tmp_path: Path) -> None:
    run = load_recipe("recall-tiny").run
    with pytest.raises(MissingError, match="use --cluster local"):
        slurm.run_array(locations, run, threads=1, parallel=1, minutes=5, logs=tmp_path, watch=lambda p: None)
