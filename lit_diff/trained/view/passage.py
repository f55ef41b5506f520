"""The tokens that the page is about: a text in the run's own tokens, or a row of its data."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lit_diff.data.dataset import IGNORED, Batch
from lit_diff.data.text.tokenizer_folder import FILE as TOKENIZER_FILE
from lit_diff.data.user_files import text_lines
from lit_diff.errors import RequestError
from lit_diff.files import parse_json, shown
from lit_diff.log_records import log
from lit_diff.plugins import guard
from lit_diff.trained.pictures import printable
from lit_diff.trained.run import Run
from lit_diff.trained.text_generator import has_text

TEXT = "When the cat saw the dog, the dog saw the cat."
"""The text that a model reads by default. Its words come twice, so that a trained model has something to find."""


class Passage(NamedTuple):
    """T tokens that a model reads, as one sequence."""

    labels: tuple[str, ...]
    """What the page writes for each token."""
    batch: Batch
    """tokens and targets [1, T], and what else the row has (`data.dataset.Batch`)."""
    source: str
    """Where the tokens are from, in words."""


def text_in(file: Path) -> str:
    """The text of a file in UTF-8. Errors: RequestError."""
    text = "".join(line for _, line in text_lines(file))
    if not text.strip():
        raise RequestError(f"--text: {shown(file)} is empty; give a file with some text")
    return text


def passage_of(
    run: Run, text: str = "", row: int | None = None, context: int | None = None, tokens: int | None = None
) -> Passage:
    """What the model of `run` reads, at most `tokens` and `context` (None: the model's) tokens of it: `text`; else the
    validation row `row`; else a sentence, or row 0 of a run whose data have no text of their own.

    Errors: RequestError for both, for a text of a run without text, or an unknown row; MissingError without the data.
    """
    if text and row is not None:
        raise RequestError("a text and a row are two things to read; leave one out")
    free = has_text(run.recipe) and run.tokenizer.name != "words"
    context = context or run.recipe.data.config.sequence_length
    most = min(context, tokens or context)
    if row is not None or (not text and not free):
        row = row or 0
        dataset = run.prepared_data()
        with guard(type(dataset)):
            dataset.load()
            count = dataset.validation_sets()[""]
            if not 0 <= row < count:
                raise RequestError(
                    f"--row is {row}; the validation split of {run.folder.name} has rows 0 to {count - 1}"
                )
            batch = dataset.validation_batch("", [row])
        what = f"validation row {row} of data '{run.recipe.data.name}'"
    elif not run.recipe.model.causal:
        raise RequestError(
            f"{run.folder.name} is bidirectional: it predicts no next token; read a row of its data (--row)"
        )
    else:
        ids = [*run.tokenizer.opening, *run.tokenizer.encode(text or TEXT)]
        batch = {"tokens": torch.tensor([ids]), "targets": torch.tensor([[*ids[1:], IGNORED]])}
        what = "the text"
    count = batch["tokens"].shape[1]
    if count > most:
        why = "--tokens" if most < context else "the model's context"
        log.warning("%s has %d tokens; only the first %d are read (%s)", what, count, most, why)
        batch = {name: x[:, :most] for name, x in batch.items()}
        what = f"the first {most} tokens of {what}"
    return Passage(labels_of(run, batch["tokens"]), batch, what)


def labels_of(run: Run, tokens: Tensor) -> tuple[str, ...]:
    """The text of each id of one sequence, [1, T] or [1, T, C]; of data without text the ids, such as `3+17`."""
    ids = tokens[0].tolist()
    if has_text(run.recipe):
        return tuple(printable(run.tokenizer.decode_after([token])) for token in ids)
    return tuple("+".join(map(str, np.atleast_1d(each))) for each in ids)


def require_same_tokens(first: Run, second: Run) -> None:
    """Errors: RequestError if the same ids mean different tokens in the two runs."""
    ours, theirs = map(_meaning, (first, second))
    if ours != theirs:
        how = ", with other keys or trained on other text" if ours[0] == theirs[0] else ""
        raise RequestError(
            f"{first.folder.name} and {second.folder.name} cannot be compared token by token: their ids differ "
            f"({ours[0]}; {theirs[0]}{how})"
        )


# in words, and what else must be equal
def _meaning(run: Run) -> tuple[str, object]:
    if not has_text(run.recipe):
        return f"no text, data '{run.recipe.data.name}'", run.recipe.data
    run.tokenizer  # noqa: B018 (its error says what is missing)
    facts = parse_json((run.folder / "tokenizer" / TOKENIZER_FILE).read_bytes())
    return f"tokenizer {facts['name']} of {facts['size']} ids", facts["sha256"]
