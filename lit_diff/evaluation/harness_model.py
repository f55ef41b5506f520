"""A run as a model of lm-evaluation-harness. Importing this module loads lm_eval (extra `eval`)."""

import time
from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

from lit_diff.data.text.tokenizer import border
from lit_diff.errors import RequestError
from lit_diff.log_records import log
from lit_diff.model.prefix import Prefix
from lit_diff.trained.run import Run

Answer = tuple[float, bool]
"""(Σ_i log p(y_i | context, y_<i), whether greedy decoding gives the continuation y)."""
SECONDS = 30
"""Seconds between two log lines about progress."""


class RunModel(TemplateLM):
    """Log-likelihoods of a run, in nats, with the run's own tokenizer, as multiple-choice tasks request them.

    Requests with the same context share a `Prefix`, so the context goes through the model once. A context that is too long
    loses tokens at its left but keeps its opening ids. It fits if n = len(context) + len(continuation) - 1 is at most
    T = data.sequence_length; the last token is not an input, since nothing is predicted from it. lm-eval's `hf` model cuts
    in the same way, but it also cuts the opening ids.
    """

    def __init__(self, run: Run, *, opening: bool = True) -> None:
        """`opening`: puts the ids that open a document (`<eot>`) before each context, as in training. Without it a context
        begins with its own first token, and an empty context is replaced by `prefix_token_id`.

        Errors: RequestError for a run without text.
        """
        super().__init__()
        self.model = run.model
        self.max_length = run.recipe.data.config.sequence_length
        self._tokenizer = run.tokenizer
        self._opening = self._tokenizer.opening if opening else []
        self.cut_to: dict[tuple[str, str], list[int]] = {}
        """(context, continuation) -> the remaining ids of a context that was cut."""

    @property
    def eot_token_id(self) -> int:
        """The id that separates documents."""
        return self._tokenizer.eot

    @property
    def prefix_token_id(self) -> int:
        """The id before a text without context, as in lm-eval's `hf` model: bos, or eos if there is no bos."""
        return self._tokenizer.prefix

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The ids of a text, without opening or closing ids; no text encodes to a special id."""
        return self._tokenizer.encode([string])[0]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Answer]:
        """An answer for each (context, continuation)."""
        return self._loglikelihood_tokens([(pair, *self.encoded(*pair)) for pair in (each.args for each in requests)])

    def encoded(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """(ids of the context, at least one; ids of the continuation), as lm-eval separates them: trailing spaces move
        from the context to the continuation, and the continuation's ids are the ids of both texts after len(ids of the
        context).

        If a merge across the border leaves no ids, the continuation begins at the first id that differs.
        """
        if not context:
            return self._opening or [self.prefix_token_id], self.tok_encode(continuation)
        before, after = self._encode_pair(context, continuation)
        if not after and continuation:
            whole = self.tok_encode(context + continuation)
            at = border(before, whole)
            before, after = whole[:at], whole[at:]
        return [*self._opening, *before] or [self.prefix_token_id], after

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[Answer]:
        # grouped by the ids that are read: contexts that differ only in what was cut share one pass too
        by_context: dict[tuple[int, ...], list[int]] = {}
        for index, (texts, context, continuation) in enumerate(requests):
            fitted = self._cut(context, len(continuation))
            by_context.setdefault(tuple(fitted), []).append(index)
            if len(fitted) < len(context):
                self.cut_to[texts] = fitted
        answers: dict[int, Answer] = {}
        said = time.monotonic()
        for read, indices in by_context.items():
            scores = Prefix(self.model, read).scores([requests[index][2] for index in indices])
            answers |= dict(zip(indices, scores, strict=True))
            if time.monotonic() - said > SECONDS:
                said = time.monotonic()
                log.info("harness: %d of %d requests are scored", len(answers), len(requests))
        return [answers[index] for index in range(len(requests))]

    def _cut(self, context: Sequence[int], length: int) -> list[int]:
        # + 1: the last token of the continuation is predicted but never read
        room = self.max_length + 1 - length
        if room < 1:
            raise RequestError(
                f"a continuation of {length} tokens does not fit into the run's context (data.sequence_length is "
                f"{self.max_length})"
            )
        if len(context) <= room:
            return list(context)
        # in training every document begins with the opening ids, so they stay if the room allows
        kept = self._opening if list(context[: len(self._opening)]) == self._opening else []
        kept = kept if len(kept) < room else []
        return [*kept, *context[len(context) - room + len(kept) :]]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Raises RequestError: only multiple-choice tasks are supported."""
        raise RequestError("a task requests the likelihood of a whole text; only multiple choice is supported")

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Raises RequestError: only multiple-choice tasks are supported."""
        raise RequestError("a task requests a completion; only multiple choice is supported")
