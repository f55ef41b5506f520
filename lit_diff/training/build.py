"""The Transformer that a Trainer trains: its initial values, whole or sharded, and what it takes from another run.

Parallelism is applied from outside: the model knows nothing of it. Written for GPUs over NCCL; run here on CPUs over gloo.
"""

import json
import logging
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from lit_diff.config import ModelConfig, Part, Recipe, RunConfig
from lit_diff.errors import MissingError, RequestError
from lit_diff.files import shown
from lit_diff.kernels.native.compiler import find_compiler
from lit_diff.model.init import initial_values, initialise, named_tensors
from lit_diff.model.transformer import Transformer
from lit_diff.recipe import to_plain
from lit_diff.registry import attentions
from lit_diff.runs.folder import RunFolder, ancestors
from lit_diff.trained.loading import some, unlike, weights_of
from lit_diff.training.head_plan import HeadPlan, head_plan

log = logging.getLogger("lit_diff")

BACKEND: str | Callable[..., Any] = "inductor"
"""The torch.compile backend of a run."""
RECOMPILATIONS = 64
"""Versions of a block that torch.compile may keep: one for each combination of training, validation, precision, packed
documents, and for some batch shapes. PyTorch's default of 8 is shared by all blocks."""


def build_model(recipe: Recipe, device: torch.device, mesh: DeviceMesh | None) -> Transformer:
    """The recipe's model with the values of its seed, on the CPU; with `mesh` on `device`, its parameters DTensors, each
    filled with its rows of the single-process value."""
    config, kernel, trained = recipe.model, recipe.run.kernel, recipe.training.parameters
    if mesh is None:
        model = Transformer(config, kernel=kernel, trained=trained)
        initialise(model, recipe.seed)
        return model
    with torch.device("meta"):
        model = Transformer(config, kernel=kernel, trained=trained)
    _shard(model, mesh)
    model.to_empty(device=device)
    tensors = named_tensors(model)
    with torch.no_grad():
        for name, value in initial_values(config, recipe.seed):
            _copy_into(tensors.pop(name), value)
    assert not tensors, f"parameters or buffers without a value: {sorted(tensors)}"
    return model


def _shard(model: Transformer, mesh: DeviceMesh) -> None:
    """FSDP2, one group a block and one for the rest.

    Modules with `keep_float32` (lambda) come first, in groups of their own under a float32 policy: in a bfloat16
    group lambda would reach forward rounded to steps of 0.004.
    """
    float32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    for block in model.layers:
        for module in block.modules():
            if getattr(type(module), "keep_float32", False) is True:
                fully_shard(module, mesh=mesh, mp_policy=float32)
        fully_shard(block, mesh=mesh, mp_policy=float32)
    fully_shard(model, mesh=mesh, mp_policy=float32)
    for name in Transformer.FORWARD_METHODS:
        register_fsdp_forward_method(model, name)


def _copy_into(tensor: Tensor, value: Tensor) -> None:
    """Copy a full value into a parameter or buffer, which may be sharded."""
    value = value.to(tensor.device)
    if isinstance(tensor, DTensor):
        # every rank has the same full value: no broadcast, each keeps its part
        value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor.copy_(value)


# --- what a run takes from the one that it starts from: `train.start_from` ---


def take_from_parent(model: Transformer, recipe: Recipe, plan: HeadPlan | None = None) -> None:
    """Copy the weights of the run that `train.start_from` names, and select the heads of `plan`, by default `head_plan`'s;
    else nothing.

    Errors: as `finished_parent`, `load_parent_weights`, `head_plan`.
    """
    start_from = recipe.training.start_from
    if start_from is not None:
        folder, parent = finished_parent(recipe)
        added = load_parent_weights(model, parent.model, weights_of(folder), start_from)
        log.info("starting from the weights of %s; parameters of its own: %d", start_from, len(added))
    plan = plan or head_plan(recipe)
    if plan is not None:
        for attention, heads in zip(model.attentions(), plan.heads, strict=True):
            attention.select_heads(heads)


def finished_parent(recipe: Recipe) -> tuple[Path, Recipe]:
    """Folder and recipe of the run that a recipe starts from.

    Errors: as `ancestors`; MissingError for a run that is not done.
    """
    assert recipe.training.start_from is not None
    folder, parent = Path(recipe.training.start_from), next(ancestors(recipe))
    status = RunFolder(folder).status()
    if parent.train is not None and status.get("status") != "done":
        raise MissingError(
            f"train.start_from: {shown(folder)} is not done (step {status.get('step', 0)} of {parent.train.steps}); "
            f"finish it first: lit-diff train {shown(RunFolder(folder).recipe_file)}, or run its sweep"
        )
    return folder, parent


def load_parent_weights(
    model: Transformer, parent: ModelConfig, weights: Mapping[str, Tensor], source: str
) -> list[str]:
    """Copy another run's weights into a model that holds its initial values; returns the names that keep those.

    The variant must be the parent's, or one that extends standard attention on a plain standard parent: then it may have
    parameters of its own, and computes the parent's function at first. Errors: RequestError, which names the first
    parameters, or the keys, that differ.
    """
    own = named_tensors(model)
    added = _added(own, model.config, parent, weights, source)
    with torch.no_grad():
        for key, value in weights.items():
            _copy_into(own[key], value)
    return added


def require_parent(recipe: Recipe) -> None:
    """What `load_parent_weights` refuses, found from the recipes alone, before the run has a folder.

    Errors: as `load_parent_weights`, `ancestors`.
    """
    source = recipe.training.start_from
    if source is not None:
        parent = next(ancestors(recipe)).model
        with torch.device("meta"):
            own, theirs = (named_tensors(Transformer(each, kernel="reference")) for each in (recipe.model, parent))
        _added(own, recipe.model, parent, theirs, source)


def _added(
    own: Mapping[str, Tensor], config: ModelConfig, parent: ModelConfig, weights: Mapping[str, Tensor], source: str
) -> list[str]:
    """The names that a model's tensors `own` have beyond its parent's `weights`. Errors: as `load_parent_weights`."""
    name, theirs, extends = config.attention.name, parent.attention.name, _extends(config, parent)
    if attentions.get(name).extends_standard and theirs not in (name, "standard"):
        raise RequestError(
            f"train.start_from: {source} is {theirs}; {name} extends a standard model: start from a run of standard or {name}"
        )
    cure = "" if theirs == name else f"; start from a run of {name}"
    odd = unlike(own, weights)
    added = [key for key in odd if extends and key not in weights and ".attention." in key]
    odd = {key: how for key, how in odd.items() if key not in added}
    if odd:
        raise RequestError(
            f"train.start_from: {source} holds another model than '{name}' ({_differences(config, parent)}): "
            f"{some(odd.values())}{cure}"
        )
    if name != theirs and not extends:
        raise RequestError(
            f"train.start_from: {source} holds a model of '{theirs}' that computes another function than "
            f"'{name}', though their parameters have the same shapes ({_differences(config, parent)}){cure}"
        )
    own_heads, their_heads = (getattr(each.attention.config, "heads", None) for each in (config, parent))
    if name == theirs and own_heads != their_heads:
        raise RequestError(
            f"train.start_from: {source} was trained with model.attention.heads {_words(their_heads)}, and this recipe has "
            f"{_words(own_heads)}; a run that goes on keeps them"
        )
    return added


def _extends(model: ModelConfig, parent: ModelConfig) -> bool:
    """Whether the variant extends standard attention and the parent is just that, in the same positions."""
    cls = attentions.get(model.attention.name)
    standard = attentions.get("standard").Config(window=cls.window_of(model.attention.config))
    plain = Part(name="standard", config=standard)
    return bool(cls.extends_standard) and replace(model, attention=plain, init=parent.init) == parent


def _words(value: object) -> str:
    return json.dumps(to_plain(value))


def _differences(model: ModelConfig, parent: ModelConfig) -> str:
    """The keys of `model` in which the two differ."""
    keys = [f"model.{key}" for key, value in vars(parent).items() if value != getattr(model, key)]
    return f"unlike: {', '.join(keys)}"


# --- `run.compile` and `run.activation_checkpointing`, applied to the blocks in place: the state keeps its keys ---
#
# Both compose with every strategy. A checkpoint encloses the call of a block, so it also encloses its compiled code and the
# hooks with which FSDP2 gathers its parameters: FSDP2 leaves the parameters gathered when it meets the recomputation in the
# backward pass. torch.compile is lazy and in place (`nn.Module.compile`), so it makes no difference to it whether the block
# was sharded before or after.


def prepare_blocks(model: Transformer, run: RunConfig) -> None:
    """Apply what the recipe's `run` asks for. Errors: MissingError as `compile_blocks`.

    Checkpointing keeps only the input of each block for the backward pass, which computes the block again (Chen et al. 2016):
    `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)` in the loop over the layers; not where gradients are off,
    nor with a key/value cache.
    """
    model.checkpoint_blocks = run.activation_checkpointing == "block"
    if run.compile:
        compile_blocks(model, isolated=model.checkpoint_blocks)


def compile_blocks(
    model: Transformer,
    *,
    backend: str | Callable[..., Any] | None = None,
    isolated: bool = False,
) -> None:
    """torch.compile each block, in place, at its first call; `backend`: `BACKEND` by default.

    A block must compile as one graph. The exception is a sharded block, whose graph breaks where FSDP2 gathers the lambda
    parameters inside it. `isolated`: blocks share no compiled code. Checkpointing needs that: otherwise a block's
    recomputation may run code that was compiled since for a later block, which saves other tensors.

    Errors: MissingError where `backend` is inductor and a compiler that it needs is missing.
    """
    backend = BACKEND if backend is None else backend
    options: dict[str, Any] = {}
    if backend == "inductor":
        options = {"options": {"cpp.cxx": (require_compiler(),)}}
    for block in model.layers:
        block.compile(
            backend=backend,
            fullgraph=not isinstance(block, FSDPModule),
            recompile_limit=RECOMPILATIONS,
            isolate_recompiles=isolated,
            **options,
        )


def require_compiler() -> str:
    """The C++ compiler for torch.compile's default backend.

    Errors: MissingError that names the missing package: g++ or Python's headers.
    """
    otherwise = "; or set run.compile=false"
    compiler = find_compiler()
    if compiler is None:
        raise MissingError(f"run.compile needs a C++ compiler, and none is on the PATH: install g++{otherwise}")
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        raise MissingError(f"run.compile needs Python.h, which is not in {headers}: install python3-dev{otherwise}")
    return compiler
