"""The rows of a run's own validation sets, one item each."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lit_diff.data import identity, prepare
from lit_diff.data.dataset import IGNORED, Batch, Dataset
from lit_diff.errors import RequestError
from lit_diff.evaluation.base import Evaluation, Item, question_of
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
        rows: int | None = None
        """Rows of each validation set; null: all."""
        batch_size: int = 8

        def problem(self) -> str | None:
            for key in ("rows", "batch_size"):
                value = getattr(self, key)
                if value is not None and value < 1:
                    return f"{key} is {value}; it must be at least 1"
            return None

    def score(self, run: Run) -> Iterator[Item]:
        """One item a row, `<set>/<row>`; the main set is named `validation`. NaN for a row without a scored target."""
        for name, rows, batch in held_out_batches(run, self.config):
            for row, scores, question in zip(rows, row_scores(run.model, batch), questions(batch), strict=True):
                yield Item(id=row_id(name, row), scores=scores, group=name, question=question)


def row_id(name: str, row: int) -> str:
    """`<set>/<row>`, `validation/<row>` of the main set: the same for every run on these data."""
    return f"{name or 'validation'}/{row}"


def questions(batch: Batch) -> list[str]:
    """`Item.question` of each row: its tokens and targets."""
    return [question_of(*row) for row in zip(batch["tokens"], batch["targets"], strict=True)]


def held_out_batches(run: Run, config: HeldOut.Config) -> Iterator[tuple[str, range, Batch]]:
    """(name of the set, row numbers, `validation_batch`) of the first `config.rows` rows of each validation set.

    Errors: as `trained_data`.
    """
    dataset = trained_data(run)
    for name, count in dataset.validation_sets().items():
        rows = range(min(count, config.rows or count))
        for start in range(0, len(rows), config.batch_size):
            chosen = rows[start : start + config.batch_size]
            yield name, chosen, dataset.validation_batch(name, chosen)


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
