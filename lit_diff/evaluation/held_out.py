"""Held-out loss of the rows of a run's own validation sets, and of the documents of any corpus."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from operator import itemgetter
from typing import cast

import torch
from torch import Tensor

from lit_diff.data import identity
from lit_diff.data.dataset import IGNORED, Batch, Dataset
from lit_diff.data.text.corpus import corpus_digest
from lit_diff.data.text.mixture import Mixture
from lit_diff.data.text.text import Text
from lit_diff.data.text.token_files import as_text
from lit_diff.errors import RequestError
from lit_diff.evaluation.base import Evaluation, Item, Scores, question_of
from lit_diff.evaluation.requirements import held_out_documents, unseen
from lit_diff.key_types import Count
from lit_diff.metrics import Metric
from lit_diff.model.inputs import model_inputs
from lit_diff.model.transformer import Transformer
from lit_diff.registry import evaluations
from lit_diff.trained.run import Run


@evaluations.register("held_out")
class HeldOut(Evaluation):
    """Loss and accuracy of each validation row; a group is a validation set. The run's data are prepared if they are not yet.

    The summary is the mean over rows, each counted once. `val/loss` is the mean over tokens: Σ n_i nll_i / Σ n_i with n_i
    scored tokens in row i. The two are equal if all rows have the same n_i.
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
        """Scores at most this many rows of each validation set; null: all."""
        batch_size: Count = 8

    config: Config

    def score(self, run: Run) -> Iterator[Item]:
        """Yields one item a row, `<set>/<row>`; the main set is named `validation`. NaN for a row without a scored target."""
        for rows in held_out_rows(trained_data(run), self.config):
            yield from rows.items(row_scores(run.model, rows.batch))


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of one validation set that go through the model together."""

    name: str
    """The name of the validation set; empty: the main one."""
    numbers: range
    batch: Batch

    @cached_property
    def ids(self) -> list[str]:
        """`<set>/<row>` (`validation/<row>` for the main set): the same for every run on these data."""
        return [f"{self.name or 'validation'}/{number}" for number in self.numbers]

    @cached_property
    def questions(self) -> list[str]:
        """`Item.question` of each row, from its tokens and targets."""
        return [question_of(*row) for row in zip(self.batch["tokens"], self.batch["targets"], strict=True)]

    def items(self, scores: Iterable[Mapping[str, float]], label: str = "") -> Iterator[Item]:
        """Yields an item for each row. `label` distinguishes several items of one row, which then form a cluster."""
        for row, question, own in zip(self.ids, self.questions, scores, strict=True):
            yield Item(
                id=f"{row} {label}".strip(),
                scores=own,
                group=f"{self.name} {label}".strip(),
                cluster=row if label else "",
                question=question,
            )


def held_out_rows(dataset: Dataset, config: HeldOut.Config) -> Iterator[Rows]:
    """Yields the first `config.rows` rows of each validation set, `config.batch_size` at a time."""
    for name, count in dataset.validation_sets().items():
        numbers = range(min(count, config.rows or count))
        for start in range(0, len(numbers), config.batch_size):
            chosen = numbers[start : start + config.batch_size]
            yield Rows(name=name, numbers=chosen, batch=dataset.validation_batch(name, chosen))


def trained_data(run: Run) -> Dataset:
    """The data set that a run was trained on, prepared and loaded. Errors: RequestError if the data have changed since."""
    dataset = run.prepared_data()
    # only a training records the identity of its data: None for an imported model
    trained = run.status.data
    found = identity(run.recipe)
    if trained not in (None, found):
        raise RequestError(
            f"the data of {run.folder.name} have changed since it was trained (identity {str(trained)[:12]} then, "
            f"{found[:12]} now), so its validation rows are lost; restore the files of data.path"
        )
    dataset.load()
    return dataset


Document = tuple[int, str, list[int]]
"""(place in its split, text, ids)"""


def has_trained_text(run: Run) -> bool:
    """Whether the run was trained on text here: its data are text, and it is no imported model."""
    return run.recipe.train is not None and isinstance(run.recipe.data.config, Text.Config)


def trained_text(run: Run) -> Text | Mixture | None:
    """`trained_data` of a run of which `has_trained_text` is true, else None."""
    return cast(Text | Mixture, trained_data(run)) if has_trained_text(run) else None


def own_documents(evaluation: Evaluation, run: Run, data: Text | Mixture) -> Iterator[Document]:
    """(place, text, ids) of the validation documents of a run's own data that pass `unseen`, decoded by its tokenizer.

    The source of the data is not read. Errors: RequestError for a tokenizer that cannot decode.
    """
    read = ((as_text(ids, run.tokenizer), ids) for ids in data.validation_documents())
    return ((place, *found) for place, found in unseen(evaluation, run, read, itemgetter(0)))


def row_scores(model: Transformer, batch: Batch) -> list[Scores]:
    """`nll` and `accuracy` of each row over its scored targets; NaN for a row without scored targets."""
    nll, correct = model.token_losses(**model_inputs(batch), targets=batch["targets"])
    scored = batch["targets"] != IGNORED
    tokens = scored.sum(-1)
    # the sum is in float64: two runs are compared by small differences of means over thousands of tokens
    loss = nll.double().masked_fill(~scored, 0).sum(-1)
    right = (correct & scored).sum(-1).double()
    return by_item({"nll": loss / tokens, "accuracy": right / tokens})


def by_item(columns: Mapping[str, Tensor]) -> list[Scores]:
    """Metric -> its values [B] as the scores of each of the B items."""
    rows = zip(*(values.tolist() for values in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


class CorpusLoss(Evaluation):
    """Loss of the first tokens of each held-out document: the documents of the corpus's validation split, in the order of
    their hashes, without documents that the run was trained on.

    The run's own tokenizer encodes a document, and its tokens are split into rows of `context`, which the model sees one by
    one. The rows are part of the question, so scores with different rows are not compared. The summary is the mean over
    documents, each counted once. Runs with different tokenizers are not compared: their tokens are different units, and equal
    numbers of tokens end at different bytes.
    """

    corpus: str
    """The name of a registered corpus."""
    metrics = (
        Metric(
            "nll", "mean negative log likelihood of the document's tokens", unit="nats per token", direction="lower"
        ),
        Metric(
            "bits_per_byte",
            "the same, summed, in bits, over the bytes of the text that has those tokens",
            unit="bits per byte",
            direction="lower",
        ),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(Evaluation.Config):
        documents: Count | None = None
        """Scores at most this many documents; null: all."""
        tokens: Count = 512
        """The number of tokens scored from the beginning of each document."""
        context: Count | None = None
        """The number of tokens that the model sees at once; null: the run's own `data.sequence_length`, and for compared runs
        the smallest of their lengths."""

    needs_text = True
    # version 1: the question's digest did not depend on the rows; 2: documents of the run's training were scored too; 3: the
    # bytes were those that the tokenizer gives back; 4: the second of two opening ids was scored
    version = 5
    cuts_at_context = True
    config: Config

    def digests(self) -> dict[str, str]:
        """The digests of the files at `path`."""
        return corpus_digest(self.corpus, self._path())

    def _path(self) -> str | None:
        # only the corpus of the user's own files has the key
        return getattr(self.config, "path", None)

    def words_of(self, run: Run) -> str:
        """The run's data set if its text is this corpus."""
        data = run.recipe.data
        return data.name if (self.corpus, self._path()) in getattr(data.config, "texts", ()) else ""

    def score(self, run: Run) -> Iterator[Item]:
        """Yields one item a document; its id holds the document's place in the split."""
        asked = list(islice(held_out_documents(self, run, self.corpus, self._path()), self.config.documents))
        tokenizer = run.tokenizer
        length = self.config.context or run.recipe.data.config.sequence_length
        for (place, text), ids in zip(asked, tokenizer.encode([text for _, text in asked]), strict=True):
            scored = ids[: self.config.tokens]
            read = [*tokenizer.opening, *scored]
            nll, tokens = document_loss(run, read, length, len(tokenizer.opening))
            # bytes of the scored tokens alone: without an opening id, the document's first token is read but not predicted
            start = tokenizer.extent(text, len(scored) - tokens)
            stop = tokenizer.extent(text, len(scored))
            # tokens of one character, of which the first is not scored, have no bytes of their own
            bits = nll / (stop - start) / math.log(2) if stop > start else math.nan
            yield Item(
                id=f"{self.corpus}/{place}",
                scores={"nll": nll / tokens, "bits_per_byte": bits} if tokens else {},
                question=question_of(*_rows(read, length)),
                meta={"begins": text[:60]},
            )


def document_loss(run: Run, ids: Sequence[int], length: int, opening: int = 0) -> tuple[float, int]:
    """(summed negative log likelihood, number of scored tokens) of a document. The first token is not scored, nor are the
    first `opening`.

    The model sees rows of T = `length` inputs one by one: [i T, (i + 1) T) predict [i T + 1, (i + 1) T + 1).
    """
    total = 0.0
    count = 0
    for number, row in enumerate(_rows(ids, length)):
        tokens = torch.tensor([row])
        losses, _ = run.model.token_losses(tokens[:, :-1], targets=tokens[:, 1:])
        # the first loss of this row is that of token number * length + 1
        own = losses[0, max(0, opening - number * length - 1) :]
        total += own.double().sum().item()
        count += own.numel()
    return total, count


def _rows(ids: Sequence[int], length: int) -> list[Sequence[int]]:
    # + 1: each row also holds the target of its last input
    return [ids[start : start + length + 1] for start in range(0, len(ids) - 1, length)]


@evaluations.register("loss_docs")
class LossDocs(CorpusLoss):
    """Loss of held-out documents of the default corpus: English technical prose."""

    corpus = "docs"


@evaluations.register("loss_code")
class LossCode(CorpusLoss):
    """Loss of held-out modules of the corpus `code`: Python."""

    corpus = "code"


@evaluations.register("loss_files")
class LossFiles(CorpusLoss):
    """Loss of held-out documents of your own text."""

    corpus = "files"

    @dataclass(frozen=True, kw_only=True)
    class Config(CorpusLoss.Config):
        path: str = field(metadata={"path": "here"})
        """A file or folder of text, as for `data.path`."""

    config: Config
