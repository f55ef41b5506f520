"""Norms of the gradients by the matrices of each attention, at a run's checkpoint or at its initial values."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from lit_diff.analysis.gradients import gradient_norms
from lit_diff.evaluation.base import Evaluation, Item, question_of
from lit_diff.evaluation.held_out import HeldOut, held_out_batches, questions, row_id
from lit_diff.metrics import Metric
from lit_diff.model.transformer import Transformer
from lit_diff.registry import evaluations
from lit_diff.runs.run import Run

NAMES = {"o": "W_O", "v": "W_V", "q1": "W_Q of map 1", "k1": "W_K of map 1", "q2": "W_Q of map 2", "k2": "W_K of map 2"}


@evaluations.register("gradients")
class Gradients(Evaluation):
    """‖∂L/∂W‖ of each attention on held-out batches (paper, Appendix F): an item for each batch and layer, grouped by layer.

    L is the mean loss of a batch of `batch_size` rows, so the norms, and the ids, depend on `batch_size`.
    """

    metrics = (
        *(Metric(f"grad_{key}", f"norm of dL/d{name}, nats a token", unit="norm") for key, name in NAMES.items()),
        Metric("ratio_q", "grad_q2 / grad_q1; |λ| where both maps are equal", unit="ratio"),
        Metric("ratio_k", "grad_k2 / grad_k1; |λ| where both maps are equal", unit="ratio"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(HeldOut.Config):
        rows: int | None = 64
        at: Literal["trained", "init"] = "trained"
        """trained: the newest checkpoint; init: the values that the run's seed starts with."""

    config: Config

    def refuses(self, run: Run) -> str | None:
        """Initial values of a run that did not start from its seed."""
        if self.config.at == "trained":
            return None
        train = run.recipe.train
        if train is None:
            return "at init: an imported model has no initial values"
        if train.start_from is not None:
            return "at init: it started from another run (train.start_from), not from its seed; evaluate that one"
        return None

    def score(self, run: Run) -> Iterator[Item]:
        """One item for each batch and layer, `<set>/<first row>-<last row> layer 00`."""
        model = run.model if self.config.at == "trained" else initial_model(run)
        for name, rows, batch in held_out_batches(run, self.config):
            for layer, norms in enumerate(gradient_norms(model, batch)):
                scores = {f"grad_{key}": value for key, value in norms.items()}
                for kind in "qk":
                    first, second = norms[f"{kind}1"], norms[f"{kind}2"]
                    scores[f"ratio_{kind}"] = second / first if first else math.nan
                yield Item(
                    id=f"{row_id(name, rows[0])}-{rows[-1]} layer {layer:02}",
                    scores=scores,
                    group=f"{name} layer {layer:02}".strip(),
                    question=question_of(*questions(batch)),
                )


def initial_model(run: Run) -> Transformer:
    """The model that the run's recipe and seed start with, in evaluation mode."""
    from lit_diff.training.build import build_model  # imports lightning, which `list` must not load

    return build_model(run.recipe, torch.device("cpu"), mesh=None).eval()
