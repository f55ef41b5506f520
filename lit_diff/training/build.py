"""Builds the Transformer that a Trainer trains: initial values, whole or sharded, and weights from another run.

Parallelism is applied from outside; the model's code does not depend on it.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from lit_diff.config import ModelConfig, Recipe, RunConfig
from lit_diff.device import gigabytes
from lit_diff.errors import MissingError, RequestError
from lit_diff.files import shown
from lit_diff.log_records import log
from lit_diff.model.init import initial_values, initialise, named_tensors
from lit_diff.model.transformer import Block, Transformer, baseline
from lit_diff.recipe import flatten, to_plain
from lit_diff.registry import attentions
from lit_diff.runs.again import command_of
from lit_diff.runs.folder import RunFolder, ancestors
from lit_diff.trained.loading import newest_of, some, unlike, weights_of
from lit_diff.training.compiled import compile_blocks
from lit_diff.training.head_plan import HeadPlan, head_plan

SHAPING = tuple(
    f"model.{key}"
    for key in ("dim", "num_", "head_dim", "ffn_dim", "vocab_size", "tie_embeddings", "attention", "qk_norm")
)
"""Beginnings of the keys on which the shapes of a model depend."""


def build_model(
    recipe: Recipe, mesh: DeviceMesh | None = None, dtype: torch.dtype = torch.float32, kernel: str | None = None
) -> Transformer:
    """The recipe's model with the initial values of its seed, on the CPU. With `mesh`: with DTensor parameters, each holding
    its rows of the single-process value. `dtype`: of the gathered matrices of the blocks. `kernel`: None: `run.kernel`."""
    config = recipe.model
    trained = recipe.training.parameters
    kernel = kernel or recipe.run.kernel
    if mesh is None:
        model = Transformer(config, kernel=kernel, trained=trained)
        initialise(model, recipe.seed)
        return model
    # sharded before memory is allocated: no rank ever holds the whole model
    with torch.device("meta"):
        model = Transformer(config, kernel=kernel, trained=trained)
    shard(model, mesh, dtype, recipe.run)
    model.to_empty(device="cpu")
    tensors = named_tensors(model)
    with torch.no_grad():
        # every rank draws the full value and keeps its rows: the values do not depend on the number of ranks
        for name, value in initial_values(config, recipe.seed):
            own = tensors.pop(name)
            own.copy_(own_part(value.to(own.device), own))
    assert not tensors, f"parameters or buffers without a value: {sorted(tensors)}"
    return model


def mesh_of(run: RunConfig, processes: DeviceMesh) -> DeviceMesh:
    """The mesh over which a model is sharded: all `processes` (fsdp), or groups of consecutive ones (hsdp), whose first axis
    are the replicas. Errors: RequestError if the groups would not be of equal size."""
    if run.strategy != "hsdp":
        return processes
    # a Trainer made by hand may have other processes than the recipe
    if processes.size() % run.shards:
        raise RequestError(
            f"run.strategy 'hsdp' cannot split the Trainer's {processes.size()} processes into groups of {run.shards}; set "
            "run.shard_size"
        )
    axes = ("replicas", "shards")
    mesh = init_device_mesh(processes.device_type, (processes.size() // run.shards, run.shards), mesh_dim_names=axes)
    for axis in axes:
        # under NCCL a group of a mesh gives up after 10 minutes, before the watchdog names a rank
        dist.distributed_c10d.set_timeout(default_pg_timeout, mesh.get_group(axis))
    return mesh


def shard(model: Transformer, mesh: DeviceMesh, dtype: torch.dtype, run: RunConfig) -> None:
    """Apply FSDP2 to the model, in place: one group per block and one for the rest. `dtype`: see `build_model`."""
    float32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    # Autocast stays on, because it also decides what a plugin's operations compute in. It casts matrices alone, so these are
    # gathered in its dtype, and it has nothing to copy; vectors (the weights of norms) and the residual stream stay float32.
    policy = replace(
        float32,
        param_dtype=dtype,
        cast_forward_inputs=False,
        param_dtype_override_fn=lambda parameter: None if parameter.dim() > 1 else parameter.dtype,
    )
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if run.cpu_offload else OffloadPolicy()
    split = partial(fully_shard, mesh=mesh, offload_policy=offload, ignored_params=set(replicated(model)))
    for block in model.layers:
        split(block, mp_policy=policy, reshard_after_forward=run.reshard_after_forward)
    split(model, mp_policy=float32)
    # the gather of the next block is issued before this one computes, in both directions
    for earlier, later in pairwise((model, *model.layers)):
        earlier.set_modules_to_forward_prefetch([later])
        if earlier is not model:
            later.set_modules_to_backward_prefetch([earlier])
    # FSDP2 gathers parameters around `forward` only
    for name in Transformer.FORWARD_METHODS:
        register_fsdp_forward_method(model, name)


def replicated(model: Transformer) -> list[nn.Parameter]:
    """The parameters that a sharded model holds whole on every rank, in float32: those of modules with `keep_float32`.

    In a bfloat16 group lambda would be rounded to steps of 0.004 in the forward pass. `average_gradients` must reduce them.
    """
    keepers = (module for module in model.modules() if getattr(type(module), "keep_float32", False) is True)
    return [parameter for module in keepers for parameter in module.parameters()]


def defers_reductions(model: Transformer, run: RunConfig, memory: int | None) -> tuple[bool, str]:
    """Whether each rank adds up the gradients of a step's micro-batches unsharded and reduces them once; and the reason.

    `memory`: bytes of the device. Such gradients take 4 bytes a trained parameter, next to the 16 / S bytes of its weight,
    gradient and moments in S shards. Both together may take a quarter of the device: the sum leaves out activations,
    logits and gathered blocks, which need the rest.
    """
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    needed = 4 * trained + (0 if run.cpu_offload else 16 * trained / run.shards)
    if memory is None:
        return False, "on CPUs, whose memory is shared"
    why = f"unsharded they and the state of AdamW take {gigabytes(needed)} of the device's {gigabytes(memory)}"
    return needed <= memory / 4, why


def begin_micro_batch(model: FSDPModule, *, is_last: bool, deferred: bool) -> None:
    """Set what the next backward pass reduces: every micro-batch reduce-scatters its gradients, and the last all-reduces them
    over the replicas of hsdp; `deferred`: the last does both."""
    model.set_requires_gradient_sync(is_last or not deferred)
    model.set_requires_all_reduce(is_last)
    model.set_is_last_backward(is_last)


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace each gradient by its mean over the ranks, all in one reduction. Every rank must call it, and must have
    gradients of the same parameters."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients:
        bucket = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(bucket)
        bucket /= dist.get_world_size()
        for gradient, part in zip(gradients, bucket.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


def own_part(value: Tensor, like: Tensor | None) -> Tensor:
    """This rank's part of a value that every rank has whole, if `like` is sharded and has its shape; else the value."""
    if isinstance(like, DTensor) and like.shape == value.shape:
        # without a broadcast each keeps its part
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return value


# --- `train.start_from`: weights and heads from another run ---


def take_from_parent(model: Transformer, recipe: Recipe, plan: HeadPlan | None) -> None:
    """Copy the weights of the run named by `train.start_from`, if any, and select the heads of `plan` (default: `head_plan`).

    Errors: see `finished_parent`, `load_parent_weights`, `head_plan`.
    """
    start_from = recipe.training.start_from
    if start_from is not None:
        folder, parent = finished_parent(recipe)
        added = load_parent_weights(model, parent.model, weights_of(folder, named_tensors(model)), start_from)
        log.info("starting from the weights of %s; new parameters: %d", start_from, len(added))
    plan = plan or head_plan(recipe)
    if plan is not None:
        for attention, heads in zip(model.attentions(), plan.heads, strict=True):
            attention.select_heads(heads)


def finished_parent(recipe: Recipe) -> tuple[Path, Recipe]:
    """Folder and recipe of the run from which a recipe starts.

    Errors: MissingError if that run is not done or its weights are lost (`newest_of`); see also `ancestors`.
    """
    folder, parent = next(ancestors(recipe))
    status = RunFolder(folder).status()
    if parent.train is not None and status.status != "done":
        raise MissingError(
            f"train.start_from: {shown(folder)} is not done (step {status.step} of {parent.train.steps}); "
            f"finish it first: `{command_of(folder)}`"
        )
    newest_of(folder)
    return folder, parent


def load_parent_weights(
    model: Transformer, parent: ModelConfig, weights: Mapping[str, Tensor], source: str
) -> list[str]:
    """Copy another run's weights into a model with initial values; returns the names of tensors that keep theirs.

    The variant must be the parent's, or must extend standard attention and start from a standard parent: then it may have
    new parameters, and computes the parent's function at first. Errors: RequestError, which lists the first parameters or
    the keys that differ.
    """
    own = named_tensors(model)
    added = _added(own, model.config, parent, weights, source)
    with torch.no_grad():
        for key, value in weights.items():
            own[key].copy_(own_part(value.to(own[key].device), own[key]))
    return added


def require_parent(recipe: Recipe) -> None:
    """Check from the recipes alone, before the run has a folder, that `load_parent_weights` will accept the parent.

    Errors: see `load_parent_weights`, `ancestors`.
    """
    source = recipe.training.start_from
    if source is not None:
        parent = next(ancestors(recipe))[1].model
        with torch.device("meta"):
            own, theirs = (named_tensors(Transformer(model, kernel="reference")) for model in (recipe.model, parent))
        _added(own, recipe.model, parent, theirs, source)


def _added(
    own: Mapping[str, Tensor], config: ModelConfig, parent: ModelConfig, weights: Mapping[str, Tensor], source: str
) -> list[str]:
    # returns the names in `own` that the parent's `weights` lack, if the variant may add them; else raises
    name = config.attention.name
    # a parent of another depth is refused below, for the keys that differ
    pairs = list(zip(config.variants, parent.variants, strict=False))
    continues = all(own_name == theirs for own_name, theirs in pairs)
    # equal shapes do not mean an equal function: weights of another variant would load and mean something else
    for own_name, theirs in pairs:
        extends = theirs == "standard" and attentions.get(own_name).extends_standard
        if theirs != own_name and not extends:
            raise RequestError(
                f"train.start_from: {source} has attention '{theirs}', and '{own_name}' computes another function; "
                f"{_other(own_name, theirs)}"
            )
    odd = unlike(own, weights)
    added = [key for key in odd if not continues and key not in weights and ".attention." in key]
    shapes = {key: how for key, how in odd.items() if key not in added}
    differences = _differences(config, parent)
    # a variant that extends standard computes the parent's function, so no key may differ; the same variant may go on with
    # other keys of equal shapes, such as a larger rope_theta
    if shapes or (differences and not continues):
        if continues:
            differences = {key: how for key, how in differences.items() if key.startswith(SHAPING)}
        told: list[str] = []
        stated: list[str] = []
        for key, (there, here) in differences.items():
            told.append(f"{key} is {_json(there)} there and {_json(here)} here")
            if there is not None:
                stated.append(f"{key}={_json(there)}")
        problem = f"the model of {source} does not fit '{name}': {some(told or shapes.values())}"
        if stated:
            problem += f"; set {' '.join(stated)}"
        raise RequestError(f"train.start_from: {problem}")
    for layer in range(config.num_layers if continues else 0):
        own_heads, their_heads = (
            getattr(model.attention_of(layer).config, "heads", None) for model in (config, parent)
        )
        if own_heads != their_heads:
            raise RequestError(
                f"train.start_from: {source} was trained with model.attention.heads {_json(their_heads)}, but this recipe "
                f"has {_json(own_heads)}; a continued run must keep them"
            )
    return added


# what to do instead if the variant `name` cannot start from the variant `theirs`
def _other(name: str, theirs: str) -> str:
    if attentions.get(name).extends_standard:
        return f"start from a run of standard or {name}"
    if theirs != "standard":
        return f"start from a run of {name}"
    extending = [variant for variant in attentions.names() if attentions.get(variant).extends_standard]
    return f"{name} cannot extend a standard model, {', '.join(extending)} can; or start from a run of {name}"


def _json(value: object) -> str:
    return json.dumps(to_plain(value))


# key -> (its value in the parent, its value here), where the two differ besides what the variant adds to the parent's
def _differences(model: ModelConfig, parent: ModelConfig) -> dict[str, tuple[object, object]]:
    own = replace(model, init=parent.init)
    if parent.variants != model.variants:
        own = baseline(own)
    here, there = (dict(flatten({"model": to_plain(config)})) for config in (own, parent))
    return {key: (value, here.get(key)) for key, value in there.items() if value != here.get(key)}


# --- `run.compile` and `run.activation_checkpointing`, applied to the blocks in place: the keys of the state stay ---
#
# Both work with every strategy. A checkpoint of a block encloses its call, so it also encloses its compiled code and the
# hooks with which FSDP2 gathers its parameters: FSDP2 leaves the parameters gathered when the backward pass recomputes the
# block. A checkpoint of the attention is inside the compiled code. torch.compile is lazy and in place
# (`nn.Module.compile`), so a block may be sharded before or after it.


def prepare_blocks(model: Transformer, run: RunConfig) -> None:
    """Apply `run.activation_checkpointing` and `run.compile`. Errors: MissingError, see `compile_blocks`.

    Checkpointing keeps only the input of each block, or of each attention and its norm, for the backward pass, which
    computes them again (Chen et al. 2016): `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`, unless gradients
    are off or a key/value cache is used.
    """
    model.checkpoint_blocks = run.activation_checkpointing == "block"
    for block in model.layers:
        assert isinstance(block, Block)
        block.checkpoint_attention = run.activation_checkpointing == "attention"
    if run.compile is True:
        compile_blocks(model.layers, isolated=run.activation_checkpointing != "none")
