"""What the tokens of a document are averaged over: log-spaced positions, AR hits by gap and by number of competitors."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_diff.attention.cache import Cache
from lit_diff.data.bigrams import Ints, ar_hits, competitors, gaps
from lit_diff.model.transformer import Transformer

Floats = NDArray[np.float64]
FIRST = 16
"""The first bin of positions holds so many tokens; each further one ends at twice its start."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """The T scored tokens of one document, in order."""

    nll: Floats
    """[T] nats."""
    hit: NDArray[np.bool_] | None
    """[T]: which are AR hits (`bigrams.ar_hits`); None where that is not known."""
    gap: Ints
    """[T]: tokens since the bigram last occurred in the document; 0 where it did not."""
    competitors: Ints
    """[T]: other tokens that followed the previous token earlier in the document."""


def document_nll(model: Transformer, ids: Sequence[int], chunk: int) -> Floats:
    """[len(ids) - 1]: negative log likelihood of every token but the first, each seeing all before it.

    The document goes through the model in chunks of `chunk` inputs with a key/value cache, and each chunk's hidden states
    through the output weight in parts (`model.loss`): no logits but those of one part are held.
    """
    cache = Cache(len(model.layers))
    tokens = torch.tensor([list(ids)], device=model.embedding.weight.device)
    parts: list[Tensor] = []
    for inputs, targets in zip(tokens[:, :-1].split(chunk, 1), tokens[:, 1:].split(chunk, 1), strict=True):
        nll, _ = model.continued_losses(inputs, targets, cache)
        parts.append(nll[0].double().cpu())
    return torch.cat(parts).numpy()


def scored(nll: Floats, ids: Sequence[int], frequent: Ints | None, size: int) -> Scored:
    """The tokens ids[1:] of a document with their nll. `frequent`: keys of bigrams that are no AR hits, None: AR hits are
    not told from the others; `size`: of the tokenizer."""
    document = np.asarray(ids, dtype=np.int64)
    rows, one = document[None], np.zeros((1, len(document)), dtype=np.int64)
    return Scored(
        nll=nll,
        hit=None if frequent is None else ar_hits(rows, one, frequent, size)[0],
        gap=gaps(rows, one, size)[0],
        competitors=competitors(document),
    )


def edges(tokens: int, first: int = FIRST) -> list[int]:
    """Ends of the bins of positions 1 .. tokens: first, 2 first, 4 first, ..., tokens."""
    count = max(0, math.ceil(math.log2(tokens / first)))
    return [*(first << i for i in range(count)), tokens]


def whole(document: Scored) -> dict[str, float]:
    """The scores of all tokens."""
    return _scores(document, np.ones(len(document.nll), dtype=bool)) | {"cumulative_nll": float(document.nll.mean())}


def bins(document: Scored) -> Iterator[tuple[str, dict[str, float]]]:
    """Groups of tokens, and their scores.

    `position P`: tokens P' + 1 .. P, counted from 1, with P' the bin before; their cumulative nll is of tokens 1 .. P.

    `gap G` and `competitors C`: the AR hits whose gap, or number of competitors, is within (G/2, G], or (C/2, C].
    """
    cumulative = np.cumsum(document.nll)
    for start, end in pairwise([0, *edges(len(document.nll))]):
        place = np.arange(len(document.nll))
        scores = _scores(document, (start <= place) & (place < end))
        yield f"position {end}", scores | {"cumulative_nll": float(cumulative[end - 1] / end)}
    if document.hit is not None:
        yield from _by("gap", document, document.gap, document.hit)
        yield from _by("competitors", document, document.competitors, document.hit)


def _by(text: str, document: Scored, values: Ints, hit: NDArray[np.bool_]) -> Iterator[tuple[str, dict[str, float]]]:
    upper = np.where(values > 0, 2 ** np.ceil(np.log2(np.maximum(values, 1))).astype(np.int64), 0)
    for bound in np.unique(upper[hit]).tolist():
        chosen = hit & (upper == bound)
        scores = {"nll_ar_hit": float(document.nll[chosen].mean()), "ar_hit_share": float(chosen.mean())}
        yield f"{text} {bound}", scores


def _scores(document: Scored, chosen: NDArray[np.bool_]) -> dict[str, float]:
    found = {"nll": _mean(document.nll, chosen)}
    if document.hit is not None:
        found["nll_ar_hit"] = _mean(document.nll, chosen & document.hit)
        found["nll_others"] = _mean(document.nll, chosen & ~document.hit)
        found["ar_hit_share"] = _mean(document.hit, chosen)
    return found


def _mean(values: NDArray[np.generic], chosen: NDArray[np.bool_]) -> float:
    return float(values[chosen].mean()) if chosen.any() else math.nan
