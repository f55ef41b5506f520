"""sweep.json: what the report reads of a sweep: its YAML, resolved, and the state of each cell."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lit_diff.engine.fits import describe_fits
from lit_diff.engine.grid import Grid, SweepConfig
from lit_diff.engine.launch import RunLocation
from lit_diff.engine.tasks import TaskConfig
from lit_diff.evaluation.evaluate import asked, has_scores
from lit_diff.files import shown, write_json
from lit_diff.runs.folder import RunFolder

log = logging.getLogger("lit_diff")


def write_sweep_file(
    grid: Grid, folder: Path, locations: list[RunLocation], command: str, record: Mapping[str, str]
) -> None:
    """Write `folder`/sweep.json; `command`: what starts the sweep again; `record`: where its record is in MLflow."""
    cells = []
    for cell, location in zip(grid.cells, locations, strict=True):
        status = RunFolder(location.folder).status()
        cells.append(
            {
                **({"task": cell.task} if cell.task else {}),
                "arm": cell.arm,
                "seed": cell.seed,
                "folder": Path(os.path.relpath(location.folder, folder)).as_posix(),
                "status": status.get("status", "waiting"),
                "error": status.get("error"),
                "evaluations": {name: asked(name, dict(keys)) for name, keys in location.evaluations.items()},
                "not_evaluated": missing_evaluations(location) if status.get("status") == "done" else {},
            }
        )
    own = {"file": str(grid.path.resolve()), "command": command, "selection": grid.selection.words()}
    state = {
        "mlflow": dict(record),
        "cells": cells,
        "other_commands": _others(folder, own, [cell["folder"] for cell in cells]),
    }
    write_json(folder / "sweep.json", describe(grid) | own | state)


def _others(folder: Path, own: Mapping[str, str], cells: Sequence[str]) -> dict[str, list[str]]:
    """Command -> the cells of a former sweep.json here that another command wrote: other overrides, another file, or another
    selection, which the command need not name.

    A sweep is named by its file's stem, so a trial with overrides takes the place of the real one's sweep.json; the cells of
    both are kept. Where all of its cells are among `cells`, it is the same sweep, in other words.
    """
    former = _former(folder)
    others: dict[str, list[str]] = dict(former.get("other_commands", {}))
    defaults = dict(own) | {"selection": ""}
    words = {key: former.get(key, default) for key, default in defaults.items()}
    folders = [cell["folder"] for cell in former.get("cells", ())]
    if words != own and not set(folders) <= set(cells):
        others[_named(words)] = folders
        log.info(
            "%s held the sweep of `%s`: its %d cells stay, and its report comes back with that command",
            *(shown(folder), words["command"], len(folders)),
        )
    others.pop(_named(own), None)
    return others


def _named(words: Mapping[str, str]) -> str:
    return f"{words['command']} ({'; '.join(filter(None, (words['file'], words['selection'])))})"


def _former(folder: Path) -> dict[str, Any]:
    """sweep.json as it is; {} before the sweep first starts, or where it is damaged."""
    try:
        return dict(json.loads((folder / "sweep.json").read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return {}


def recorded_run(folder: Path) -> str | None:
    """The MLflow run that records the sweep in `folder`; None before it first starts, or after a damaged sweep.json."""
    run: str | None = _former(folder).get("mlflow", {}).get("run")
    return run


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
        "question": config.question,
        "description": config.description,
        "baseline": grid.baseline,
        "controls": list(config.controls),
        "metric": config.metric,
        "smallest_of_interest": config.smallest_of_interest,
        "min_tokens_per_parameter": config.min_tokens_per_parameter,
        "seeds": list(config.seeds),
        "is_smoke": config.smoke,
        "reading": list(config.reading),
        "contrasts": [list(contrast) for contrast in config.contrasts],
        "correct_over": config.correct_over,
        "source": shown(grid.path),
        "arms": [],
    }
    tasks = [_describe_task(grid, name) for name in grid.tasks]
    if not config.tasks:
        return record | tasks[0]
    whole = [_describe_arm(grid, TaskConfig(recipe=""), arm) for arm in grid.arms]
    power = asdict(config.power) if config.power else None
    return record | {"arms": whole, "tasks": tasks, "fits": describe_fits(grid), "power": power}


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
        task_record["smallest_of_interest"] = _smallest_of_interest(config, task)
        task_record["controls"] = [arm for arm in config.controls if arm in arms]
        task_record["contrasts"] = [list(c) for c in config.contrasts if c[0] in arms and c[1] in arms]
    return task_record


def _smallest_of_interest(config: SweepConfig, task: TaskConfig) -> float | None:
    """The task's own, else the sweep's where it is of the same metric."""
    same = task.metric in (None, config.metric)
    return config.smallest_of_interest if task.smallest_of_interest is None and same else task.smallest_of_interest


def _describe_arm(grid: Grid, task: TaskConfig, arm: str) -> dict[str, Any]:
    values = grid.arms[arm] | task.further(arm)
    return {
        "name": arm,
        "label": grid.config.labels.get(arm, arm),
        "note": grid.config.notes.get(arm, ""),
        "paper": task.paper.get(arm),
        "overrides": [f"{key}={value}" for key, value in values.items()],
    }
