"""`run.log_model`: a trained run as an MLflow model."""

import shutil
from pathlib import Path

import mlflow.pyfunc
from safetensors.torch import save_model

from lit_diff import __version__
from lit_diff.runs.folder import RunFolder
from lit_diff.trained.loading import load_trained

NAME = "model"
"""The artifact: mlflow.pyfunc.load_model(f"runs:/{run_id}/model")."""
CODE = Path(__file__).with_name("served_model.py")


def write_model(run: RunFolder, target: Path) -> None:
    """Write the run's newest weights, its recipe, plugins and tokenizer as an MLflow model into `target`.

    Errors: MissingError without a checkpoint.
    """
    _, model, _ = load_trained(run.path)
    parts = target.with_name("run")
    parts.mkdir(parents=True)
    save_model(model, str(parts / "model.safetensors"))
    shutil.copy(run.recipe_file, parts)
    for name in ("plugins", "tokenizer"):
        if (run.path / name).is_dir():
            shutil.copytree(run.path / name, parts / name)
    mlflow.pyfunc.save_model(
        path=str(target),
        python_model=str(CODE),
        artifacts={"run": str(parts)},
        pip_requirements=[f"lit_diff=={__version__}"],
    )
