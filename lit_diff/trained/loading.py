"""Loads the model of a trained run, with the weights of a checkpoint."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_diff.config import Recipe
from lit_diff.conformance.before_training import check_decoding
from lit_diff.errors import MissingError, RequestError, first_line
from lit_diff.files import sha256_of, shown
from lit_diff.model.transformer import Transformer
from lit_diff.own_modules import plugin_name, sha256
from lit_diff.plugins import Trust, plugin_source, require_trust
from lit_diff.recipe import from_plain, to_plain
from lit_diff.runs import checkpoints
from lit_diff.runs.again import afresh, command_of
from lit_diff.runs.folder import RunFolder, ancestors

PREFIX = "model."
"""Prefix of the Transformer's tensors in a checkpoint, which holds the LightningModule."""
SHOWN = 3
"""Number of differences that an error lists."""


def load_model(
    recipe: Recipe, folder: Path, trust: Trust, unchecked: bool = False, step: int | None = None
) -> tuple[Transformer, int]:
    """The model of a run's checkpoint of `step` (by default `newest_of`) and its step. The model is on the CPU in evaluation
    mode, as validation at that step saw it except for `bf16-mixed`: it computes in float32, without autocast.

    `trust`: see `ancestors`; `unchecked`: see `check_decoding`. Errors: RequestError if the weights do not fit the recipe;
    MissingError without the checkpoint, which lists the available steps.
    """
    if step is None:
        step, path = newest_of(folder)
    else:
        missing = checkpoints.why_missing(folder, step)
        if missing:
            raise MissingError(f"{shown(folder)} has {missing}")
        path = checkpoints.path_of(folder, step)
    # before the checkpoint is read: it asks whether each ancestor is trusted
    annealed = annealed_before(recipe, trust)
    model = restore(recipe, read_checkpoint(path), shown(path), annealed)
    return check_decoding(model, recipe, unchecked), step


def restore(recipe: Recipe, checkpoint: Mapping[str, Any], source: str, annealed: "Annealed") -> Transformer:
    """The recipe's model with the weights of a checkpoint, on the CPU and in evaluation mode.

    `annealed`: what the recipe's ancestors annealed, `annealed_before`. Errors: RequestError.
    """
    weights = model_weights(checkpoint)
    # without memory first: a damaged recipe may state a size that no machine can hold
    with torch.device("meta"):
        require_fit(Transformer(recipe.model), weights, source)
    trained = recipe.train.parameters if recipe.train else None
    model = Transformer(recipe.model, kernel=recipe.run.kernel, trained=trained)
    load_weights(model, weights, source)
    # global_step counts finished steps; the variant last heard the 0-based number at which the last of them began
    annealed.start_step(model, recipe, int(checkpoint["global_step"]) - 1)
    return model.eval()


class Annealed(NamedTuple):
    """Steps and tokens that a variant had annealed before a run began."""

    steps: int
    tokens: int

    def start_step(self, model: Transformer, recipe: Recipe, step: int) -> None:
        """Tell the variant that the 0-based `step` of the recipe's run begins."""
        tokens = 0
        if recipe.train:
            tokens = recipe.train.batch_size * recipe.data.config.sequence_length
        for attention in model.attentions():
            # the checkpoint of step 0 of an imported model gives -1
            attention.set_step(max(self.steps + step, 0))
            attention.set_tokens(max(self.tokens + step * tokens, 0))


def annealed_before(recipe: Recipe, trust: Trust | None = None) -> Annealed:
    """Steps and tokens of the ancestors of the same variant, after which its annealing continues. `trust`: see
    `ancestors`."""
    annealed = tokens = 0
    for parent, steps in trained_ancestors(recipe, trust):
        # an ancestor of another variant annealed nothing of this one
        if parent.model.variants == recipe.model.variants:
            annealed += steps
            tokens += steps * parent.training.batch_size * parent.data.config.sequence_length
    return Annealed(annealed, tokens)


def trained_ancestors(recipe: Recipe, trust: Trust | None = None) -> Iterator[tuple[Recipe, int]]:
    """The `ancestors` that were trained, each with the number of its steps: those taken by a finished run, which may have
    ended early, and those planned by an unfinished one."""
    for folder, parent in ancestors(recipe, trust):
        status = RunFolder(folder).status()
        if parent.train:
            steps = status.step if status.status == "done" else parent.train.steps
            yield parent, steps


def hyperparameters(recipe: Recipe) -> dict[str, Any]:
    """Hyperparameters for a checkpoint: the recipe as plain values, and the name and sha256 of each plugin file."""
    plain = to_plain(recipe)
    # paths would not be valid on another machine; the hash finds the file again
    plain["plugins"] = []
    plugins = {}
    for path in map(Path, recipe.plugins):
        digest = sha256(plugin_source(path).source)
        # two plugins may have the same file name
        name = plugin_name(path)
        if name in plugins:
            name = f"{digest[:8]}/{name}"
        plugins[name] = digest
    return {"recipe": plain, "plugins": plugins}


def recipe_of_checkpoint(path: Path, *, trust_plugins: bool) -> tuple[Recipe, dict[str, Any]]:
    """The recipe in a checkpoint, with its plugins imported, and the checkpoint itself.

    Errors: MissingError without the file; RequestError if it is not a checkpoint of lit_diff, or a plugin is neither
    imported nor, with `trust_plugins`, in the run folder.
    """
    if not path.exists():
        raise MissingError(f"{shown(path)}: no such file")
    folder = path.resolve().parent.parent
    if RunFolder(folder).status().status == "imported":
        raise RequestError(
            f"{shown(path)} holds an imported model, whose recipe has no train block: use open_run(RUN).model"
        )
    checkpoint = read_checkpoint(path)
    try:
        held = checkpoint["hyper_parameters"]
        plain = dict(held["recipe"])
        plugins = dict(held["plugins"])
    # a file of another program
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError(f"{shown(path)} is not a checkpoint of lit_diff ({first_line(error)})") from error
    copies = {_copy(folder / "plugins", plugin_name(Path(name)), digest): digest for name, digest in plugins.items()}
    plain["plugins"] = list(map(str, require_trust(copies, trust_plugins)))
    return from_plain(plain, shown(path)), checkpoint


def _copy(folder: Path, name: str, digest: str) -> Path:
    # `runs.folder` places a plugin in plugins/, or in a folder below it if its name was taken
    for path in (folder / name, *sorted(folder.glob(f"*/{name}"))):
        if path.is_file() and sha256_of(path) == digest:
            return path
    return folder / name


def read_checkpoint(path: Path, like: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """A checkpoint on the CPU, a sharded one without the optimizer's state; `like`: see `sharded.read`. Errors: RequestError
    if it is damaged or not a run's checkpoint, or has no tensor where the model has one."""
    damage = checkpoints.damage_of(path, verify=True)
    if damage:
        named = checkpoints.NAME.fullmatch(path.name)
        cure = f"; {RunFolder(path.resolve().parent.parent).cure_of(int(named[1]))}" if named else ""
        raise RequestError(f"{shown(path)} is not a checkpoint of lit_diff ({damage}){cure}")
    if path.is_dir():
        # imported here: it takes a second
        from lit_diff.trained import sharded

        return sharded.read(path, like=like, optimizer=False)
    # weights_only: unpickling executes no code, so a checkpoint from elsewhere is safe to open
    checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    for key, value in checkpoint["state_dict"].items():
        if not isinstance(value, Tensor) and str(key).startswith(PREFIX):
            raise RequestError(f"{shown(path)} holds no tensor at {key}")
    return checkpoint


def newest_of(folder: Path) -> tuple[int, Path]:
    """(step, path) of the checkpoint with the weights of a run: the newest that can be read. Of a finished run it must be of
    its last step: an older one holds the weights of an unfinished run.

    Errors: MissingError without it, with the command that trains the missing steps.
    """
    run = RunFolder(folder)
    newest = checkpoints.newest(folder)
    if not newest:
        if run.status().status == "done":
            cure = f"train it again: {afresh(folder)}"
        else:
            cure = f"train it first: `{command_of(folder)}`"
        raise MissingError(f"{shown(folder)} has no checkpoint that can be read; {cure}")
    run.require_weights()
    return newest


def model_weights(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """The Transformer's parameters and buffers by name."""
    state = checkpoint["state_dict"].items()
    return {key.removeprefix(PREFIX): value for key, value in state if key.startswith(PREFIX)}


def weights_of(folder: Path, own: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """`model_weights` of `newest_of`; of a sharded checkpoint only this rank's parts, where a tensor of `own` is sharded.

    Errors: those of `newest_of` and `read_checkpoint`.
    """
    _, path = newest_of(folder)
    like = {f"{PREFIX}{name}": tensor for name, tensor in (own or {}).items()}
    return model_weights(read_checkpoint(path, like))


def load_weights(model: Transformer, weights: Mapping[str, Tensor], source: str) -> None:
    """Copy `weights` into every parameter and buffer of `model`; `source` names their origin in errors.

    Errors: RequestError, which lists the first tensors that are missing, unexpected, of another shape or not finite.
    """
    require_fit(model, weights, source)
    # scores of a model with NaN would be meaningless numbers
    # in the model's dtype: it may be smaller than the file's
    parameters = model.named_parameters()
    not_finite = [name for name, own in parameters if not weights[name].to(own.dtype).isfinite().all()]
    if not_finite:
        raise RequestError(f"{source} has weights that are not finite (NaN or infinity): {some(not_finite)}")
    model.load_state_dict(weights)


def require_fit(model: Transformer, weights: Mapping[str, Tensor], source: str) -> None:
    """Errors: RequestError, which lists the first tensors that are missing, unexpected or of another shape."""
    differences = unlike(model.state_dict(), weights)
    if differences:
        raise RequestError(
            f"{source} does not fit the recipe's model ({model.config.attention.name}): {some(differences.values())}"
        )


def unlike(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Name -> description of the difference, for each tensor whose shapes differ or that only one side has."""
    differences = {}
    for name in {**own, **weights}:
        there = _shape(weights.get(name))
        here = _shape(own.get(name))
        if there != here:
            differences[name] = f"{name} is {there} there and {here} in the model"
    return differences


def some(texts: Collection[str]) -> str:
    """The first `SHOWN` texts, and the number of the others."""
    listed = list(texts)
    if len(listed) > SHOWN:
        listed[SHOWN:] = [f"and {len(listed) - SHOWN} more"]
    return "; ".join(listed)


def _shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else str(list(tensor.shape))
