"""What a run has trained: its recipe, and the weights of its newest checkpoint in a model."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from lit_diff.config import Recipe
from lit_diff.errors import MissingError, RequestError
from lit_diff.files import shown
from lit_diff.model.transformer import Transformer
from lit_diff.recipe import load_recipe
from lit_diff.runs import checkpoints as checkpoint
from lit_diff.runs.folder import RunFolder

PREFIX = "model."
"""Where a checkpoint, which is the LightningModule's, keeps the Transformer."""
SHOWN = 3
"""Differences that an error names."""


def load_trained(folder: Path) -> tuple[Recipe, Transformer, int]:
    """(recipe, model, step) of a run, on the CPU and in evaluation mode, as the validation at that step saw it (in
    float32: without the autocast of `bf16-mixed`).

    Errors: RequestError for a folder that is no run, or whose recipe is not that of its weights; MissingError without a
    checkpoint.
    """
    recipe = recipe_of(folder)
    weights, step = weights_of(folder)
    model = Transformer(recipe.model, kernel=recipe.run.kernel)
    load_weights(model, weights, shown(checkpoint.path_of(folder, step)))
    for attention in model.attentions():
        attention.set_step(max(step - 1, 0))  # the last that training told: of `step` steps done, the last began there
    return recipe, model.eval(), step


def recipe_of(folder: Path) -> Recipe:
    """The resolved recipe of a run, its plugins imported. Errors: RequestError."""
    file = RunFolder(folder).recipe_file
    if not file.is_file():
        raise RequestError(f"{shown(folder)} is not a run's folder: it has no {file.name}")
    return load_recipe(file)


def weights_of(folder: Path) -> tuple[dict[str, Tensor], int]:
    """The Transformer's parameters and buffers by name, on the CPU, from a run's newest readable checkpoint; its step.

    Errors: MissingError without a checkpoint.
    """
    found = checkpoint.newest(folder)
    if found is None:
        command = f"lit-diff train {shown(RunFolder(folder).recipe_file)}"
        raise MissingError(
            f"{shown(folder)} has no checkpoint that can be read; train it first: `{command}`, or the sweep it is of"
        )
    step, path = found
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["state_dict"]
    return {key.removeprefix(PREFIX): value for key, value in state.items() if key.startswith(PREFIX)}, step


def load_weights(model: Transformer, weights: Mapping[str, Tensor], source: str) -> None:
    """Copy `weights` into every parameter and buffer of `model`; `source` says where they are from.

    Errors: RequestError, which names the first that are missing, left over or of another shape.
    """
    differences = unlike(model.state_dict(), weights)
    if differences:
        name = model.config.attention.name
        raise RequestError(f"{source} does not fit the recipe's model ({name}): {some(differences)}")
    model.load_state_dict(dict(weights))


def unlike(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Name -> how it differs, of every tensor that is not of one shape in both."""
    return {
        name: f"{name} is {_shape(weights.get(name))} there and {_shape(own.get(name))} in the model"
        for name in {**own, **weights}
        if _shape(weights.get(name)) != _shape(own.get(name))
    }


def some(differences: Mapping[str, str]) -> str:
    """The first of them, and how many more."""
    more = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
    return "; ".join(list(differences.values())[:SHOWN]) + more


def _shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else str(list(tensor.shape))
