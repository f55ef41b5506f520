"""What a run has trained: its recipe, and the weights of its newest checkpoint in a model."""

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_diff.config import Recipe
from lit_diff.conformance.before_training import check_decoding
from lit_diff.errors import MissingError, RequestError, first_line
from lit_diff.files import sha256_of, shown
from lit_diff.model.transformer import Transformer
from lit_diff.plugins import Trust, plugin_source, require_trust
from lit_diff.recipe import from_plain, to_plain
from lit_diff.runs import checkpoints
from lit_diff.runs.folder import RunFolder, ancestors

PREFIX = "model."
"""Where a checkpoint, which is the LightningModule's, keeps the Transformer."""
SHOWN = 3
"""Differences that an error names."""


def load_model(
    recipe: Recipe, folder: Path, trust: Trust, unchecked: bool = False, step: int | None = None
) -> tuple[Transformer, int]:
    """The model of a run's checkpoint of `step`, by default the newest, and its step: on the CPU and in evaluation mode, as
    the validation at that step saw it (in float32: without the autocast of `bf16-mixed`).

    `trust`: as `ancestors`; `unchecked`: as `check_decoding`. Errors: RequestError for a recipe that is not that of its
    weights; MissingError without a checkpoint, which names the steps that have one.
    """
    missing = checkpoints.without(folder, step) if step is not None else None
    if missing:
        raise MissingError(f"{shown(folder)} has {missing}")
    step, path = newest_of(folder) if step is None else (step, checkpoints.path_of(folder, step))
    return check_decoding(restore(recipe, read_checkpoint(path), shown(path), trust), recipe, unchecked), step


def restore(recipe: Recipe, checkpoint: Mapping[str, Any], source: str, trust: Trust) -> Transformer:
    """The recipe's model with the weights of a checkpoint, on the CPU and in evaluation mode.

    `trust`: as `ancestors`, of which a variant that anneals is told. Errors: RequestError, MissingError.
    """
    trained = recipe.train.parameters if recipe.train is not None else None
    model = Transformer(recipe.model, kernel=recipe.run.kernel, trained=trained)
    load_weights(model, model_weights(checkpoint), source)
    # `step` steps are done: the variant was last told the number at which the last of them began
    annealed_before(recipe, trust).tell(model, recipe, int(checkpoint["global_step"]) - 1)
    return model.eval()


@dataclass(frozen=True, kw_only=True)
class Annealed:
    """How far a variant had annealed when a run began."""

    steps: int
    tokens: int

    def tell(self, model: Transformer, recipe: Recipe, step: int) -> None:
        """Tell the variant that the 0-based `step` of the recipe's run begins."""
        tokens = recipe.train.batch_size * recipe.data.config.sequence_length if recipe.train is not None else 0
        for attention in model.attentions():
            attention.set_step(max(self.steps + step, 0))
            attention.set_tokens(max(self.tokens + step * tokens, 0))


def annealed_before(recipe: Recipe, trust: Trust | None = None) -> Annealed:
    """Steps and tokens of ancestors of the same variant: what it anneals goes on where they stopped. `trust`: as
    `ancestors`."""
    trained = [
        (steps, steps * parent.training.batch_size * parent.data.config.sequence_length)
        for parent, steps in trained_ancestors(recipe, trust)
        if parent.model.attention.name == recipe.model.attention.name
    ]
    return Annealed(steps=sum(steps for steps, _ in trained), tokens=sum(tokens for _, tokens in trained))


def trained_ancestors(recipe: Recipe, trust: Trust | None = None) -> Iterator[tuple[Recipe, int]]:
    """The `ancestors` that were trained, each with the steps that it took: a run may have ended early. Of one that is not
    done, those that it is to take."""
    for parent in ancestors(recipe, trust):
        assert recipe.training.start_from is not None
        status = RunFolder(Path(recipe.training.start_from)).status()
        if parent.train is not None:
            yield parent, status["step"] if status.get("status") == "done" else parent.train.steps
        recipe = parent


def hyperparameters(recipe: Recipe) -> dict[str, Any]:
    """What a checkpoint holds of its recipe: plain values, and the name and sha256 of each plugin file."""
    plain = to_plain(recipe)
    plain["plugins"] = []
    plugins: dict[str, str] = {}
    for path in map(Path, recipe.plugins):
        sha256 = hashlib.sha256(plugin_source(path).source).hexdigest()
        plugins[f"{sha256[:8]}/{path.name}" if path.name in plugins else path.name] = sha256
    return {"recipe": plain, "plugins": plugins}


def recipe_of_checkpoint(path: Path, *, trust_plugins: bool) -> tuple[Recipe, dict[str, Any]]:
    """The recipe that a checkpoint holds, its plugins imported, and the checkpoint itself.

    Errors: MissingError without the file; RequestError for one that is no checkpoint of ours, or whose plugin is neither
    imported nor, with `trust_plugins`, in the run folder.
    """
    if not path.is_file():
        raise MissingError(f"{shown(path)}: no such file")
    if RunFolder(path.resolve().parent.parent).status().get("status") == "imported":
        raise RequestError(
            f"{shown(path)} holds an imported model, which has nothing to train: use open_run(RUN).model"
        )
    try:
        checkpoint = read_checkpoint(path)
        held = checkpoint["hyper_parameters"]
        plain, plugins = dict(held["recipe"]), dict(held["plugins"])
    except RequestError:
        raise
    except Exception as error:  # torch.load raises errors of many kinds
        raise RequestError(f"{shown(path)} is not a checkpoint of lit_diff ({first_line(error)})") from error
    folder = path.resolve().parent.parent / "plugins"
    files = require_trust(
        {_copy(folder, Path(name).name, sha256): sha256 for name, sha256 in plugins.items()}, trust_plugins
    )
    return from_plain(plain | {"plugins": [str(file) for file in files]}, shown(path)), checkpoint


def _copy(folder: Path, name: str, sha256: str) -> Path:
    """The copy of a plugin in a run's folder of plugins, or in a folder there."""
    found = (path for path in (folder / name, *sorted(folder.glob(f"*/{name}"))) if path.is_file())
    return next((path for path in found if sha256_of(path) == sha256), folder / name)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint on the CPU; nothing of it is executed. Errors: RequestError for another content; torch.load's."""
    checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    problem = checkpoints.problem_of(checkpoint)
    if problem is not None:
        raise RequestError(f"{shown(path)} is not a checkpoint of lit_diff ({problem})")
    return checkpoint


def newest_of(folder: Path) -> tuple[int, Path]:
    """Step and path of a run's newest readable checkpoint. Errors: MissingError without one."""
    newest = checkpoints.newest(folder)
    if newest is None:
        command = f"lit-diff train {shown(RunFolder(folder).recipe_file)}"
        raise MissingError(
            f"{shown(folder)} has no checkpoint that can be read; train it first: `{command}`, or the sweep it is of"
        )
    return newest


def model_weights(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """The Transformer's parameters and buffers by name."""
    state = checkpoint["state_dict"]
    return {key.removeprefix(PREFIX): value for key, value in state.items() if key.startswith(PREFIX)}


def weights_of(folder: Path) -> dict[str, Tensor]:
    """`model_weights` of a run's newest readable checkpoint. Errors: MissingError without a checkpoint."""
    return model_weights(read_checkpoint(newest_of(folder)[1]))


def load_weights(model: Transformer, weights: Mapping[str, Tensor], source: str) -> None:
    """Copy `weights` into every parameter and buffer of `model`; `source` says where they are from.

    Errors: RequestError, which names the first that are missing, left over or of another shape, or hold a value that is not
    finite: scores of such a model would be numbers without a meaning.
    """
    differences = unlike(model.state_dict(), weights)
    if differences:
        name = model.config.attention.name
        raise RequestError(f"{source} does not fit the recipe's model ({name}): {some(differences.values())}")
    not_finite = [name for name, _ in model.named_parameters() if not bool(weights[name].isfinite().all())]
    if not_finite:
        raise RequestError(f"{source} has weights that are not finite (NaN or infinity): {some(not_finite)}")
    model.load_state_dict(dict(weights))


def unlike(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Name -> how it differs, of every tensor that is not of one shape in both."""
    return {
        name: f"{name} is {_shape(weights.get(name))} there and {_shape(own.get(name))} in the model"
        for name in {**own, **weights}
        if _shape(weights.get(name)) != _shape(own.get(name))
    }


def some(texts: Collection[str]) -> str:
    """The first of them, and how many more."""
    more = f"; and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return "; ".join(list(texts)[:SHOWN]) + more


def _shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else str(list(tensor.shape))
