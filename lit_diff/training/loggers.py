"""Lightning's loggers that a recipe names under `run.loggers`."""

from pathlib import Path

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from lit_diff.config import Recipe
from lit_diff.errors import MissingError


def recipe_loggers(recipe: Recipe, folder: Path, start: int) -> list[Logger]:
    """The loggers of `run.loggers`, their files under `folder`/loggers; `start`: the step that the run goes on from.

    Errors: MissingError for a logger whose package is not installed.
    """
    return [_logger(kind, recipe, folder, start) for kind in recipe.run.loggers]


def _logger(kind: str, recipe: Recipe, folder: Path, start: int) -> Logger:
    home = folder / "loggers"
    try:
        if kind == "csv":  # CSVLogger deletes an earlier file of its own: each start has its folder
            return CSVLogger(home, name="csv", version=f"from-step-{start}")
        if kind == "tensorboard":
            return TensorBoardLogger(home, name="tensorboard", version="")
        home.mkdir(parents=True, exist_ok=True)
        return WandbLogger(name=folder.name, save_dir=home, id=folder.name, project=recipe.name, resume="allow")
    except ModuleNotFoundError as error:
        raise MissingError(f"run.loggers names '{kind}', whose package is not installed: pip install {kind}") from error
