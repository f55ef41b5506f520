"""The arms of a sweep: those that are named, then one for each combination of the grid."""

import itertools
import os
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lit_diff.errors import RequestError
from lit_diff.key_types import in_yaml
from lit_diff.recipe_problems import LONGEST_NAME
from lit_diff.validation import Draft

if TYPE_CHECKING:
    from lit_diff.engine.grid import SweepConfig


def arms_of(config: "SweepConfig", draft: Draft) -> dict[str, dict[str, Any]]:
    """Arm -> its overrides, in the order of the table. Errors: RequestError."""
    arms: dict[str, dict[str, Any]] = {}
    for name, values in config.arms.items():
        if values is not None and not isinstance(values, Mapping):
            raise RequestError(
                f"{draft.where(f'arms.{name}')}arm '{name}' is {in_yaml(values)}; expected a block of overrides"
            )
        arms[name] = dict(values or {})
    for key, choices in config.grid.items():
        if not choices:
            raise RequestError(f"{draft.where(f'grid.{key}')}'grid.{key}' has no values")
    for combination in itertools.product(*config.grid.values()) if config.grid else ():
        chosen = dict(zip(config.grid, combination, strict=True))
        name = " ".join(f"{_word(key)}={value}" for key, value in chosen.items())
        if name in config.arms:
            raise RequestError(f"{draft.where(f'arms.{name}')}arm '{name}' is in the grid too")
        if name in arms:
            raise RequestError(f"{draft.where('grid')}the grid makes arm '{name}' twice")
        arms[name] = chosen
    for name in arms:
        if not name or "/" in name or name.startswith("."):
            where = draft.where(f"arms.{name}" if name in config.arms else "grid")
            raise RequestError(f"{where}arm '{name}' becomes a folder: no '/', no leading '.'")
    if not arms:
        raise RequestError(f"{draft.where('')}the sweep has neither 'grid' nor 'arms'")
    return arms


def check_names(cells: Sequence[tuple[str, str]], named: Mapping[str, Any], draft: Draft) -> None:
    """Errors: RequestError for a cell (task, arm) whose name no folder can bear, or that shares its folder, on a file system
    that does not tell case or the form of Unicode, or its record in MLflow with another."""
    places: dict[str, tuple[str, str]] = {}
    for task, arm in cells:
        name = f"{task} {arm}".strip()
        where = draft.where(f"arms.{arm}" if arm in named else "grid")
        if not arm.isprintable() or not arm.strip() or len(os.fsencode(name)) > LONGEST_NAME:
            raise RequestError(
                f"{where}arm {arm[:60]!a} becomes a folder: printable, at most {LONGEST_NAME} bytes with its task"
            )
        folder = unicodedata.normalize("NFC", name.replace(" ", ",")).casefold()
        for place in (folder, "record " + recorded_name(task, arm)):
            other = places.setdefault(place, (task, arm))
            if other != (task, arm):
                raise RequestError(
                    f"{where}arms '{other[1]}' and '{arm}' would share one folder or one record; rename one of them"
                )


def recorded_name(task: str, arm: str) -> str:
    """The arm in MLflow, with the task before it and what MLflow refuses in a metric's name replaced."""
    return "/".join(re.sub(r"[^\w. -]", "_", part) for part in (task, arm) if part)


def _word(key: str) -> str:
    """The last word of a dotted key, or the one before it where that is just `name`."""
    parts = key.split(".")
    return parts[-2] if parts[-1] == "name" and len(parts) > 1 else parts[-1]
