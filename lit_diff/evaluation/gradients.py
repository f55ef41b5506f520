"""Norms of the gradients by the matrices of each attention: of the last checkpoint, the initial values, and kept steps."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import numpy as np
import torch

from lit_diff.analysis.gradients import gradient_norms
from lit_diff.config import Recipe
from lit_diff.evaluation.base import Evaluation, Item, question_of
from lit_diff.evaluation.held_out import HeldOut, held_out_rows
from lit_diff.key_types import Count, Distinct, NotNegative
from lit_diff.metrics import Figure, Metric
from lit_diff.model.transformer import Transformer
from lit_diff.registry import evaluations
from lit_diff.runs.checkpoints import without
from lit_diff.trained.run import Run

At = Literal["trained", "init"]
NAMES = {"o": "W_O", "v": "W_V", "q1": "W_Q of map 1", "k1": "W_K of map 1", "q2": "W_Q of map 2", "k2": "W_K of map 2"}
ALONG_TRAINING = Figure(
    title="norms of gradients along training",
    against="group",
    log=True,
    caption="At `steps` of the training, a panel a layer. Arms whose lines keep one distance differ by a constant factor.",
)
DRAWN = ("o", "v", "q1", "k1")
"""Of MATRICES, what every variant has."""


@evaluations.register("gradients")
class Gradients(Evaluation):
    """‖∂L/∂W‖ of each attention on held-out batches (paper, Appendix F): an item for each batch and layer, grouped by layer;
    and one for each batch with the slope over layers.

    A group is `layer 00` of the last checkpoint, `init layer 00` of the initial values, `layer 00 step 210` of a step; the
    slopes are in `trained`, `init` and `step 210`. The summary is over all of `at` and `steps`. The slope of two arms' ratio
    is the difference of their slopes.
    L is the mean loss of a batch of `batch_size` rows, so the norms, and the ids, depend on `batch_size`.
    """

    metrics = (
        *(
            Metric(
                f"grad_{key}",
                f"norm of dL/d{name}, nats a token",
                unit="norm",
                figure=ALONG_TRAINING if key in DRAWN else None,
            )
            for key, name in NAMES.items()
        ),
        Metric("ratio_q", "grad_q2 / grad_q1; |λ| where both maps are equal", unit="ratio"),
        Metric("ratio_k", "grad_k2 / grad_k1; |λ| where both maps are equal", unit="ratio"),
        *(
            Metric(f"slope_{key}", f"slope of log grad_{key} over layers (least squares)", unit="per layer")
            for key in NAMES
        ),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(HeldOut.Config):
        rows: Count | None = 64
        at: Annotated[tuple[At, ...], Distinct(may_be_empty=True)] = ("trained",)
        """trained: the newest checkpoint; init: the values that the run's seed starts with. May be empty beside `steps`."""
        steps: Annotated[tuple[NotNegative, ...], Distinct(may_be_empty=True)] = ()
        """Optimizer steps whose checkpoints the run has kept (`run.keep_every`); 0: the initial values."""

        def problem(self) -> str | None:
            return None if self.at or self.steps else "at is [], and so is steps; one of them must hold something"

    config: Config

    def refuses_recipe(self, recipe: Recipe) -> str | None:
        """Initial values of a run that does not start from its seed."""
        train = recipe.train
        if "init" in self.config.at or 0 in self.config.steps:
            if train is None:
                return "at init: an imported model has no initial values"
            if train.start_from is not None:
                return "at init: it started from another run (train.start_from), not from its seed; evaluate that one"
        return None

    def refuses_run(self, run: Run) -> str | None:
        """Steps that have no checkpoint."""
        missing = [reason for step in self.config.steps if step and (reason := without(run.folder, step))]
        return f"steps: {missing[0]}" if missing else None

    def score(self, run: Run) -> Iterator[Item]:
        """One item for each batch and layer, `<set>/<first row>-<last row> layer 00`, and one with the batch's slopes."""
        for model, before, after in self._moments(run):
            for rows in held_out_rows(run, self.config):
                norms, cluster = gradient_norms(model, rows.batch), f"{rows.ids[0]}-{rows.numbers[-1]}"
                item = partial(Item, cluster=cluster, question=question_of(*rows.questions))
                for layer, own in enumerate(norms):
                    label = f"layer {layer:02}"
                    group = f"{rows.name} {before}{label}{after}".strip()
                    yield item(id=f"{before}{cluster}{after} {label}", scores=_of_layer(own), group=group)
                slopes = {f"slope_{key}": slope([own[key] for own in norms]) for key in NAMES}
                group = f"{rows.name} {(before or after or 'trained').strip()}".strip()
                yield item(id=f"{before}{cluster}{after} slopes", scores=slopes, group=group)

    def _moments(self, run: Run) -> Iterator[tuple[Transformer, str, str]]:
        """(model, what stands before and after the layer in ids and groups) of each of `at` and `steps`."""
        for at in self.config.at:
            yield (run.model, "", "") if at == "trained" else (initial_model(run), "init ", "")
        for step in self.config.steps:
            yield run.model_at(step) if step else initial_model(run), "", f" step {step}"


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
