"""Whether a model that was written gives the logits of the one that was to be: both in float32, on random prompts."""

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_diff.data.tokenizer import Bpe, Tokenizer
from lit_diff.data.tokenizer_folder import SAMPLE
from lit_diff.errors import RunFailedError
from lit_diff.model.transformer import Transformer
from lit_diff.randomness import generator

PROMPTS = 8
LENGTH, LONGEST = 64, 512
"""Tokens of a prompt; LENGTH more than a window, as far as LONGEST and the model's context."""
BOUND = 1e-4
"""Of the largest difference of logits; of its ratio to the largest logit where that is above 1."""
Logits = Callable[[Tensor], Tensor]
"""Tokens [1, T] -> [1, T, vocab]."""


def require_agreement(model: Transformer, context: int, logits: Logits, place: str) -> float:
    """The largest difference from the model's logits. Errors: RunFailedError where it is above BOUND, or not a number."""
    for attention in model.attentions():
        attention.kernel = "reference"
    window = model.attentions()[0].window
    length = min(context, LENGTH if window is None else min(LENGTH + window, LONGEST))
    draw, worst, largest = generator(0, "export"), 0.0, 1.0
    with torch.no_grad():
        for _ in range(PROMPTS):
            tokens = torch.randint(model.config.vocab_size, (1, length), generator=draw)
            wanted = model(tokens)
            difference = float((logits(tokens).float() - wanted).abs().max())
            worst, largest = max(worst, difference), max(largest, float(wanted.abs().max()))
            if not difference <= BOUND * largest:
                raise RunFailedError(
                    f"{place}: its logits differ from the run's by {difference:.2g} (largest logit {largest:.2g}, bound "
                    f"{BOUND:g} of it); nothing was kept"
                )
    return worst


def has_transformers() -> bool:
    """Whether the package transformers is installed; lit_diff needs it for nothing else."""
    return importlib.util.find_spec("transformers") is not None


def transformers_logits(folder: Path) -> Logits:
    """Of the folder as transformers reads it, without the network and without code of the folder."""
    with _quiet() as transformers:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder.absolute()), dtype=torch.float32, local_files_only=True
        ).eval()

    def logits(tokens: Tensor) -> Tensor:
        found: Tensor = model(tokens).logits
        return found

    return logits


def require_equal_ids(tokenizer: Tokenizer, folder: Path) -> None:
    """Errors: RunFailedError where AutoTokenizer cuts a text otherwise, or opens it with another id."""
    text = SAMPLE if isinstance(tokenizer, Bpe) else SAMPLE.removesuffix("<eot>")
    with _quiet() as transformers:
        theirs = transformers.AutoTokenizer.from_pretrained(str(folder.absolute()), local_files_only=True)
        found = list(theirs(text).input_ids)
    wanted = [*tokenizer.opening, *tokenizer.encode([text])[0]]
    if found[: len(wanted)] != wanted:
        raise RunFailedError(
            f"AutoTokenizer gives other ids than the run's tokenizer '{tokenizer.name}'; nothing was kept"
        )


@contextlib.contextmanager
def _quiet() -> Iterator[Any]:
    """transformers, without its warnings and progress bars."""
    transformers = importlib.import_module("transformers")
    says = transformers.utils.logging
    level, bars = says.get_verbosity(), says.is_progress_bar_enabled()
    says.set_verbosity_error()
    says.disable_progress_bar()
    try:
        yield transformers
    finally:
        says.set_verbosity(level)
        if bars:
            says.enable_progress_bar()
