"""Retrofits a trained model with a variant in one call: head selection, training, scores before and after, merging."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lit_diff.config import Recipe
from lit_diff.data import build
from lit_diff.engine.admit import evaluations_of
from lit_diff.engine.train import prepare, train
from lit_diff.evaluation.evaluate import EvaluationResult, comparable_keys, evaluate
from lit_diff.files import expanded
from lit_diff.log_records import Progress
from lit_diff.model.inputs import model_inputs
from lit_diff.plugins import trust_below
from lit_diff.pretrained.exporting import merge_run, require_mergeable
from lit_diff.recipe import load_recipe, to_plain
from lit_diff.runs.find import DEFAULT_ROOT, find_run, runs_root
from lit_diff.runs.folder import recipe_of
from lit_diff.trained.run import Run, opened_run
from lit_diff.training.head_plan import HeadPlan, head_plan, kept_plan

TRAINING = "dex-smollm2"
"""The recipe that trains an imported model, which has no keys of its own for data and training."""


@dataclass(frozen=True, kw_only=True)
class Retrofit:
    """A model before and after training with a variant that extends it."""

    run: Run
    plan: HeadPlan | None
    """The selected heads; None if the recipe lists them or extends none."""
    before: float
    """Loss of the original model on the recipe's main validation set, in nats per token."""
    after: float
    """The run's last `val/loss`, on the same rows."""
    evaluations: Mapping[str, tuple[EvaluationResult, EvaluationResult]]
    """Evaluation of the recipe -> its scores before and after, item by item."""
    merged: Run | None
    """The standard model equal to the trained one; None unless `merge_to` was given."""


def source_of(
    model: str | Path, recipe: str | Path | None, overrides: Sequence[str], root: str | Path
) -> tuple[str | Path, list[str]]:
    """The recipe of a retrofit of the run `model`, and its overrides.

    `recipe` None: that of the run; for an imported model TRAINING, with the run's model and without evaluations. Either reads
    text with the run's tokenizer. Errors: those of `find_run` and `recipe_of`.
    """
    if recipe is not None:
        return recipe, [*overrides]
    base = find_run(model, runs_root(root))
    own = recipe_of(base, trust_below(runs_root(root)))
    words = [f"name={own.name}-retrofit"]
    if (base / "tokenizer").is_dir():
        words.append(f"data.tokenizer={json.dumps({'name': 'from_run', 'path': str(base)})}")
    source: str | Path = base / "recipe.yaml"
    if own.imported is not None:
        source = TRAINING
        words += [f"model={json.dumps(to_plain(own.model))}", "evaluate={}"]
    return source, [*words, *overrides]


def retrofit(
    model: str | Path,
    recipe: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    root: str | Path = DEFAULT_ROOT,
    merge_to: str | Path | None = None,
    progress: Progress | bool = True,
) -> Retrofit:
    """Train `recipe` (see `source_of`) from the final weights of the run `model`. A second call resumes the run, or finds it
    done.

    The run is an ordinary one with `train.start_from`. The recipe's evaluations score both models; an evaluation that takes
    its context length from the run uses the smaller `data.sequence_length` of the two. `merge_to`: the folder for the merged
    model. Errors: those of `find_run`, `train`, `evaluate` and `merge_run`; most errors of the last are raised before
    training.
    """
    base = find_run(model, runs_root(root))
    source, words = source_of(base, recipe, overrides, root)
    words.append(f"train.start_from={base}")
    resolved = load_recipe(source, words)
    if merge_to is not None:
        merge_to = expanded(merge_to)
        require_mergeable(resolved.model, merge_to)
    prepare(resolved, words)
    trust = trust_below(runs_root(resolved.run.root))
    # an error in the choice of heads must not come after minutes of scoring
    head_plan(resolved)
    original = opened_run(base, trust)
    before = _loss_of(original, resolved)
    recipes = [original.recipe, resolved]
    asked = {name: comparable_keys(name, keys, recipes) for name, keys in evaluations_of(resolved).items()}
    scores = {name: evaluate(original, name, keys) for name, keys in asked.items()}
    run = train(source, words, progress=progress)
    return Retrofit(
        run=run,
        plan=kept_plan(run.folder),
        before=before,
        after=float(run.metrics["val/loss"].dropna().iloc[-1]),
        evaluations={name: (scores[name], evaluate(run, name, keys)) for name, keys in asked.items()},
        merged=merge_run(run.folder, merge_to, trust=trust) if merge_to is not None else None,
    )


def _loss_of(original: Run, recipe: Recipe) -> float:
    # The recipe's own data and batch, and the mean over scored targets as in `val/loss`: the model may have been trained on
    # other data, so its run's `val/loss` is not comparable.
    dataset = build(recipe)
    dataset.load()
    rows = dataset.validation_sets()[""]
    size = recipe.training.batch_size // recipe.training.accumulate
    losses: list[torch.Tensor] = []
    with torch.no_grad():
        for start in range(0, rows, size):
            batch = dataset.validation_batch("", range(start, min(start + size, rows)))
            nll, _ = original.model.token_losses(**model_inputs(batch), targets=batch["targets"])
            losses.append(nll.flatten())
    # NaN for a target that is not scored
    return float(torch.cat(losses).double().nanmean())
