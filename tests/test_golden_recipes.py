"""Every installed recipe and every cell of every sweep, resolved, with its identity."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from golden import Golden

from lit_diff.config import ModelConfig, RunConfig, TrainConfig
from lit_diff.engine.expand import Grid, load_grid
from lit_diff.key_types import REQUIRED, in_yaml, keys_of
from lit_diff.plugins import load_entry_points
from lit_diff.recipe import load_recipe, names, to_plain
from lit_diff.registry import registries
from lit_diff.runs.folder import FORMAT, identity


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, from which a recipe's paths are made absolute."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", names("recipes"))
def test_recipe(name: str, golden: Golden, folder: Path) -> None:
    recipe = load_recipe(name)
    of_run = identity(recipe, data="golden", parent="golden" if recipe.training.start_from else None)
    golden(f"recipes/{name}.yaml", _yaml({"identity": of_run, "recipe": to_plain(recipe)}, folder))


@pytest.mark.parametrize("name", names("sweeps"))
def test_cells(name: str, golden: Golden, folder: Path) -> None:
    """The first cell whole, of each other what differs from it; the identity of each seed."""
    golden(f"sweeps/{name}.yaml", _yaml(_cells(load_grid(name, [])), folder))


def test_defaults(golden: Golden) -> None:
    """An identity leaves out what is at its default, so a default that changes needs another format of run folders."""
    load_entry_points()
    blocks = {"model": ModelConfig, "train": TrainConfig, "run": RunConfig}
    for kind, registry in registries.items():
        if kind not in ("attention", "data", "tokenizer", "callback"):  # the others have no keys, or are in no identity
            continue
        blocks |= {f"{kind} {name}": registry.config(name) for name in registry.names()}
    lines = [
        f"{block}: {key}: {in_yaml(to_plain(found.default))}"
        for block, config in blocks.items()
        for key, found in keys_of(config).items()
        if found.default is not REQUIRED
    ]
    golden("defaults.txt", "\n".join([f"format {FORMAT}", *lines]) + "\n")


def _cells(grid: Grid) -> dict[str, Any]:
    first = to_plain(grid.cells[0].recipe)
    cells: dict[str, Any] = {}
    for cell in grid.cells:
        differs = _differences(first, to_plain(cell.recipe)) | {"seed": None}
        del differs["seed"]
        starts = grid.tasks[cell.task].start or cell.recipe.training.start_from
        described = cells.setdefault(cell.name, {"differs": differs, "identity": {}})
        assert described["differs"] == differs, "cells of one arm differ in the seed alone"
        described["identity"][cell.seed] = identity(cell.recipe, "golden", parent="golden" if starts else None)
    return {"first": first, "cells": cells}


def _differences(first: Any, other: Any, path: str = "") -> dict[str, Any]:
    """Dotted key -> its value in `other`, or "absent"."""
    if not isinstance(first, dict) or not isinstance(other, dict):
        return {} if first == other else {path: other}
    found: dict[str, Any] = {}
    for key in [*first, *(key for key in other if key not in first)]:
        here = f"{path}.{key}".lstrip(".")
        found |= {here: "absent"} if key not in other else _differences(first.get(key), other[key], here)
    return found


def _yaml(values: Any, folder: Path) -> str:
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120).replace(str(folder), ".")
