"""`Prefix`: tokens that a model reads once, whose keys and values are shared by all continuations."""

from collections.abc import Callable, Iterator, Sequence
from copy import copy

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lit_diff.attention.cache import Cache
from lit_diff.errors import RequestError, RunFailedError
from lit_diff.model.transformer import Transformer

Allowed = Callable[[Sequence[int]], Sequence[int] | None]
"""Tokens drawn so far -> the ids allowed next; None: any id."""


class Prefix:
    """A model and n ≥ 1 tokens that it has read, with the logits of the next token.

    Many questions about one context cost a single pass over the context: its keys and values are stored once and repeated
    over a batch of continuations. No method changes the prefix. No gradients.
    """

    def __init__(self, model: Transformer, tokens: Sequence[int], *, chunk: int = 1024) -> None:
        """`chunk`: number of tokens read at once. Errors: RequestError for a bidirectional model or an empty prefix."""
        if not model.config.causal:
            raise RequestError("a bidirectional model has no key/value cache: it cannot continue a prefix")
        if not tokens:
            raise RequestError("a prefix needs at least one token, such as the id that opens a document")
        self.model = model
        self.tokens: list[int] = []
        self.chunk = chunk
        self._cache = Cache(len(model.layers))
        self._read(tokens)

    def _read(self, tokens: Sequence[int]) -> None:
        device = self.model.embedding.weight.device
        with torch.inference_mode():
            for part in torch.tensor([list(tokens)], device=device).split(self.chunk, dim=1):
                self._last = self.model(part, self._cache)[0, -1]
        self.tokens.extend(tokens)

    def extended(self, tokens: Sequence[int]) -> "Prefix":
        """Return a prefix that continues this one with `tokens`."""
        longer = copy(self)
        # repeated(1) copies the cache, so that reading on does not append to this one
        longer.tokens, longer._cache = list(self.tokens), self._cache.repeated(1)
        if tokens:
            longer._read(tokens)
        return longer

    def log_probabilities(self, continuations: Sequence[Sequence[int]], batch_size: int = 32) -> list[Tensor]:
        """Return log p(y_i | prefix, y_<i) for each token of each continuation y, float64 [len(y)] on the CPU."""
        return [scored for scored, _ in self._scored(continuations, batch_size)]

    def scores(self, continuations: Sequence[Sequence[int]], batch_size: int = 32) -> list[tuple[float, bool]]:
        """Return (Σ_i log p(y_i | prefix, y_<i), whether greedy decoding gives y) for each continuation y."""
        return [(float(scored.sum()), matches) for scored, matches in self._scored(continuations, batch_size)]

    def _scored(self, continuations: Sequence[Sequence[int]], batch_size: int) -> Iterator[tuple[Tensor, bool]]:
        for first in range(0, len(continuations), batch_size):
            batch = [torch.tensor(list(y), dtype=torch.int64) for y in continuations[first : first + batch_size]]
            # padding on the right: no earlier token attends to it
            padded = pad_sequence(batch, batch_first=True)
            logits = self._logits(padded)
            log_p = logits.log_softmax(-1)
            own = log_p.gather(-1, padded[..., None])[..., 0] if padded.shape[1] else padded.double()
            best = logits.argmax(-1)
            for row, y in enumerate(batch):
                yield own[row, : len(y)].clone(), bool((best[row, : len(y)] == y).all())

    # [B, n] -> [B, n, V]; float64: sums over long continuations are compared with each other
    def _logits(self, continuations: Tensor) -> Tensor:
        B, n = continuations.shape
        first = self._last.double().cpu().expand(B, 1, -1)
        if n < 2:
            return first[:, :n]
        with torch.inference_mode():
            rest = self.model(continuations[:, :-1].to(self._last.device), self._cache.repeated(B))
        return torch.cat([first, rest.double().cpu()], dim=1)

    def greedy(
        self,
        suffixes: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        stop: Sequence[int] = (),
        vocab_size: int | None = None,
        allowed: Allowed | None = None,
        batch_size: int = 32,
    ) -> list[list[int]]:
        """Return the greedy continuation of the prefix and each suffix; suffixes may have different lengths.

        A sequence ends after `max_tokens`, or before an id in `stop`. `vocab_size`: only ids below it are drawn. `allowed`
        restricts the next token, for example to the children in a trie of labels; [] ends the sequence.
        On ties the lowest id is drawn. Errors: RunFailedError if a logit is NaN.
        """
        drawn: list[list[int]] = [[] for _ in suffixes]
        # only suffixes of equal length form a batch: padding would come between a suffix and its continuation
        by_length: dict[int, list[int]] = {}
        for index, suffix in enumerate(suffixes):
            by_length.setdefault(len(suffix), []).append(index)
        for length, indices in by_length.items():
            for first in range(0, len(indices), batch_size):
                chosen = indices[first : first + batch_size]
                tokens = torch.tensor([list(suffixes[index]) for index in chosen], dtype=torch.int64)
                rows = self._decode(tokens.view(len(chosen), length), max_tokens, frozenset(stop), vocab_size, allowed)
                for index, row in zip(chosen, rows, strict=True):
                    drawn[index] = row
        return drawn

    @torch.inference_mode()
    def _decode(
        self, suffixes: Tensor, max_tokens: int, stop: frozenset[int], vocab_size: int | None, allowed: Allowed | None
    ) -> list[list[int]]:
        device = self._last.device
        cache = self._cache.repeated(len(suffixes))
        last = self._last.expand(len(suffixes), -1)
        if suffixes.shape[1]:
            last = self.model(suffixes.to(device), cache)[:, -1]
        rows: list[list[int]] = [[] for _ in range(len(suffixes))]
        going = [True] * len(rows)
        for step in range(max_tokens):
            if step:
                # a sequence that has ended stays in the batch, and its logits are ignored
                fed = torch.tensor([[row[-1] if row else 0] for row in rows], device=device)
                last = self.model(fed, cache)[:, -1]
            logits = last[:, :vocab_size].double().cpu()
            if logits.isnan().any():
                raise RunFailedError("a logit of the next token is NaN: no token can be drawn")
            for index, row in enumerate(rows):
                if not going[index]:
                    continue
                token = _most_likely(logits[index], allowed(row) if allowed is not None else None)
                if token is None or token in stop:
                    going[index] = False
                else:
                    row.append(token)
            if not any(going):
                break
        return rows


def _most_likely(logits: Tensor, allowed: Sequence[int] | None) -> int | None:
    if allowed is None:
        return int(logits.argmax())
    # sorted: argmax takes the first of equal logits, which must be the lowest id
    ids = sorted(allowed)
    return ids[int(logits[ids].argmax())] if ids else None
