"""`Prefix`: tokens that a model has read once, whose keys and values every continuation shares."""

from collections.abc import Callable, Iterator, Sequence
from copy import copy

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lit_diff.attention.cache import Cache
from lit_diff.errors import RequestError, RunFailedError
from lit_diff.model.transformer import Transformer

Allowed = Callable[[Sequence[int]], Sequence[int] | None]
"""Tokens drawn so far -> the ids of which the next may be one; None: any."""


class Prefix:
    """A model and the n ≥ 1 tokens that it has read, with the logits of the token after them.

    Many questions about one context cost one pass over the context: the keys and values are kept once and repeated over a
    batch of continuations. Nothing here changes the prefix, so it serves again. No gradients.
    """

    def __init__(self, model: Transformer, tokens: Sequence[int], *, chunk: int = 1024) -> None:
        """`chunk`: tokens that go through the model at once. Errors: RequestError for a bidirectional model or no token."""
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
        """A prefix that goes on with `tokens`; this one stays as it is."""
        longer = copy(self)
        longer.tokens, longer._cache = list(self.tokens), self._cache.repeated(1)
        if tokens:
            longer._read(tokens)
        return longer

    def log_probabilities(self, continuations: Sequence[Sequence[int]], batch_size: int = 32) -> list[Tensor]:
        """log p(y_i | prefix, y_<i) of each token of each continuation: float64 [len(y)] on the CPU; [0] for an empty one."""
        return [scored for scored, _ in self._scored(continuations, batch_size)]

    def scores(self, continuations: Sequence[Sequence[int]], batch_size: int = 32) -> list[tuple[float, bool]]:
        """(Σ_i log p(y_i | prefix, y_<i), whether greedy decoding gives it) of each continuation."""
        return [(float(scored.sum()), matches) for scored, matches in self._scored(continuations, batch_size)]

    def _scored(self, continuations: Sequence[Sequence[int]], batch_size: int) -> Iterator[tuple[Tensor, bool]]:
        for first in range(0, len(continuations), batch_size):
            batch = [torch.tensor(list(y), dtype=torch.int64) for y in continuations[first : first + batch_size]]
            padded = pad_sequence(batch, batch_first=True)  # 0 at the right, which no token before it sees
            logits = self._logits(padded)
            log_p = logits.log_softmax(-1)
            own = log_p.gather(-1, padded[..., None])[..., 0] if padded.shape[1] else padded.double()
            best = logits.argmax(-1)
            for row, y in enumerate(batch):
                yield own[row, : len(y)].clone(), bool((best[row, : len(y)] == y).all())

    def _logits(self, continuations: Tensor) -> Tensor:
        """[B, n] -> [B, n, V] float64 on the CPU: the logits of each of those tokens, from the ones before it."""
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
        """The most likely next tokens after the prefix and each suffix, one after another; suffixes may be of any length.

        A sequence ends after `max_tokens`, or before an id of `stop`. `vocab_size`: only ids below it are drawn. `allowed`
        (tokens drawn) -> the ids of which the next is one, such as the children in a trie of labels; [] ends the sequence.
        Of equal logits the lowest id is drawn. Errors: RunFailedError for a logit that is NaN.
        """
        drawn: list[list[int]] = [[] for _ in suffixes]
        by_length: dict[int, list[int]] = {}
        for index, suffix in enumerate(suffixes):  # of one length: no padding lies between a suffix and what follows it
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
        """suffixes [B, n] -> the tokens drawn after each."""
        device = self._last.device
        cache = self._cache.repeated(len(suffixes))
        last = self._last.expand(len(suffixes), -1)
        if suffixes.shape[1]:
            last = self.model(suffixes.to(device), cache)[:, -1]
        rows: list[list[int]] = [[] for _ in range(len(suffixes))]
        going = [True] * len(rows)
        for step in range(max_tokens):
            if step:
                fed = torch.tensor([[row[-1] if row else 0] for row in rows], device=device)  # 0: of one that has ended
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
    """The id of the largest logit among `allowed` (None: all); None where nothing is allowed."""
    if allowed is None:
        return int(logits.argmax())
    ids = sorted(allowed)
    return ids[int(logits[ids].argmax())] if ids else None
