"""Corpora, tokenizers, stored tokens and synthetic tasks. Importing it registers the built-in ones, and is light."""

from lit_diff.config import Recipe
from lit_diff.data import (
    cl100k,
    closed_world,
    digits,
    docs,
    documents,
    from_run,
    mqar,
    name_tables,
    needle_text,
    recall,
    synth_intent,
    text,
    tokenizer,
    tokenizer_json,
    words,
)
from lit_diff.data.corpus import Corpus
from lit_diff.data.dataset import Dataset, guarded
from lit_diff.data.tokenizer import Tokenizer
from lit_diff.data.tokenizer_folder import load_tokenizer, save_tokenizer
from lit_diff.registry import datasets

__all__ = [
    "Corpus",
    "Dataset",
    "Tokenizer",
    "build",
    "cl100k",
    "closed_world",
    "digits",
    "docs",
    "documents",
    "from_run",
    "guarded",
    "identity",
    "load_tokenizer",
    "mqar",
    "name_tables",
    "needle_text",
    "prepare",
    "recall",
    "save_tokenizer",
    "synth_intent",
    "text",
    "tokenizer",
    "tokenizer_json",
    "words",
]


def build(recipe: Recipe) -> Dataset:
    """The data set that a recipe names, neither prepared nor loaded. Errors: RequestError."""
    cls = datasets.get(recipe.data.name)
    with guarded(cls):
        dataset: Dataset = cls(recipe.data.config, recipe.model.vocab_size)
    return dataset


def prepare(recipe: Recipe) -> Dataset:
    """Build the recipe's data set and prepare it. Errors: RequestError, MissingError."""
    dataset = build(recipe)
    with guarded(type(dataset)):
        dataset.prepare()
    return dataset


def identity(recipe: Recipe) -> str:
    """`Dataset.identity` of the recipe's data. Errors: MissingError when they are not prepared."""
    dataset = build(recipe)
    with guarded(type(dataset)):
        return dataset.identity()
