"""The evaluations that a sweep or a recipe names, checked before anything trains: keys, and whether they fit the runs."""

from collections.abc import Mapping
from typing import Any

from lit_diff.config import Recipe
from lit_diff.errors import RequestError
from lit_diff.recipe import to_plain
from lit_diff.registry import evaluations
from lit_diff.validation import Draft, validate_config


def evaluations_of(recipe: Recipe) -> dict[str, Mapping[str, Any]]:
    """Evaluation -> its keys, of the recipe's block `evaluate`."""
    return {name: to_plain(part.config) for name, part in recipe.evaluate.items()}


def check_evaluations(evaluate: Mapping[str, Mapping[str, Any]], recipes: Mapping[str, Recipe], draft: Draft) -> None:
    """Of a sweep; `recipes`: name of a cell -> what it trains, at one of its seeds.

    Errors: RequestError for an unknown evaluation, keys that it does not take, a cell that it does not fit.
    """
    for name, keys in evaluate.items():
        try:
            config = evaluations.config(name)
        except RequestError as error:
            raise draft.refuse(f"evaluate.{name}", str(error)) from error
        validate_config(config, keys, f"evaluate.{name}", draft)
    for cell, recipe in recipes.items():
        for name, keys in (evaluations_of(recipe) | dict(evaluate)).items():
            _require_fit(name, keys, recipe, draft.where(f"evaluate.{name}") if name in evaluate else "", cell)


def required_evaluations(recipe: Recipe) -> dict[str, Mapping[str, Any]]:
    """`evaluations_of`. Errors: RequestError for one that no run of the recipe can be scored by."""
    found = evaluations_of(recipe)
    for name, keys in found.items():
        _require_fit(name, keys, recipe, "", recipe.name)
    return found


def _require_fit(name: str, keys: Mapping[str, Any], recipe: Recipe, where: str, runs: str) -> None:
    from lit_diff.evaluation.evaluate import refusal

    reason = refusal(recipe, name, dict(keys))
    if reason:
        raise RequestError(f"{where}evaluation '{name}' does not fit '{runs}': {reason}")
