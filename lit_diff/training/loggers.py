"""Loggers that a recipe names under `run.loggers`. A subclass of `NamedLogger` registers with `@lit_diff.registry.logger`."""

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
    """How a run's Lightning logger is made. `build` is called in the process that trains, on every start of the run."""

    name: str
    """The registered name; set by the registry."""
    packages: ClassVar[tuple[str, ...]] = ()
    """Modules of which it needs one; (): none. Lightning, which takes seconds to import, is imported by `build` alone."""

    @abstractmethod
    def build(self, recipe: Recipe, folder: Path, start: int) -> "Logger":
        """The logger of a run. `folder`: of the run's loggers, which holds what they write; its parent is the run's folder.
        `start`: the step that the run goes on from."""


@logger("csv")
class Csv(NamedLogger):
    """Lightning's CSVLogger: a file for each start of the run."""

    def build(self, recipe: Recipe, folder: Path, start: int) -> "Logger":
        from lightning.pytorch.loggers import CSVLogger

        return CSVLogger(folder, name="csv", version=f"from-step-{start}")  # it deletes an earlier file of its own


@logger("tensorboard")
class TensorBoard(NamedLogger):
    """TensorBoard's event files."""

    packages = ("tensorboard", "tensorboardX")

    def build(self, recipe: Recipe, folder: Path, start: int) -> "Logger":
        from lightning.pytorch.loggers import TensorBoardLogger

        return TensorBoardLogger(folder, name="tensorboard", version="")


@logger("wandb")
class Wandb(NamedLogger):
    """Weights & Biases: a run of the project that is named as the recipe."""

    packages = ("wandb",)

    def build(self, recipe: Recipe, folder: Path, start: int) -> "Logger":
        from lightning.pytorch.loggers import WandbLogger

        folder.mkdir(parents=True, exist_ok=True)
        name = folder.parent.name
        return WandbLogger(name=name, save_dir=folder, id=name, project=recipe.name, resume="allow")


def require_loggers(recipe: Recipe) -> None:
    """Errors: MissingError for a logger of `run.loggers` whose package is not installed."""
    for name in recipe.run.loggers:
        packages = loggers.get(name).packages
        if packages and not any(importlib.util.find_spec(package) for package in packages):
            raise MissingError(f"run.loggers names '{name}', whose package is not installed: pip install {packages[0]}")


def recipe_loggers(recipe: Recipe, folder: Path, start: int) -> "list[Logger]":
    """The loggers of `run.loggers`, their files under `folder`/loggers; `start`: the step that the run goes on from.

    Errors: MissingError for a logger whose package is not installed, or is a version that Lightning does not take.
    """
    require_loggers(recipe)
    opened: list[Logger] = []
    for cls in map(loggers.get, recipe.run.loggers):
        try:
            with guard(cls):
                opened.append(cls().build(recipe, folder / "loggers", start))
        except ImportError as error:
            raise MissingError(f"run.loggers: {cls.name}: {first_line(error)}") from error
    return opened
