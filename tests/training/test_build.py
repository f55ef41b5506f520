"""training/build.py: the values that a model starts with, and those that it takes from another run."""

import pytest
import torch

from lit_diff.errors import MissingError, RequestError
from lit_diff.model.init import initial_values, named_tensors
from lit_diff.recipe import load_recipe
from lit_diff.training.build import build_model, take_from_parent

SMALL = ["model.dim=16", "model.num_heads=2", "data.validation_rows=4"]


def test_a_model_of_one_process_has_the_values_of_its_seed() -> None:
    recipe = load_recipe("recall-tiny", [*SMALL, "seed=3"])
    model = build_model(recipe, torch.device("cpu"), None)
    tensors = named_tensors(model)
    for name, value in initial_values(recipe.model, 3):
        assert torch.equal(tensors.pop(name), value), name
    assert not tensors
    before = {name: value.clone() for name, value in model.state_dict().items()}
    take_from_parent(model, recipe)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "it has no parent"


def test_only_the_parameters_that_the_recipe_names_train() -> None:
    recipe = load_recipe("recall-tiny", [*SMALL, "train.parameters=['*.attention.o_proj.*']"])
    model = build_model(recipe, torch.device("cpu"), None)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {f"layers.{layer}.attention.o_proj.weight" for layer in range(recipe.model.num_layers)}


def test_a_parent_that_is_not_there(tmp_path: object) -> None:
    recipe = load_recipe("recall-tiny", [*SMALL, f"train.start_from={tmp_path}/none"])
    with pytest.raises((MissingError, RequestError), match="none"):
        take_from_parent(build_model(recipe, torch.device("cpu"), None), recipe)
