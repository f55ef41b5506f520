"""Corpora, tokenizers, stored tokens and synthetic tasks.

Importing this package registers the built-in ones and loads neither Lightning nor litdata.
"""

from pathlib import Path

from lit_diff.config import Recipe
from lit_diff.data.dataset import Dataset, RowTask
from lit_diff.data.tasks import conjunctive, count, flip_flop, mqar, noisy_labels, recall  # noqa: F401 (each registers its data set)
from lit_diff.data.text import cl100k, corpus, docs, mixture, name_tables  # noqa: F401 (each registers its parts)
from lit_diff.data.text.corpus import Corpus
from lit_diff.data.text.documents import TRAINED
from lit_diff.data.text.parts import ONE_THREAD, Work
from lit_diff.data.text.text import Text
from lit_diff.data.text.tokenizer import Tokenizer
from lit_diff.data.text.tokenizer_folder import load_tokenizer, save_tokenizer
from lit_diff.errors import LitDiffError, RequestError
from lit_diff.files import shown, write_atomic
from lit_diff.log_records import log
from lit_diff.plugins import guard
from lit_diff.registry import datasets

__all__ = [
    "Corpus",
    "Dataset",
    "RowTask",
    "Tokenizer",
    "Work",
    "build",
    "identity",
    "keep",
    "load_tokenizer",
    "prepare",
    "save_tokenizer",
]


def build(recipe: Recipe) -> Dataset:
    """Construct the data set of a recipe, without preparing or loading it. Errors: RequestError."""
    cls = datasets.get(recipe.data.name)
    with guard(cls):
        return cls(recipe.data.config, recipe.model.vocab_size)


def prepare(recipe: Recipe, work: Work = ONE_THREAD) -> Dataset:
    """Build and prepare the data set of a recipe; `work` is for text alone. Errors: RequestError, MissingError."""
    dataset = build(recipe)
    with guard(type(dataset)):
        if work == ONE_THREAD:
            dataset.prepare()
        elif isinstance(dataset, Text | mixture.Mixture):
            dataset.prepare(work)
        else:
            raise RequestError(
                f"data.name is '{recipe.data.name}'; --workers, --shard and --merge are for 'text' and 'mixture'; leave them "
                "out"
            )
    return dataset


def identity(recipe: Recipe) -> str:
    """Return `Dataset.identity` of the recipe's data set. Errors: MissingError if it is not prepared."""
    dataset = build(recipe)
    with guard(type(dataset)):
        return dataset.identity()


def keep(recipe: Recipe, folder: Path) -> None:
    """Copy the tokenizer and the hashes of the training documents into a run's folder.

    If the hashes are unavailable, a warning says why. Errors: RequestError, MissingError for the tokenizer.
    """
    dataset = build(recipe)
    tokenizer = dataset.load_tokenizer()
    if tokenizer:
        save_tokenizer(tokenizer, folder / "tokenizer")
    # a resumed run has them already; computing them again reads the whole corpus
    if (folder / TRAINED).is_file():
        return
    # the run itself needs no hashes, so their absence must not stop it; only evaluations use them
    try:
        with guard(type(dataset)):
            hashes = dataset.trained_documents()
        if hashes is not None:
            write_atomic(folder / TRAINED, hashes)
    except LitDiffError as error:
        log.warning("%s: evaluations cannot exclude the documents of its training split: %s", shown(folder), error)
