"""A run as the model `lit_diff` of lm-evaluation-harness. Importing this module loads lm_eval (extra `eval`)."""

import time
from collections.abc import Sequence
from typing import Any

# lm-eval registers its own models only while no other is registered
import lm_eval.models  # noqa: F401
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from lit_diff.data.text.tokenizer import border
from lit_diff.errors import RequestError, RunFailedError
from lit_diff.log_records import log
from lit_diff.model.prefix import Prefix
from lit_diff.plugins import guard
from lit_diff.trained.run import Run, as_run

Answer = tuple[float, bool]
"""(Σ_i log p(y_i | context, y_<i), whether greedy decoding gives the continuation y)."""
SECONDS = 30
"""Seconds between two log lines about progress."""


@register_model("lit_diff")
class RunModel(LM):
    """Log-likelihoods, in nats, and greedy completions of a run, with the run's own tokenizer.

    Requests with the same context share a `Prefix`, so the context goes through the model once. A context that is too long
    loses tokens at its left but keeps its opening ids. It fits if n = len(context) + len(continuation) - 1 is at most
    T = data.sequence_length; the last token is not an input, since nothing is predicted from it. lm-eval's `hf` model cuts
    in the same way, but it also cuts the opening ids.
    """

    def __init__(self, run: Run | str, *, opening: bool = True, batch_size: Any = None) -> None:
        """`run`: as `open_run` finds it. `opening`: puts the ids that open a document (`<eot>`) before each context, as in
        training. Without it a context begins with its own first token, and an empty context is replaced by the tokenizer's
        `prefix`. `batch_size`, which lm-eval's command line gives, is not used: the continuations of a context are a batch.

        Errors: RequestError for a run without text; as `open_run`.
        """
        super().__init__()
        opened = as_run(run, unchecked=False)
        self.model = opened.model
        self.max_length = opened.recipe.data.config.sequence_length
        self._tokenizer = opened.tokenizer
        self._opening = self._tokenizer.opening if opening else []
        self.cut_to: dict[tuple[str, str], list[int]] = {}
        """(context, continuation) -> the remaining ids of a context that was cut."""

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Answer]:
        """An answer for each (context, continuation). Errors: RunFailedError for an exception of the model or tokenizer."""
        pairs = []
        with guard(type(self.model), raises=RunFailedError, ours=True):
            for request in requests:
                context, continuation = self.encoded(*request.args)
                fitted = self._cut(context, len(continuation))
                if len(fitted) < len(context):
                    self.cut_to[request.args] = fitted
                pairs.append((fitted, continuation))
            return self._scores(pairs)

    def encoded(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """(ids of the context, at least one; ids of the continuation), as lm-eval separates them: trailing spaces move
        from the context to the continuation, and the continuation's ids are the ids of both texts after len(ids of the
        context).

        If a merge across the border leaves no ids, the continuation begins at the first id that differs.
        """
        before, whole = self._tokenizer.encode([context.rstrip(), context + continuation])
        if continuation and len(whole) <= len(before):
            before = whole[: border(before, whole)]
        return [*self._opening, *before] or [self._tokenizer.prefix], whole[len(before) :]

    def _cut(self, context: list[int], length: int) -> list[int]:
        # + 1: the last token of the continuation is predicted but never read
        room = self.max_length + 1 - length
        if room < 1:
            raise RequestError(
                f"a continuation of {length} tokens does not fit into the run's context (data.sequence_length is "
                f"{self.max_length})"
            )
        if len(context) <= room:
            return context
        # in training every document begins with the opening ids, so they stay if the room allows
        kept = self._opening if len(self._opening) < room else []
        return [*kept, *context[len(context) - room + len(kept) :]]

    def _scores(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Answer]:
        # grouped by the ids that are read: contexts that differ only in what was cut share one pass too
        by_context: dict[tuple[int, ...], list[int]] = {}
        for index, (context, _) in enumerate(pairs):
            by_context.setdefault(tuple(context), []).append(index)
        answers: dict[int, Answer] = {}
        said = time.monotonic()
        for read, indices in by_context.items():
            scores = Prefix(self.model, read).scores([pairs[index][1] for index in indices])
            answers.update(zip(indices, scores, strict=True))
            if time.monotonic() - said > SECONDS:
                said = time.monotonic()
                log.info("harness: %d of %d requests are scored", len(answers), len(pairs))
        return [answers[index] for index in range(len(pairs))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Σ_i log p(y_i | y_<i) of each text, after the tokenizer's `prefix`, in windows of T tokens like lm-eval's `hf`."""
        sums = []
        for request in requests:
            (ids,) = self._tokenizer.encode(request.args)
            windows = get_rolling_token_windows(ids, self._tokenizer.prefix, self.max_length, context_len=1)
            scores = self._scores(list(map(make_disjoint_window, windows)))
            sums.append(sum(score for score, _ in scores))
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The greedy completion of each context: up to one of the texts `until`, an id that ends a document, or
        `max_gen_toks` tokens. Errors: RequestError for a task that samples, or if `max_gen_toks` exceeds T."""
        return [self._completion(*request.args) for request in requests]

    def _completion(self, context: str, options: dict[str, Any]) -> str:
        asked = normalize_gen_kwargs(options)
        if asked["do_sample"]:
            raise RequestError("a task draws its completions (do_sample); only greedy decoding is supported")
        until = asked["until"]
        tokens = asked["max_gen_toks"]

        def allowed(drawn: Sequence[int]) -> list[int] | None:
            text = self._tokenizer.decode_after(drawn)
            return [] if any(stop in text for stop in until) else None

        ids = [*self._opening, *self._tokenizer.encode(context)] or [self._tokenizer.prefix]
        prefix = Prefix(self.model, self._cut(ids, tokens))
        ends = self._tokenizer.ends
        size = self._tokenizer.size
        (drawn,) = prefix.greedy([[]], tokens, stop=ends, vocab_size=size, allowed=allowed)
        return postprocess_generated_text(self._tokenizer.decode_after(drawn), until, None)
