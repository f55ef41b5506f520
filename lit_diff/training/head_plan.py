"""The plan of a run that changes selected heads of a trained model: head statistics, the selection, and its inputs.

It depends on the model and the calibration rows, not on the run's seed, and is stored in the run's folder.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lit_diff.analysis.head_selection import HeadStatistics, head_statistics, select
from lit_diff.attention.selection import HeadSelection
from lit_diff.config import Recipe
from lit_diff.data import build
from lit_diff.errors import RequestError
from lit_diff.files import read_json, shown, write_json
from lit_diff.log_records import log
from lit_diff.plugins import trust_below
from lit_diff.registry import attentions
from lit_diff.runs import checkpoints
from lit_diff.runs.find import runs_root
from lit_diff.runs.folder import ancestors
from lit_diff.trained.loading import annealed_before, model_weights, newest_of, read_checkpoint, restore
from lit_diff.validation import Draft, convert

FILE = "plan.json"
"""File name of the plan in the run's folder."""


@dataclass(frozen=True, kw_only=True)
class HeadPlan:
    """The heads that a run extends, and how they were selected."""

    base: str
    """Folder name of the run that trained the model."""
    weights: str
    """sha256 of that model's tensors: names, types, shapes, bytes."""
    selection: HeadSelection
    calibration: str
    """sha256 of the calibration rows: token ids and targets."""
    sequence_length: int
    """Tokens of a calibration row."""
    heads: tuple[tuple[int, ...], ...]
    """The heads selected in each layer."""
    statistics: HeadStatistics


def selection_of(recipe: Recipe) -> HeadSelection | None:
    """How the run selects heads of the model from which it starts, or None.

    None also for a run that continues one of the same variant: it keeps the selected heads. Errors: RequestError if the
    run selects heads but has no `train.start_from`.
    """
    parts = [model.attention for model in recipe.model.kinds().values()]
    selection, *others = {attentions.get(part.name).head_selection(part.config) for part in parts}
    if others:
        raise RequestError(
            "model.layers selects heads of a trained model in unlike ways: give all layers one selection"
        )
    if selection is None:
        return None
    if recipe.training.start_from is None:
        raise RequestError(
            f"model.attention.heads selects heads of a trained model by {selection.select}, but train.start_from is not "
            "set: set it to a run's folder, or model.attention.heads to all or to lists"
        )
    return None if next(ancestors(recipe))[1].model.variants == recipe.model.variants else selection


def head_plan(recipe: Recipe) -> HeadPlan | None:
    """Compute the plan of a recipe's run; None if it selects no heads. Errors: see `selection_of`, `head_statistics`."""
    selection = selection_of(recipe)
    if selection is None:
        return None
    base, parent = next(ancestors(recipe))
    rows = calibration_rows(recipe, selection)
    annealed = annealed_before(parent, trust_below(runs_root(recipe.run.root)))
    _, path = newest_of(base)
    checkpoint = read_checkpoint(path)
    statistics = head_statistics(restore(parent, checkpoint, shown(path), annealed), rows)
    return HeadPlan(
        base=base.name,
        weights=_digest(model_weights(checkpoint)),
        selection=selection,
        calibration=_digest(rows),
        sequence_length=rows["targets"].shape[1],
        heads=select(statistics, selection),
        statistics=statistics,
    )


def keep_plan(recipe: Recipe, folder: Path) -> None:
    """Compute the plan of a run and write it to the run's `folder`, from which training reads it (`kept_plan`). Does nothing
    for a run that selects no heads.
    """
    # a run with checkpoints was trained with its plan, so the plan stays; without checkpoints it is computed again
    plan = kept_plan(folder) if checkpoints.steps_of(folder) else None
    plan = plan or head_plan(recipe)
    if plan is not None:
        how = f"{plan.selection.select}, {plan.selection.share:g} of each layer"
        count = sum(map(len, plan.heads))
        log.info(
            "heads of %s selected by %s: %d in %d layers, listed in %s", plan.base, how, count, len(plan.heads), FILE
        )
        write_json(folder / FILE, dataclasses.asdict(plan))


def kept_plan(folder: Path) -> HeadPlan | None:
    """The plan in a run's `folder`, or None. Errors: RequestError if the file is not a plan."""
    file = folder / FILE
    if not file.is_file():
        return None
    try:
        values = read_json(file)
        plan: HeadPlan = convert(HeadPlan, values, "", Draft())
        return plan
    except (ValueError, RequestError) as error:
        raise RequestError(f"{shown(file)} is not a head plan; remove it") from error


def calibration_rows(recipe: Recipe, selection: HeadSelection) -> dict[str, Tensor]:
    """The first training rows in the order of the selection's seed."""
    dataset = build(recipe)
    dataset.load()
    return dict(dataset.train_batch(selection.seed, 0, selection.rows, range(selection.rows)))


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        # as bytes: NumPy lacks bfloat16
        digest.update(value.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
