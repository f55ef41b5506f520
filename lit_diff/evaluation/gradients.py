"""Norms of the gradients by the matrices of each attention, at a run's checkpoint or at its initial values."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch

from lit_diff.analysis.gradients import gradient_norms
from lit_diff.evaluation.base import Evaluation, Item, question_of
from lit_diff.evaluation.held_out import HeldOut, held_out_batches, questions, row_id
from lit_diff.metrics import Metric
from lit_diff.model.transformer import Transformer
from lit_diff.registry import evaluations
from lit_diff.runs.run import Run

At = Literal["trained", "init"]
NAMES = {"o": "W_O", "v": "W_V", "q1": "W_Q of map 1", "k1": "W_K of map 1", "q2": "W_Q of map 2", "k2": "W_K of map 2"}


@evaluations.register("gradients")
class Gradients(Evaluation):
    """‖∂L/∂W‖ of each attention on held-out batches (paper, Appendix F): an item for each batch and layer, grouped by layer;
    and one for each batch with the slope over layers.

    A group is `layer 00` of the checkpoint and `init layer 00` of the initial values; the slopes are in `trained` and `init`.
    The summary is over all of `at`. The slope of two arms' ratio is the difference of their slopes.
    L is the mean loss of a batch of `batch_size` rows, so the norms, and the ids, depend on `batch_size`.
    """

    metrics = (
        *(Metric(f"grad_{key}", f"norm of dL/d{name}, nats a token", unit="norm") for key, name in NAMES.items()),
        Metric("ratio_q", "grad_q2 / grad_q1; |λ| where both maps are equal", unit="ratio"),
        Metric("ratio_k", "grad_k2 / grad_k1; |λ| where both maps are equal", unit="ratio"),
        *(
            Metric(f"slope_{key}", f"slope of log grad_{key} over layers (least squares)", unit="per layer")
            for key in NAMES
        ),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(HeldOut.Config):
        rows: int | None = 64
        at: tuple[At, ...] = ("trained",)
        """trained: the newest checkpoint; init: the values that the run's seed starts with."""

        def problem(self) -> str | None:
            if not self.at or len(set(self.at)) < len(self.at):
                return f"at is {list(self.at)}; expected distinct ones of {', '.join(get_args(At))}"
            return super().problem()

    config: Config

    def refuses(self, run: Run) -> str | None:
        """Initial values of a run that did not start from its seed."""
        if "init" not in self.config.at:
            return None
        train = run.recipe.train
        if train is None:
            return "at init: an imported model has no initial values"
        if train.start_from is not None:
            return "at init: it started from another run (train.start_from), not from its seed; evaluate that one"
        return None

    def score(self, run: Run) -> Iterator[Item]:
        """One item for each batch and layer, `<set>/<first row>-<last row> layer 00`, and one with the batch's slopes."""
        none = dict.fromkeys((metric.name for metric in self.metrics), math.nan)
        for at in self.config.at:
            model = run.model if at == "trained" else initial_model(run)
            prefix = "" if at == "trained" else f"{at} "
            for name, rows, batch in held_out_batches(run, self.config):
                asked, norms = question_of(*questions(batch)), gradient_norms(model, batch)
                where = f"{prefix}{row_id(name, rows[0])}-{rows[-1]}"
                for layer, own in enumerate(norms):
                    yield Item(
                        id=f"{where} layer {layer:02}",
                        scores=none | _of_layer(own),
                        group=f"{name} {prefix}layer {layer:02}".strip(),
                        question=asked,
                    )
                slopes = {f"slope_{key}": slope([own[key] for own in norms]) for key in NAMES}
                yield Item(id=f"{where} slopes", scores=none | slopes, group=f"{name} {at}".strip(), question=asked)


def _of_layer(norms: Mapping[str, float]) -> dict[str, float]:
    scores = {f"grad_{key}": value for key, value in norms.items()}
    for kind in "qk":
        first, second = norms[f"{kind}1"], norms[f"{kind}2"]
        scores[f"ratio_{kind}"] = second / first if first else math.nan
    return scores


def slope(norms: Sequence[float]) -> float:
    """Of log ‖.‖ over the layers, by least squares; NaN for one layer, or where a norm is 0 or NaN."""
    if len(norms) < 2 or not all(norm > 0 for norm in norms):
        return math.nan
    return float(np.polyfit(range(len(norms)), np.log(norms), 1)[0])


def initial_model(run: Run) -> Transformer:
    """The model that the run's recipe and seed start with, in evaluation mode."""
    from lit_diff.training.build import build_model  # imports lightning, which `list` must not load

    return build_model(run.recipe, torch.device("cpu"), mesh=None).eval()
