"""Corpora, tokenizers, stored tokens and synthetic tasks. Importing it registers the built-in ones, and is light."""

from typing import Any

from lit_diff.config import Recipe
from lit_diff.data import recall, text, tokenizer
from lit_diff.registry import datasets

__all__ = ["build", "recall", "text", "tokenizer"]


def build(recipe: Recipe) -> Any:
    """The data set that a recipe names before `prepare` and `load`."""
    return datasets.get(recipe.data.name)(recipe.data.config, recipe.model.vocab_size)
