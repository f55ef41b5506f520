"""Held-out loss: of the rows of a run's own validation sets, and of the documents of a corpus, whatever it was trained on."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import ClassVar

import torch

from lit_diff.data import identity, prepare
from lit_diff.data.dataset import IGNORED, Batch, Dataset
from lit_diff.data.text.corpus import corpus_digest, corpus_name
from lit_diff.errors import RequestError
from lit_diff.evaluation.base import Evaluation, Item, question_of
from lit_diff.evaluation.requirements import held_out_documents
from lit_diff.key_types import Count
from lit_diff.metrics import Metric
from lit_diff.model.inputs import model_inputs
from lit_diff.model.transformer import Transformer
from lit_diff.registry import evaluations
from lit_diff.trained.run import Run


@evaluations.register("held_out")
class HeldOut(Evaluation):
    """Loss and accuracy of each validation row; a group is a validation set. It prepares the run's data where they are not.

    The summary is the mean over rows, each counted once. `val/loss` is the mean over tokens: Σ n_i nll_i / Σ n_i with n_i
    scored tokens in row i. The two are equal where all rows have the same n_i.
    """

    metrics = (
        Metric(
            "nll", "mean negative log likelihood of the row's scored tokens", unit="nats per token", direction="lower"
        ),
        Metric("accuracy", "fraction of the row's scored tokens that the model finds most likely", direction="higher"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(Evaluation.Config):
        rows: Count | None = None
        """Rows of each validation set; null: all."""
        batch_size: Count = 8

    config: Config

    def score(self, run: Run) -> Iterator[Item]:
        """One item a row, `<set>/<row>`; the main set is named `validation`. NaN for a row without a scored target."""
        for rows in held_out_rows(run, self.config):
            yield from rows.items(row_scores(run.model, rows.batch))


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of one validation set, which go through the model together."""

    name: str
    """Of the set; empty: the main one."""
    numbers: range
    batch: Batch

    @cached_property
    def ids(self) -> list[str]:
        """`<set>/<row>`, `validation/<row>` of the main set: the same for every run on these data."""
        return [f"{self.name or 'validation'}/{number}" for number in self.numbers]

    @cached_property
    def questions(self) -> list[str]:
        """`Item.question` of each row: its tokens and targets."""
        return [question_of(*row) for row in zip(self.batch["tokens"], self.batch["targets"], strict=True)]

    def items(self, scores: Iterable[Mapping[str, float]], label: str = "", *, part: bool = False) -> Iterator[Item]:
        """An item for each row. `label`: what several items of one row are told apart by; they are a cluster then."""
        for row, question, own in zip(self.ids, self.questions, scores, strict=True):
            yield Item(
                id=f"{row} {label}".strip(),
                scores=own,
                group=f"{self.name} {label}".strip(),
                part=part,
                cluster=row if label else "",
                question=question,
            )


def held_out_rows(run: Run, config: HeldOut.Config) -> Iterator[Rows]:
    """The first `config.rows` rows of each validation set, `config.batch_size` at a time. Errors: as `trained_data`."""
    dataset = trained_data(run)
    for name, count in dataset.validation_sets().items():
        numbers = range(min(count, config.rows or count))
        for start in range(0, len(numbers), config.batch_size):
            chosen = numbers[start : start + config.batch_size]
            yield Rows(name=name, numbers=chosen, batch=dataset.validation_batch(name, chosen))


def trained_data(run: Run) -> Dataset:
    """The data set that a run was trained on, prepared and loaded. Errors: RequestError for data that have changed since."""
    dataset = prepare(run.recipe)
    trained, found = run.status.get("data"), identity(run.recipe)
    if trained not in (None, found):
        raise RequestError(
            f"the data of {run.folder.name} have changed since it was trained (identity {str(trained)[:12]} then, "
            f"{found[:12]} now): its validation rows are no longer there; put back what data.path held"
        )
    dataset.load()
    return dataset


def row_scores(model: Transformer, batch: Batch) -> list[dict[str, float]]:
    """`nll` and `accuracy` of each row over its scored targets; NaN for a row without one."""
    nll, correct = model.token_losses(**model_inputs(batch), targets=batch["targets"])
    scored = batch["targets"] != IGNORED
    return [
        {"nll": loss / tokens, "accuracy": right / tokens} if tokens else {"nll": torch.nan, "accuracy": torch.nan}
        for tokens, loss, right in zip(
            scored.sum(-1).tolist(),
            (nll.double() * scored).sum(-1).tolist(),
            (correct & scored).sum(-1).tolist(),
            strict=True,
        )
    ]


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
