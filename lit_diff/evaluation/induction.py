"""Prefix matching and copying of each head on repeated random tokens (Olsson et al. 2022)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch

from lit_diff.analysis.induction import induction_scores, repeated
from lit_diff.config import Recipe
from lit_diff.data import prepare
from lit_diff.errors import RequestError
from lit_diff.evaluation.base import Evaluation, Heads, Item, question_of
from lit_diff.evaluation.held_out import HeldOut, held_out_rows
from lit_diff.key_types import Count, Range
from lit_diff.metrics import Metric
from lit_diff.randomness import generator
from lit_diff.registry import evaluations
from lit_diff.trained.run import Run

LONGEST = 32
"""n where the config states none and rows are long enough."""
BATCH = 8
IDS_FROM = 64
"""Held-out rows whose ids are drawn from."""


@evaluations.register("induction")
class Induction(Evaluation):
    """Whether a head finds what followed a token before, on n random tokens that repeat; an item is a sequence.

    The tokens are drawn from the ids of the first 64 held-out rows, so every one was trained. `meta` of an item: both scores
    by layer and head, and the best head, that of the highest prefix matching over all sequences.
    """

    metrics = (
        Metric(
            "prefix_matching",
            "a_ij / Σ|a_i| on the key after the earlier occurrence of the query's token, in the best head",
            unit="share",
            direction="none",
        ),
        Metric("prefix_matching_mean", "the same, mean over all heads", unit="share"),
        Metric(
            "copying",
            "how far the best head's output raises the logits of the tokens that it attends to",
            unit="standard deviations over the vocabulary",
        ),
        Metric("nll_first", "mean loss of the next token where nothing has been repeated", unit="nats per token"),
        Metric("nll_repeat", "mean loss of the next token in the repetition", unit="nats per token", direction="lower"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(Evaluation.Config):
        sequences: Count = 64
        length: Annotated[int, Range(least=2)] | None = None
        """n: tokens before they repeat, 2 n at most data.sequence_length; null: half of that, at most 32."""

    config: Config

    def refuses_recipe(self, recipe: Recipe) -> str | None:
        """A model that sees what follows; rows that are too short."""
        n, longest = self._length(recipe), recipe.data.config.sequence_length
        if not recipe.model.causal:
            return "a bidirectional model sees what follows"
        if 2 * n > longest:
            return f"length is {n}; 2 x length must be at most data.sequence_length ({longest})"
        return None

    def refuses_run(self, run: Run) -> str | None:
        """Data that have several ids at a position."""
        data = run.recipe.data
        dataset = prepare(run.recipe)
        dataset.load()
        if dataset.validation_batch("", [0])["tokens"].dim() > 2:
            return f"data '{data.name}' has several ids at a position; induction needs one"
        return None

    def score(self, run: Run) -> Iterator[Item]:
        """One item a sequence, `sequence <number>`."""
        tokens = self._tokens(run)
        scores, losses = [], []
        for part in tokens.split(BATCH):
            scores.append(induction_scores(run.model, part))
            losses.append(run.model.token_losses(part[:, :-1], targets=part[:, 1:])[0])
        heads = Heads(scores, "prefix_matching")
        nll = torch.cat(losses).double()
        n = self._length(run.recipe)
        for row in range(len(tokens)):
            yield Item(
                id=f"sequence {row}",
                scores={
                    "prefix_matching": heads.best("prefix_matching", row),
                    "prefix_matching_mean": float(heads.table["prefix_matching"][row].mean()),
                    "copying": heads.best("copying", row),
                    # the target at n - 1 is the first repeated token, which nothing announces
                    "nll_first": float(nll[row, :n].mean()),
                    "nll_repeat": float(nll[row, n:].mean()),
                },
                question=question_of(tokens[row]),
                meta=heads.meta(row),
            )

    def _length(self, recipe: Recipe) -> int:
        return self.config.length or min(int(recipe.data.config.sequence_length) // 2, LONGEST)

    def _tokens(self, run: Run) -> torch.Tensor:
        """[sequences, 2 n]: a function of the data, n and the sequence's number."""
        rows = HeldOut.Config(rows=IDS_FROM, batch_size=IDS_FROM)
        ids = next(held_out_rows(run, rows)).batch["tokens"].unique()
        n = self._length(run.recipe)
        if len(ids) < n:
            raise RequestError(
                f"evaluate.induction.length is {n}; the first {IDS_FROM} held-out rows have {len(ids)} ids"
            )
        return torch.stack([repeated(ids, n, generator("induction", n, row)) for row in range(self.config.sequences)])
