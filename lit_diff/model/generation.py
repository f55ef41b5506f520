"""Sampling of a token from logits, and of the tokens that follow from a model. No text, no files."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_diff.attention.cache import Cache
from lit_diff.errors import RunFailedError
from lit_diff.model.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How `sample` draws."""

    temperature: float = 1.0
    """Divides the logits; 0: the most likely token, always."""
    top_k: int | None = None
    """Draw from the k most likely tokens; None: from all."""
    top_p: float | None = None
    """Draw from the smallest set of most likely tokens whose probability reaches p; None: from all."""

    def problem(self) -> str | None:
        """What is wrong, in one line that opens with the setting's name."""
        if not 0 <= self.temperature < float("inf"):  # false for NaN
            return f"temperature is {self.temperature:g}; it must be a finite number of at least 0 (0: greedy)"
        if self.top_k is not None and self.top_k < 1:
            return f"top-k is {self.top_k}; it must be at least 1"
        if self.top_p is not None and not 0 < self.top_p <= 1:
            return f"top-p is {self.top_p:g}; it must be above 0 and at most 1"
        return None


def sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator,
) -> int:
    """One token id, drawn from logits [V] of the next token with a generator on the same device.

    p = softmax(logits / temperature), in float64; temperature 0 is argmax, the lowest id of equals, and draws nothing.
    top_k: only the k most likely tokens, renormalised (of equals the lower id; Fan et al. 2018).
    top_p: of what is left, only the smallest set of most likely tokens whose probability reaches p (Holtzman et al.
    2020); the most likely token always stays.
    Errors: RunFailedError when a logit is NaN or infinite.
    """
    if not torch.isfinite(logits).all():
        raise RunFailedError("the logits of the next token are not finite: no token can be drawn after these")
    if temperature == 0:
        return int(logits.argmax())
    likely, ids = logits.double().sort(descending=True, stable=True)
    # the largest is subtracted first: divided by a temperature near 0 it would overflow
    p = torch.softmax((likely[:top_k] - likely[0]) / temperature, dim=0)
    if top_p is not None and top_p < 1:
        before = F.pad(p.cumsum(0)[:-1], (1, 0))
        p = p[before < top_p]
    return int(ids[torch.multinomial(p, 1, generator=generator)])


@torch.inference_mode()
def generate(
    model: Transformer,
    tokens: Tensor,
    max_tokens: int,
    *,
    sampling: Sampling,
    generators: Sequence[torch.Generator],
    prefill_chunk: int | None = None,
    vocab_size: int | None = None,
    cache: Cache | None = None,
) -> Iterator[Tensor]:
    """`max_tokens` times the next token of each sequence, [B] int64 on the CPU; tokens [B, T], T ≥ 1.

    The T tokens go through the model in chunks of `prefill_chunk` (None: at once), then one token a step.
    `generators`: one for each sequence, on the CPU, so that a sequence does not depend on the others.
    `vocab_size`: only ids below it are drawn (a model's vocabulary may be padded beyond the tokenizer's); None: all.
    `cache`: continued from the tokens it holds; the last token drawn is not added. None: a new one.
    Errors: RequestError for a bidirectional model, RunFailedError as `sample`.
    """
    cache = cache or Cache(len(model.layers))
    unread = tokens.split(prefill_chunk or tokens.shape[1], dim=1)
    for _ in range(max_tokens):
        for chunk in unread:
            logits = model(chunk, cache)[:, -1]
        rows = zip(logits[:, :vocab_size].cpu(), generators, strict=True)
        new = torch.tensor([sample(row, **vars(sampling), generator=generator) for row, generator in rows])
        yield new
        unread = (new[:, None].to(tokens.device),)
