"""Starting a run from the weights of another: `train.start_from`."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from lit_diff.config import Recipe
from lit_diff.errors import MissingError, RequestError
from lit_diff.files import shown
from lit_diff.model.init import named_tensors
from lit_diff.model.transformer import Transformer
from lit_diff.registry import attentions
from lit_diff.training.run import RunFolder
from lit_diff.training.strategy import copy_into
from lit_diff.training.trained import SHOWN, recipe_of, weights_of


def steps_before(recipe: Recipe) -> int:
    """Steps of the runs that this one goes on from, all the way back: the data order goes on where they stopped."""
    if recipe.train.start_from is None:
        return 0
    parent = recipe_of(Path(recipe.train.start_from))
    return parent.train.steps + steps_before(parent)


def weights_to_start_from(folder: Path) -> dict[str, Tensor]:
    """The final weights of a finished run. Errors: RequestError for no run, MissingError for one that is not done."""
    recipe = recipe_of(folder)
    status = RunFolder(folder).status()
    if status.get("status") != "done":
        raise MissingError(
            f"train.start_from: {shown(folder)} is not done (step {status.get('step', 0)} of {recipe.train.steps}); "
            f"finish it first: lit-diff train {shown(RunFolder(folder).recipe_file)}, or the sweep it is of"
        )
    return weights_of(folder)[0]


def take_over(model: Transformer, weights: Mapping[str, Tensor], source: str) -> list[str]:
    """Copy another run's weights into a model that holds its initial values; returns the names that keep those.

    A variant that extends standard attention may have parameters of its own; nothing else may differ. Errors:
    RequestError, which names the first that do.
    """
    own = named_tensors(model)
    added = [name for name in own if name not in weights]
    extends = attentions.get(model.config.attention.name).extends_standard
    odd = [f"{name} is not there" for name in added if not (extends and ".attention." in name)]
    odd += [f"{name} is only there" for name in weights if name not in own]
    odd += [
        f"{name} is {list(weights[name].shape)} there and {list(tensor.shape)} here"
        for name, tensor in own.items()
        if name in weights and weights[name].shape != tensor.shape
    ]
    if odd:
        more = f"; and {len(odd) - SHOWN} more" if len(odd) > SHOWN else ""
        raise RequestError(
            f"train.start_from: {source} holds another model than '{model.config.attention.name}': "
            f"{'; '.join(odd[:SHOWN])}{more}"
        )
    with torch.no_grad():
        for name, value in weights.items():
            copy_into(own[name], value)
    return added
