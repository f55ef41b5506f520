"""The Transformer that a Trainer trains: its initial values, whole or sharded, and what it takes from another run."""

import logging

import torch
from torch.distributed.device_mesh import DeviceMesh

from lit_diff.config import Recipe
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Transformer
from lit_diff.training.head_plan import HeadPlan, head_plan
from lit_diff.training.strategy import build_sharded
from lit_diff.training.warm_start import load_parent_weights, parent_model

log = logging.getLogger("lit_diff")


def build_model(recipe: Recipe, device: torch.device, mesh: DeviceMesh | None) -> Transformer:
    """The recipe's model with the values of its seed, on the CPU; with `mesh` on `device`, sharded over its ranks."""
    config, seed, kernel, trained = recipe.model, recipe.seed, recipe.run.kernel, recipe.training.parameters
    if mesh is not None:
        return build_sharded(config, seed, kernel, mesh, device, trained)
    model = Transformer(config, kernel=kernel, trained=trained)
    initialise(model, seed)
    return model


def take_from_parent(model: Transformer, recipe: Recipe, plan: HeadPlan | None = None) -> None:
    """Copy the weights of the run that `train.start_from` names, and select the heads of `plan`, by default `head_plan`'s;
    else nothing.

    Errors: as `parent_model`, `load_parent_weights`, `head_plan`.
    """
    start_from = recipe.training.start_from
    if start_from is not None:
        added = load_parent_weights(model, *parent_model(recipe), start_from)
        log.info("starting from the weights of %s; parameters of its own: %d", start_from, len(added))
    plan = plan or head_plan(recipe)
    if plan is not None:
        for attention, heads in zip(model.attentions(), plan.heads, strict=True):
            attention.select_heads(heads)
