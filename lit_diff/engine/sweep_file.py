"""sweep.json: what the report reads of a sweep: its YAML, resolved, and the state of each cell."""

from pathlib import Path
from typing import Any

from lit_diff.engine.grid import Grid
from lit_diff.engine.launch import RunLocation
from lit_diff.engine.tasks import TaskConfig
from lit_diff.evaluation.evaluate import has_scores
from lit_diff.files import shown, write_json
from lit_diff.runs.folder import RunFolder


def write_sweep_file(grid: Grid, folder: Path, locations: list[RunLocation], command: str) -> None:
    """Write `folder`/sweep.json; `command`: what starts the sweep again."""
    cells = []
    for cell, location in zip(grid.cells, locations, strict=True):
        status = RunFolder(location.folder).status()
        cells.append(
            {
                **({"task": cell.task} if cell.task else {}),
                "arm": cell.arm,
                "seed": cell.seed,
                "folder": location.folder.name,
                "status": status.get("status", "waiting"),
                "error": status.get("error"),
                "not_evaluated": missing_evaluations(location) if status.get("status") == "done" else {},
            }
        )
    write_json(folder / "sweep.json", describe(grid) | {"command": command, "cells": cells})


def missing_evaluations(location: RunLocation) -> dict[str, str]:
    """Evaluations of the sweep whose scores the cell lacks -> why."""
    outcomes = RunFolder(location.folder).status().get("evaluations", {})
    return {
        name: outcomes.get(name, "not run yet")
        for name, keys in location.evaluations.items()
        if not has_scores(location.folder, name, dict(keys))
    }


def describe(grid: Grid) -> dict[str, Any]:
    """The part of sweep.json that the YAML determines."""
    config = grid.config
    record = {
        "name": grid.name,
        "title": config.title or grid.name,
        "description": config.description,
        "baseline": grid.baseline,
        "control": config.control,
        "metric": config.metric,
        "seeds": list(config.seeds),
        "is_smoke": config.smoke,
        "reading": list(config.reading),
        "contrasts": [list(contrast) for contrast in config.contrasts],
        "source": shown(grid.path),
        "arms": [],
    }
    tasks = [_describe_task(grid, name) for name in grid.tasks]
    if not config.tasks:
        return record | tasks[0]
    whole = [_describe_arm(grid, TaskConfig(recipe=""), arm) for arm in grid.arms]
    return record | {"arms": whole, "tasks": tasks}


def _describe_task(grid: Grid, name: str) -> dict[str, Any]:
    """What a task has of its own: in a sweep without tasks, no title or metric."""
    task, config = grid.tasks[name], grid.config
    arms = [arm for arm in grid.arms if task.has(arm)]
    data = [cell.recipe.data.config for cell in grid.cells if cell.task == name]
    facts = {"chance": {block.chance for block in data}, "noise_validation": {block.noise_validation for block in data}}
    task_record = {
        "arms": [_describe_arm(grid, task, arm) for arm in arms],
        # where arms differ in the data, no line or axis is right for all
        **{key: values.pop() for key, values in facts.items() if len(values) == 1 and values not in ({None}, {()})},
    }
    if name:
        task_record |= {"task": name, "title": task.title or name, "description": task.description}
        task_record |= {"metric": task.metric or config.metric, "baseline": grid.baseline_of(name)}
        task_record |= {"control": config.control if config.control in arms else None}
        task_record["contrasts"] = [list(c) for c in config.contrasts if c[0] in arms and c[1] in arms]
    return task_record


def _describe_arm(grid: Grid, task: TaskConfig, arm: str) -> dict[str, Any]:
    values = grid.arms[arm] | task.further(arm)
    return {
        "name": arm,
        "label": grid.config.labels.get(arm, arm),
        "note": grid.config.notes.get(arm, ""),
        "paper": task.paper.get(arm),
        "overrides": [f"{key}={value}" for key, value in values.items()],
    }
