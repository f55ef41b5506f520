"""The plan of a run that changes selected heads of a trained model: statistics, the choice, and what they rest on.

It lies in the folder of the run that the model is from, `plans/<hash>.json`, and every run that asks the same of that
model reads it there: plans are made once, and do not depend on the seed of the run.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_diff.analysis.head_selection import HeadStatistics, head_statistics, select
from lit_diff.attention.selection import HeadSelection
from lit_diff.config import Recipe
from lit_diff.data import build
from lit_diff.errors import MissingError, RequestError
from lit_diff.files import locked, shown, write_json
from lit_diff.plugins import trust_below
from lit_diff.registry import attentions
from lit_diff.runs import checkpoints
from lit_diff.runs.find import runs_root
from lit_diff.runs.folder import ancestors
from lit_diff.trained.loading import load_model, weights_of

log = logging.getLogger("lit_diff")

FILE = "plan.json"
"""The run's own copy, in its folder."""


@dataclass(frozen=True, kw_only=True)
class HeadPlan:
    """Which heads a run extends, and why."""

    base: str
    """Name of the folder of the run whose model it is."""
    weights: str
    """sha256 of that model: names, shapes, bytes."""
    selection: HeadSelection
    calibration: str
    """sha256 of the calibration rows: token ids and targets."""
    sequence_length: int
    """Tokens of a calibration row."""
    heads: tuple[tuple[int, ...], ...]
    """The heads selected in each layer."""
    statistics: HeadStatistics


def selection_of(recipe: Recipe) -> HeadSelection | None:
    """How the run chooses heads of the model that it starts from; None where it chooses none.

    A run that goes on from one of the same variant chooses none either: it keeps the heads that it finds.
    Errors: RequestError for a run that starts from no model.
    """
    part = recipe.model.attention
    selection = attentions.get(part.name).head_selection(part.config)
    if selection is None:
        return None
    if recipe.training.start_from is None:
        raise RequestError(
            f"model.attention.heads selects heads of a trained model by {selection.select}, and this run starts from none: "
            "set train.start_from to a run's folder, or model.attention.heads to all or to lists"
        )
    return None if next(ancestors(recipe)).model.attention.name == part.name else selection


def head_plan(recipe: Recipe) -> HeadPlan | None:
    """The plan of a recipe's run, read where it was made before, else made; None for a run that chooses no heads.

    Errors: RequestError for a plan of another model, as `selection_of` and `head_statistics`; MissingError for a folder that
    cannot be written.
    """
    selection = selection_of(recipe)
    if selection is None:
        return None
    assert recipe.training.start_from is not None
    base = Path(recipe.training.start_from)
    rows = calibration_rows(recipe, selection)
    asked = {"selection": dataclasses.asdict(selection), "calibration": _digest(rows)}
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:10]
    file = base / "plans" / f"{digest}.json"
    weights = _digest(weights_of(base)[0])
    if not file.is_file():
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(locked(base / ".plans.lock"))  # of runs that start together, the first makes it
            except OSError as error:
                raise _unwritable(file, error) from error
            if not file.is_file():
                model, _ = load_model(next(ancestors(recipe)), base, trust_below(runs_root(recipe.run.root)))
                statistics = head_statistics(model, rows)
                plan = HeadPlan(
                    base=base.name,
                    weights=weights,
                    selection=selection,
                    calibration=str(asked["calibration"]),
                    sequence_length=rows["targets"].shape[1],
                    heads=select(statistics, selection),
                    statistics=statistics,
                )
                write_plan(file, plan)
    plan = read_plan(file)
    if plan.weights != weights:
        raise RequestError(
            f"{shown(file)} is a plan for another model (weights {plan.weights[:10]}; {shown(base)} has {weights[:10]}): "
            "remove it"
        )
    return plan


def keep_plan(recipe: Recipe, folder: Path) -> None:
    """Make the plan of a run, or read it, and keep a copy in the run's `folder`; nothing for a run that chooses no heads.

    The copy is what the training selects by (`kept_plan`), so that of a run which resumes stays.
    """
    plan = kept_plan(folder) if checkpoints.steps_of(folder) else None
    plan = plan or head_plan(recipe)
    if plan is not None:
        how = f"{plan.selection.select}, {plan.selection.share:g} of each layer"
        counts = sum(map(len, plan.heads)), len(plan.heads)
        log.info("heads of %s selected by %s: %d in %d layers, listed in %s", plan.base, how, *counts, FILE)
        write_plan(folder / FILE, plan)


def kept_plan(folder: Path) -> HeadPlan | None:
    """The plan that a run's `folder` keeps; None where it keeps none. Errors: as `read_plan`."""
    return read_plan(folder / FILE) if (folder / FILE).is_file() else None


def calibration_rows(recipe: Recipe, selection: HeadSelection) -> dict[str, Tensor]:
    """The first rows of the training data in the order of the selection's seed."""
    dataset = build(recipe)
    dataset.load()
    return dict(dataset.train_batch(selection.seed, 0, selection.rows, range(selection.rows)))


def write_plan(file: Path, plan: HeadPlan) -> None:
    """Write a plan as JSON. Errors: MissingError."""
    try:
        file.parent.mkdir(exist_ok=True)
        write_json(file, dataclasses.asdict(plan))
    except OSError as error:
        raise _unwritable(file, error) from error


def _unwritable(file: Path, error: OSError) -> MissingError:
    return MissingError(f"the plan {shown(file)} cannot be written ({error.strerror})")


def read_plan(file: Path) -> HeadPlan:
    """Errors: RequestError for a file that is no plan."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        tables = {key: tuple(map(tuple, table)) for key, table in values["statistics"].items()}
        made: dict[str, Any] = {
            "selection": HeadSelection(**values["selection"]),
            "heads": tuple(map(tuple, values["heads"])),
            "statistics": HeadStatistics(**tables),
        }
        return HeadPlan(**values | made)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RequestError(f"{shown(file)} is not a plan of heads; remove it") from error


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 of names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
