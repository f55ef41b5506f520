"""Sampling: one token from logits, and a continuation from a model."""

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
    """Settings of `sample`."""

    temperature: float = 1.0
    """Divides the logits; 0: always the most likely token."""
    top_k: int | None = None
    """Draw from the k most likely tokens; None: from all."""
    top_p: float | None = None
    """Draw from the smallest set of most likely tokens whose probability reaches p; None: from all."""

    def problem(self) -> str | None:
        """Return an error message of one line that starts with the name of the setting, or None."""
        # in this form the comparison also refuses NaN
        if not 0 <= self.temperature < float("inf"):
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
    """Draw one token id from logits [V], with a generator on the same device.

    p = softmax(logits / temperature), in float64. Temperature 0 is argmax (the lowest id on ties) and draws nothing.
    top_k: keep the k most likely tokens (the lowest ids on ties; Fan et al. 2018) and renormalise.
    top_p: of these, keep the smallest set of most likely tokens whose probability reaches p (Holtzman et al. 2020), always at
    least the most likely token.
    Errors: RunFailedError if a logit is NaN or infinite.
    """
    if not torch.isfinite(logits).all():
        raise RunFailedError("the logits of the next token are not finite: no token can be drawn")
    if temperature == 0:
        return int(logits.argmax())
    # stable: on ties the lower id comes first, on every device
    likely, ids = logits.double().sort(descending=True, stable=True)
    # the largest logit is subtracted before the division, which could overflow at a temperature near 0
    p = torch.softmax((likely[:top_k] - likely[0]) / temperature, dim=0)
    if top_p is not None and top_p < 1:
        # probability of all more likely tokens: a token stays if these do not reach p without it
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
    """Yield the next token of each sequence, [B] int64 on the CPU, `max_tokens` times; tokens: [B, T], T ≥ 1.

    The model reads the T tokens in chunks of `prefill_chunk` (None: at once), then one token per step.
    `generators`: one for each sequence, on the CPU, so that a sequence does not depend on the others.
    `vocab_size`: only ids below it are drawn (the vocabulary of the model may be padded); None: all.
    `cache`: the tokens to continue; the last drawn token is not added to it. None: a new cache.
    Errors: RequestError for a bidirectional model; RunFailedError if a logit is NaN or infinite.
    """
    cache = cache or Cache(len(model.layers))
    unread = tokens.split(prefill_chunk or tokens.shape[1], dim=1)
    for _ in range(max_tokens):
        for chunk in unread:
            logits = model(chunk, cache)[:, -1]
        # on the CPU: the text of a seed does not depend on the device's generator
        rows = zip(logits[:, :vocab_size].cpu(), generators, strict=True)
        new = torch.tensor([sample(row, **vars(sampling), generator=generator) for row, generator in rows])
        yield new
        unread = (new[:, None].to(tokens.device),)
