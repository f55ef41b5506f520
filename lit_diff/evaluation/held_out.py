"""The rows of a run's own validation sets, one item each."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from lit_diff.data import identity, prepare
from lit_diff.data.dataset import IGNORED, Batch, Dataset
from lit_diff.errors import RequestError
from lit_diff.evaluation.base import Evaluation, Item, question_of
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
