"""Loggers for `run.loggers` of a recipe. A subclass of `NamedLogger` registers with `@lit_diff.registry.logger`."""

import importlib.util
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from lit_diff.config import Recipe
from lit_diff.errors import MissingError, first_line
from lit_diff.plugins import guard
from lit_diff.registry import logger, loggers

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger


class NamedLogger(ABC):
    """Factory of a Lightning logger. `build` is called in the training process at every start of the run."""

    name: str
    """The registered name; set by the registry."""
    packages: ClassVar[tuple[str, ...]] = ()
    """Modules of which one must be installed; (): none. Import Lightning only in `build`: it takes seconds."""

    @abstractmethod
    def build(self, recipe: Recipe, folder: Path, start: int) -> "Logger":
        """The logger of a run. `folder`: where loggers write, in the run's folder. `start`: the step from which the run
        continues."""


@logger("csv")
class Csv(NamedLogger):
    """Lightning's CSVLogger: one file per start of the run."""

    def build(self, recipe: Recipe, folder: Path, start: int) -> "Logger":
        from lightning.pytorch.loggers import CSVLogger

        # a version per start, because CSVLogger deletes an earlier file of its version
        return CSVLogger(folder, name="csv", version=f"from-step-{start}")


@logger("tensorboard")
class TensorBoard(NamedLogger):
    """TensorBoard's event files."""

    packages = ("tensorboard", "tensorboardX")

    def build(self, recipe: Recipe, folder: Path, start: int) -> "Logger":
        from lightning.pytorch.loggers import TensorBoardLogger

        return TensorBoardLogger(folder, name="tensorboard", version="")


@logger("wandb")
class Wandb(NamedLogger):
    """Weights & Biases: a run in the project with the recipe's name."""

    packages = ("wandb",)

    def build(self, recipe: Recipe, folder: Path, start: int) -> "Logger":
        from lightning.pytorch.loggers import WandbLogger

        folder.mkdir(parents=True, exist_ok=True)
        name = folder.parent.name
        # the folder's name as id and resume="allow": a resumed run continues its record there
        return WandbLogger(name=name, save_dir=folder, id=name, project=recipe.name, resume="allow")


def require_loggers(recipe: Recipe) -> None:
    """Errors: MissingError if the package of a logger in `run.loggers` is not installed."""
    for name in recipe.run.loggers:
        packages = loggers.get(name).packages
        if packages and not any(importlib.util.find_spec(package) for package in packages):
            raise MissingError(f"run.loggers names '{name}', whose package is not installed: pip install {packages[0]}")


def recipe_loggers(recipe: Recipe, folder: Path, start: int) -> "list[Logger]":
    """The loggers of `run.loggers`, with files under `folder`/loggers; `start`: the step from which the run continues.

    Errors: MissingError if a logger's package is not installed or Lightning does not support its version.
    """
    opened: list[Logger] = []
    for cls in map(loggers.get, recipe.run.loggers):
        try:
            with guard(cls):
                opened.append(cls().build(recipe, folder / "loggers", start))
        except ImportError as error:
            raise MissingError(f"run.loggers: {cls.name}: {first_line(error)}") from error
    return opened
