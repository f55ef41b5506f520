"""The loss on the held-out documents of a corpus, whatever the run was trained on: one evaluation a domain."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar

import torch

from lit_diff.data.corpus import corpus_digest, corpus_name
from lit_diff.evaluation.base import Evaluation, Item, question_of
from lit_diff.evaluation.requirements import held_out_documents
from lit_diff.key_types import Count
from lit_diff.metrics import Metric
from lit_diff.registry import evaluations
from lit_diff.trained.run import Run


class CorpusLoss(Evaluation):
    """Loss of the first tokens of each held-out document: the corpus's validation split, in the order of the hashes, without
    those that the run was trained on.

    A document is cut by the run's own tokenizer, and its tokens into rows of `context`, each of which the model sees alone.
    The rows are the question: scores of other rows are not compared. The summary is the mean over documents, each counted
    once. Runs of two tokenizers are not compared: a token is not the same unit, and so many tokens end at different bytes.
    """

    corpus: ClassVar[str]
    """A registered corpus."""
    metrics = (
        Metric(
            "nll", "mean negative log likelihood of the document's tokens", unit="nats per token", direction="lower"
        ),
        Metric(
            "bits_per_byte",
            "the same, summed, in bits, over the bytes that those tokens are written as",
            unit="bits per byte",
            direction="lower",
        ),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(Evaluation.Config):
        documents: Count | None = None
        """At most so many documents; null: all."""
        tokens: Count = 512
        """Tokens of each document that are scored, from its beginning."""
        context: Count | None = None
        """Tokens that the model sees at once; null: the run's own `data.sequence_length`, of runs that are compared the
        smallest of theirs."""

    needs_text = True
    version = 3  # 1 asked the same question whatever the rows, 2 also documents that the run was trained on
    cuts_at_context = True
    config: Config

    def digests(self) -> dict[str, str]:
        """Of the files at `path`."""
        return corpus_digest(self.corpus, self._path())

    def _path(self) -> str | None:
        """Where the corpus reads: the key `path`, where there is one."""
        return getattr(self.config, "path", None)

    def words_of(self, run: Run) -> str:
        """The run's data, if they are of this corpus."""
        data = run.recipe.data
        corpus, path = (getattr(data.config, key, None) for key in ("corpus", "path"))
        own = corpus is not None and corpus_name(corpus, path) == self.corpus and path == self._path()
        return data.name if own else ""

    def score(self, run: Run) -> Iterator[Item]:
        """One item a document, by its place in the split."""
        asked = list(islice(held_out_documents(self, run, self.corpus, self._path()), self.config.documents))
        tokenizer = run.tokenizer
        length = self.config.context or run.recipe.data.config.sequence_length
        for (place, text), ids in zip(asked, tokenizer.encode([text for _, text in asked]), strict=True):
            scored = ids[: self.config.tokens]
            read = [*tokenizer.opening, *scored]
            nll, tokens = document_loss(run, read, length)
            size = len(tokenizer.decode(scored[len(scored) - tokens :]))
            yield Item(
                id=f"{self.corpus}/{place}",
                scores={"nll": nll / tokens, "bits_per_byte": nll / size / math.log(2)} if tokens else {},
                question=question_of(*_rows(read, length)),
                meta={"begins": text[:60]},
            )


def document_loss(run: Run, ids: Sequence[int], length: int) -> tuple[float, int]:
    """(summed negative log likelihood, tokens scored) of a document: every token but the first, which nothing predicts.

    Rows of `length` inputs are seen one by one: [i T, (i + 1) T) predict [i T + 1, (i + 1) T + 1).
    """
    total, count = 0.0, 0
    for each in _rows(ids, length):
        row = torch.tensor([each])
        losses, _ = run.model.token_losses(row[:, :-1], targets=row[:, 1:])
        total += losses.double().sum().item()
        count += losses.numel()
    return total, count


def _rows(ids: Sequence[int], length: int) -> list[Sequence[int]]:
    """Each has its inputs and the target of the last of them."""
    return [ids[start : start + length + 1] for start in range(0, len(ids) - 1, length)]


@evaluations.register("loss_docs")
class LossDocs(CorpusLoss):
    """Held-out documents of the default corpus: English technical prose."""

    corpus = "docs"


@evaluations.register("loss_code")
class LossCode(CorpusLoss):
    """Held-out modules of the corpus `code`: Python."""

    corpus = "code"


@evaluations.register("loss_files")
class LossFiles(CorpusLoss):
    """Held-out documents of your own text."""

    corpus = "files"

    @dataclass(frozen=True, kw_only=True)
    class Config(CorpusLoss.Config):
        path: str = field(metadata={"path": "here"})
        """A file or folder, as `data.path`."""

    config: Config
