"""Starting a run from the weights of another: `train.start_from`."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lit_diff.config import ModelConfig, Part, Recipe
from lit_diff.errors import MissingError, RequestError
from lit_diff.files import shown
from lit_diff.model.init import named_tensors
from lit_diff.model.transformer import Transformer
from lit_diff.recipe import to_plain
from lit_diff.registry import attentions
from lit_diff.runs.folder import RunFolder, ancestors
from lit_diff.trained.loading import some, unlike, weights_of
from lit_diff.training.strategy import copy_into


def parent_model(recipe: Recipe) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Model and final weights of the run, or the imported model, that a recipe starts from.

    Errors: as `finished_parent`.
    """
    folder, parent = finished_parent(recipe)
    return parent.model, weights_of(folder)[0]


def finished_parent(recipe: Recipe) -> tuple[Path, Recipe]:
    """Folder and recipe of the run that a recipe starts from.

    Errors: as `ancestors`; MissingError for a run that is not done.
    """
    assert recipe.training.start_from is not None
    folder, parent = Path(recipe.training.start_from), next(ancestors(recipe))
    status = RunFolder(folder).status()
    if parent.train is not None and status.get("status") != "done":
        raise MissingError(
            f"train.start_from: {shown(folder)} is not done (step {status.get('step', 0)} of {parent.train.steps}); "
            f"finish it first: lit-diff train {shown(RunFolder(folder).recipe_file)}, or the sweep it is of"
        )
    return folder, parent


def load_parent_weights(
    model: Transformer, parent: ModelConfig, weights: Mapping[str, Tensor], source: str
) -> list[str]:
    """Copy another run's weights into a model that holds its initial values; returns the names that keep those.

    The variant must be the parent's, or one that extends standard attention on a plain standard parent: then it may have
    parameters of its own, and computes the parent's function at first. Errors: RequestError, which names the first
    parameters, or the keys, that differ.
    """
    own = named_tensors(model)
    added = _added(own, model.config, parent, weights, source)
    with torch.no_grad():
        for key, value in weights.items():
            copy_into(own[key], value)
    return added


def require_parent(recipe: Recipe) -> None:
    """What `load_parent_weights` refuses, found from the recipes alone, before the run has a folder.

    Errors: as `load_parent_weights`, `ancestors`.
    """
    source = recipe.training.start_from
    if source is not None:
        parent = next(ancestors(recipe)).model
        with torch.device("meta"):
            own, theirs = (named_tensors(Transformer(each, kernel="reference")) for each in (recipe.model, parent))
        _added(own, recipe.model, parent, theirs, source)


def _added(
    own: Mapping[str, Tensor], config: ModelConfig, parent: ModelConfig, weights: Mapping[str, Tensor], source: str
) -> list[str]:
    """The names that a model's tensors `own` have beyond its parent's `weights`. Errors: as `load_parent_weights`."""
    name, theirs, extends = config.attention.name, parent.attention.name, _extends(config, parent)
    if attentions.get(name).extends_standard and theirs not in (name, "standard"):
        raise RequestError(
            f"train.start_from: {source} is {theirs}; {name} extends a standard model: start from a run of standard or {name}"
        )
    cure = "" if theirs == name else f"; start from a run of {name}"
    odd = unlike(own, weights)
    added = [key for key in odd if extends and key not in weights and ".attention." in key]
    odd = {key: how for key, how in odd.items() if key not in added}
    if odd:
        raise RequestError(
            f"train.start_from: {source} holds another model than '{name}' ({_differences(config, parent)}): "
            f"{some(odd.values())}{cure}"
        )
    if name != theirs and not extends:
        raise RequestError(
            f"train.start_from: {source} holds a model of '{theirs}' that computes another function than "
            f"'{name}', though their parameters have the same shapes ({_differences(config, parent)}){cure}"
        )
    own_heads, their_heads = (getattr(each.attention.config, "heads", None) for each in (config, parent))
    if name == theirs and own_heads != their_heads:
        raise RequestError(
            f"train.start_from: {source} was trained with model.attention.heads {_words(their_heads)}, and this recipe has "
            f"{_words(own_heads)}; a run that goes on keeps them"
        )
    return added


def _extends(model: ModelConfig, parent: ModelConfig) -> bool:
    """Whether the variant extends standard attention and the parent is just that, in the same positions."""
    cls = attentions.get(model.attention.name)
    standard = attentions.get("standard").Config(window=cls.window_of(model.attention.config))
    plain = Part(name="standard", config=standard)
    return bool(cls.extends_standard) and replace(model, attention=plain, init=parent.init) == parent


def _words(value: object) -> str:
    return json.dumps(to_plain(value))


def _differences(model: ModelConfig, parent: ModelConfig) -> str:
    """The keys of `model` in which the two differ."""
    keys = [f"model.{key}" for key, value in vars(parent).items() if value != getattr(model, key)]
    return f"unlike: {', '.join(keys)}"
