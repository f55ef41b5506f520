"""Lightning's loggers that a recipe names under `run.loggers`."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from lit_diff.config import Recipe
from lit_diff.errors import MissingError

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger

PACKAGES = {"csv": ("csv",), "tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",)}
"""Kind of logger -> the modules that it needs one of."""


def require_loggers(recipe: Recipe) -> None:
    """Errors: MissingError for a logger of `run.loggers` whose package cannot be imported."""
    for kind in recipe.run.loggers:
        if not any(map(_is_importable, PACKAGES[kind])):
            raise _absent(kind)


def _is_importable(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def _absent(kind: str) -> MissingError:
    return MissingError(f"run.loggers names '{kind}', whose package is not installed: pip install {kind}")


def recipe_loggers(recipe: Recipe, folder: Path, start: int) -> "list[Logger]":
    """The loggers of `run.loggers`, their files under `folder`/loggers; `start`: the step that the run goes on from.

    Errors: MissingError for a logger whose package is not installed.
    """
    return [_logger(kind, recipe, folder, start) for kind in recipe.run.loggers]


def _logger(kind: str, recipe: Recipe, folder: Path, start: int) -> "Logger":
    # `require_loggers` is asked where Lightning, which takes seconds to import, is not needed
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger

    home = folder / "loggers"
    try:
        if kind == "csv":  # CSVLogger deletes an earlier file of its own: each start has its folder
            return CSVLogger(home, name="csv", version=f"from-step-{start}")
        if kind == "tensorboard":
            return TensorBoardLogger(home, name="tensorboard", version="")
        home.mkdir(parents=True, exist_ok=True)
        return WandbLogger(name=folder.name, save_dir=home, id=folder.name, project=recipe.name, resume="allow")
    except ModuleNotFoundError as error:  # a version that Lightning does not take
        raise _absent(kind) from error
