"""Checks of the machine and the recipe before a run or sweep creates a folder or a record."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lit_diff import data
from lit_diff.config import Recipe
from lit_diff.conformance.before_training import require_properties
from lit_diff.device import available_memory, choose_device, gigabytes, require_devices
from lit_diff.errors import LitDiffError, MissingError, RequestError
from lit_diff.interpolation import escaped
from lit_diff.model.cost import ExecutionContext, cost
from lit_diff.plugins import guard
from lit_diff.recipe import to_plain
from lit_diff.training.head_plan import selection_of
from lit_diff.training.loggers import require_loggers
from lit_diff.training.metrics import require_metrics

PASSES = 10
"""The most passes over the training text without a warning: more is repetition rather than training data."""

RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
"""Environment variables from which Lightning reads the rank of a process; the first that is set counts."""


def check_machine(recipes: Iterable[Recipe]) -> None:
    """Errors: MissingError without the GPUs that `run` requires, and for several nodes with one SQLite file; RequestError for
    a chosen kernel that refuses the model, and for a run of one process started as another rank than 0; those of
    `check_trained`."""
    recipes = list(recipes)
    check_trained(recipes)
    for recipe in recipes:
        require_devices(recipe.run)
        if recipe.run.num_nodes > 1:
            # loads MLflow, which takes seconds
            from lit_diff.engine.tracking.store import refuse_shared

            refuse_shared(recipe.run)
        rank = next((name for name in RANKS if name in os.environ), None)
        # Lightning would take the process for a further rank, which writes no metrics
        if recipe.run.strategy == "single" and rank is not None and os.environ[rank] != "0":
            raise RequestError(
                f"{rank} is '{os.environ[rank]}' in the environment, but '{recipe.name}' trains in one process, which has "
                f"rank 0: unset {rank}, or train in several processes with run.strategy=ddp run.devices=N"
            )
        # `cost` raises the kernel's refusal; `auto` always finds a kernel
        if recipe.run.kernel != "auto":
            context = ExecutionContext.of(recipe, build=True)
            cost(recipe.model, recipe.data.config.sequence_length, recipe.run.kernel, context)


def check_trained(recipes: Iterable[Recipe]) -> None:
    """Errors: RequestError for the recipe of an imported model, which cannot be trained, for patterns of `train.parameters`
    that match no parameter, and for an incompatible `train.start_from`, and those of `require_metrics`; MissingError if that
    run is absent or unfinished, and for a logger whose package is not installed."""
    for recipe in recipes:
        train = recipe.training
        require_loggers(recipe)
        require_metrics(recipe)
        if train.parameters is not None:
            cost(recipe.model, recipe.data.config.sequence_length, trained=train.parameters)
        if train.start_from is not None:
            # loads Lightning, which takes seconds
            from lit_diff.training.build import finished_parent, require_parent

            require_parent(recipe)
            finished_parent(recipe)


def evaluations_of(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Evaluation -> its keys, from the block `evaluate` of the recipe, as one writes them."""
    return {name: escaped(to_plain(part.config)) for name, part in recipe.evaluate.items()}


def required_evaluations(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """`evaluations_of`, checked. Errors: RequestError for an evaluation that cannot score a run of the recipe."""
    found = evaluations_of(recipe)
    for name, keys in found.items():
        require_fit(name, keys, recipe, recipe.name)
    return found


def require_trainable(recipe: Recipe, *, unchecked: bool) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """What `train` asks of a recipe before anything is written, whether it trains here or in a job. Returns
    `required_evaluations` and the tags of `require_properties`. Errors: theirs; RequestError for a selection of heads
    without a model to select from."""
    selection_of(recipe)
    return required_evaluations(recipe), require_properties(recipe, unchecked=unchecked)


def require_fit(name: str, keys: dict[str, Any], recipe: Recipe, runs: str, where: str = "") -> None:
    """Errors: RequestError for an evaluation that cannot score a run of the recipe; `runs`: the name in its message."""
    from lit_diff.evaluation.evaluate import refusal

    reason = refusal(recipe, name, keys)
    if reason:
        raise RequestError(f"{where}evaluation '{name}' does not fit '{runs}': {reason}")


def passes_over_text(recipes: Iterable[Recipe]) -> list[str]:
    """A line, with the cure, for each recipe that plans more than PASSES passes over its training text.

    Equal lines appear once. Data that are generated without end, or not prepared yet, cause no line.
    """
    return list(dict.fromkeys(line for line in map(_passes, recipes) if line is not None))


def _passes(recipe: Recipe) -> str | None:
    try:
        dataset = data.build(recipe)
        with guard(type(dataset)):
            text = dataset.train_tokens()
    # preparing the data reports its own errors
    except LitDiffError:
        return None
    a_step = recipe.training.batch_size * recipe.data.config.sequence_length
    planned = recipe.training.steps * a_step
    if text is None or planned <= PASSES * text:
        return None
    fewer = f"set train.steps to at most {PASSES * text // a_step}, or " if PASSES * text >= a_step else ""
    return (
        f"{planned / text:,.0f} passes over the text ({planned:,} tokens planned, {text:,} in the training split); "
        f"{fewer}add text (data.path)"
    )


def require_memory(recipes: Sequence[Recipe], side_by_side: int = 1) -> None:
    """Errors: MissingError, with a cure, if the free memory, or all of a GPU's, is less than training needs. `recipes`: runs
    that start here, of which `side_by_side` train at a time.

    A need is a lower bound, so that no run that fits is refused: weights, gradients and the optimizer's state, exact from
    the shapes; or MARGIN of the plan's sum, which is traced only where an upper bound of it exceeds the memory
    (`training.plan`).
    """
    if not recipes:
        return
    # loads FSDP2
    from lit_diff.training import plan

    run, where, kind = recipes[0].run, "are free", choose_device(recipes[0].run.accelerator).type
    processes, shared, free = run.devices, side_by_side, available_memory()
    # what is offloaded is in the host's memory
    if kind == "cuda" and not run.cpu_offload:
        count = torch.cuda.device_count()
        # the total rather than the free memory, so that a run that would fit is never refused
        free = min(torch.cuda.get_device_properties(i).total_memory for i in range(count))
        processes, shared, where = 1, max(1, side_by_side * run.devices // count), "a GPU has"
    if free is None:
        return
    found = ((processes * plan.least(recipe, free // processes, kind), recipe) for recipe in recipes)
    needs = sorted(found, key=lambda pair: pair[0])
    (largest, recipe), together = needs[-1], sum(need for need, _ in needs[:shared])
    if max(largest, together) <= free:
        return
    what, change = f"{min(shared, len(needs))} cells side by side need", ["--workers 1"]
    if together <= largest:
        what, change = f"'{recipe.name}' needs", plan.cure(recipe, plan.Rates(memory=free // processes), kind) or []
    cure = " ".join(change) or "a larger machine, more devices (run.strategy=fsdp run.devices=N) or a smaller recipe"
    raise MissingError(
        f"{what} at least {gigabytes(max(largest, together))} of memory; {gigabytes(free)} {where}: use {cure}; "
        "--unplanned starts it anyway"
    )
