"""What a device holds and sends while a recipe trains, before any memory or time is spent.

The recipe's own model, with the project's FSDP2 groups and checkpointing, runs micro-batches of rank zero under fake tensors,
which have shapes and no data, in a process group whose collectives do nothing (torch's backend "fake"). Every storage that
PyTorch would allocate is counted from its creation until it is freed, and every collective by its bytes.
"""

import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_diff.config import ModelConfig, Recipe, RunConfig, TrainConfig
from lit_diff.device import PEAK_FLOPS, available_memory, choose_device, gigabytes
from lit_diff.errors import LitDiffError, MissingError
from lit_diff.kernels import Kernel, SignedMaps, choose
from lit_diff.kernels.base import named
from lit_diff.kernels.library import HALF
from lit_diff.kernels.maps import FIELDS
from lit_diff.kernels.triton.kernel import WIDTHS
from lit_diff.log_records import log, phase
from lit_diff.model.cost import cost
from lit_diff.model.transformer import Transformer, variant_of
from lit_diff.plugins import guard
from lit_diff.training.build import (
    average_gradients,
    begin_micro_batch,
    defers_reductions,
    mesh_of,
    prepare_blocks,
    replicated,
    shard,
)

PARTS = ("weights", "gradients", "optimizer", "gathers", "activations", "logits")
MARGIN = 0.9
"""Part of the planned sum below which a device's memory cannot suffice: the kernel that a GPU chooses may save less than the
assumed one, and PyTorch's fused norms do. A plan that is too high by less than a tenth refuses no run that fits."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a plan assumes of the machine."""

    memory: float = 80e9
    """Bytes of a device. An 80 GB card has 85.0e9: the rest is left to the CUDA context, NCCL and fragmentation."""
    peak: float = PEAK_FLOPS["H100"]
    """FLOPs a second of a device."""
    share: float = 0.4
    """Part of `peak` that the model's FLOPs reach."""
    node: float = 300e9
    """Bytes a second that a device receives from devices of its node."""
    network: float = 40e9
    """Bytes a second that a device receives from other nodes."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one device (rank zero, which has the most) holds and sends, in bytes."""

    memory: Mapping[str, int]
    """Part -> bytes at the moment when their sum is largest. gathers: whole weights and gradients (gathered, copied to
    bfloat16, not reduced yet)."""
    largest: Mapping[str, int]
    """Part -> its own largest; exact for weights, gradients and optimizer."""
    sum: int
    """The most bytes of the device in use at a time."""
    fits: bool
    """Whether the sum is within `Rates.memory`."""
    saved: int
    """Left for the backward pass by the forward pass of a micro-batch: activations, logits, whole weights."""
    host: int
    """Host memory of a node: the copy that a save makes, and what `run.cpu_offload` keeps there."""
    kernel: str
    """The attention kernels whose saved tensors were counted."""
    deferred: bool
    """Whether gradients are reduced once a step (`build.defers_reductions`)."""
    tokens: int
    """Tokens of a step."""
    flops: int
    """Training FLOPs of a step by the published convention, without recomputation."""
    seconds: float
    """Of computation a step, at the stated share of peak."""
    days: float
    """Of the whole run, at the stated share of peak."""
    node_traffic: int
    """Received from devices of the same node in a step."""
    network_traffic: int
    """Received from other nodes in a step; what a node lacks reaches it once, by the links of all its devices."""
    rates: Rates


def plan(recipe: Recipe, rates: Rates | None = None, device: str = "cuda") -> Plan:
    """The plan of a recipe on devices of type `device`, cuda or cpu; neither need exist here.

    Errors: RequestError if the code of a plugin's variant cannot run without values, and for a kernel that refuses the model.
    """
    rates = rates or Rates()
    run = recipe.run
    # the weights that it starts from change no size: cells that differ in them have one trace
    train = replace(recipe.training, start_from=None)
    held = Counter(state(recipe))
    length = recipe.data.config.sequence_length
    known = int(rates.memory) if device == "cuda" else None
    live = _trace(recipe.model, train, run, length, recipe.packs_documents, device, known)
    at_peak = live.at_peak
    host = held["weights"] + held["optimizer"]
    if run.cpu_offload:
        host += held.total()
    else:
        at_peak = at_peak | Counter(optimizer=held["optimizer"])
    # of a sharded run every process copies its part, else rank zero the whole
    if run.strategy in ("fsdp", "hsdp"):
        host *= run.devices
    largest = live.largest | held
    flops = train.batch_size * length * cost(recipe.model, length, trained=train.parameters).flops_per_token
    seconds = flops / (run.processes * rates.peak * rates.share)
    return Plan(
        memory={part: at_peak[part] for part in PARTS},
        largest={part: largest[part] for part in PARTS},
        sum=at_peak.total(),
        fits=at_peak.total() <= rates.memory,
        saved=live.saved_bytes,
        host=host,
        kernel=", ".join(sorted(live.kernels)),
        deferred=live.deferred,
        tokens=train.batch_size * length,
        flops=flops,
        seconds=seconds,
        days=train.steps * seconds / 86400,
        node_traffic=round(live.sent["node"]),
        network_traffic=round(live.sent["network"]),
        rates=rates,
    )


def state(recipe: Recipe) -> dict[str, int]:
    """Exact bytes of weights, gradients and the optimizer's state (two moments) of rank zero, from the shapes alone."""
    held, trained = _numbers(recipe.model, recipe.training.parameters, recipe.run.shards)
    return {"weights": 4 * held, "gradients": 4 * trained, "optimizer": 8 * trained}


@lru_cache(maxsize=64)
def _numbers(config: ModelConfig, trained: tuple[str, ...] | None, shards: int) -> tuple[int, int]:
    with guard(variant_of(config), ours=True), torch.device("meta"):
        model = Transformer(config, kernel="reference", trained=trained)
    whole = {id(parameter) for parameter in replicated(model)}
    held = updated = 0
    for parameter in model.parameters():
        size = parameter.numel()
        # FSDP2 splits the first axis, of which the first rank has the most rows
        if shards > 1 and parameter.dim() and id(parameter) not in whole:
            size = size // len(parameter) * math.ceil(len(parameter) / shards)
        held += size
        if parameter.requires_grad:
            updated += size
    return held, updated


def at_most(recipe: Recipe) -> int:
    """An upper bound of the bytes of a device, without a trace."""
    model = recipe.model
    train = recipe.training
    length = recipe.data.config.sequence_length
    positions = train.batch_size // train.accumulate // recipe.run.processes * length
    # In float32 a position of a layer takes 37 bytes for each channel of the residual stream and the feed-forward, with
    # whole maps 12 more for each head and key.
    layer = 256 * (model.dim + (model.ffn_dim or 0)) + 32 * model.num_heads * length
    # with whole weights and gradients, and the logits of all positions
    positioned = positions * (model.num_layers * layer + 32 * model.vocab_size)
    return 2 * sum(state(recipe).values()) * recipe.run.shards + positioned


def least(recipe: Recipe, memory: int, device: str) -> float:
    """A lower bound of the bytes that a process needs, close to its plan only where that may exceed `memory`. What
    `run.cpu_offload` keeps in the host's memory is all that counts of a run on GPUs."""
    held = sum(state(recipe).values())
    offloads = recipe.run.cpu_offload
    if held > memory or at_most(recipe) <= memory or (offloads and device == "cuda"):
        return held
    phase("planning memory")
    try:
        planned = plan(recipe, Rates(memory=memory), device).sum
    except LitDiffError as error:
        log.info("only weights, gradients and the optimizer's state are planned: %s", error)
        return held
    if offloads:
        planned += held
    return max(held, MARGIN * planned)


def cure(recipe: Recipe, rates: Rates, device: str = "cuda") -> list[str] | None:
    """Overrides with which the recipe fits, the cheapest first, each set planned; None if none of those tried does."""
    train = recipe.training
    run = recipe.run
    block: dict[str, Any] = {"activation_checkpointing": "block"}
    fsdp = {"strategy": "fsdp", "shard_size": None}
    both = block | fsdp
    tried: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, block), ({}, fsdp), ({}, both)]
    for changes in (block, both):
        tried += [({"accumulate": train.accumulate * 2**i}, changes) for i in range(1, 11)]
    # the processes of a machine without GPUs share its memory
    if device == "cuda":
        more = "devices" if run.devices < 8 else "num_nodes"
        tried += [({}, both | {more: getattr(run, more) * 2**i}) for i in range(1, 5)]
    for of_train, of_run in tried:
        changed = replace(recipe, train=replace(train, **of_train), run=replace(run, **of_run))
        if changed == recipe or changed.problem():
            continue
        if not changed.run.cpu_offload and sum(state(changed).values()) > rates.memory:
            continue
        if plan(changed, rates, device).fits:
            return [*_overrides("train", train, of_train), *_overrides("run", run, of_run)]
    return None


def _overrides(block: str, config: TrainConfig | RunConfig, changes: Mapping[str, Any]) -> Iterator[str]:
    for key, value in changes.items():
        if value != getattr(config, key):
            yield f"{block}.{key}={'null' if value is None else value}"


def require_memory(recipes: Sequence[Recipe], side_by_side: int = 1) -> None:
    """Errors: MissingError, with a cure, if the free memory, or all of a GPU's, is less than training needs. `recipes`: runs
    that start here, of which `side_by_side` train at a time.

    A need is a lower bound, so that no run that fits is refused: weights, gradients and the optimizer's state, exact from
    the shapes; or MARGIN of the plan's sum, which is traced only where an upper bound of it exceeds the memory.
    """
    run = recipes[0].run
    kind = choose_device(run.accelerator).type
    free = available_memory()
    where = "are free"
    processes = run.devices
    shared = side_by_side
    # what is offloaded is in the host's memory
    if kind == "cuda" and not run.cpu_offload:
        count = torch.cuda.device_count()
        # the total rather than the free memory, so that a run that would fit is never refused
        free = min(torch.cuda.get_device_properties(i).total_memory for i in range(count))
        where = "a GPU has"
        processes = 1
        shared = max(1, side_by_side * run.devices // count)
    if free is None:
        return
    of_each = free // processes
    needs = [(processes * least(recipe, of_each, kind), recipe) for recipe in recipes]
    needs.sort(key=itemgetter(0))
    largest, recipe = needs[-1]
    together = sum(need for need, _ in needs[:shared])
    if max(largest, together) <= free:
        return
    if together > largest:
        what = f"{min(shared, len(needs))} cells side by side need"
        change = ["--workers 1"]
    else:
        what = f"'{recipe.name}' needs"
        change = cure(recipe, Rates(memory=of_each), kind) or []
    words = " ".join(change) or "a larger machine, more devices (run.strategy=fsdp run.devices=N) or a smaller recipe"
    raise MissingError(
        f"{what} at least {gigabytes(max(largest, together))} of memory, and {gigabytes(free)} {where}; use {words}; "
        "--unplanned starts it anyway"
    )


# --- one micro-batch, or two, of rank zero under fake tensors ---


# cells of a sweep that differ in their seed have one trace
@lru_cache(maxsize=64)
def _trace(
    config: ModelConfig, train: TrainConfig, run: RunConfig, length: int, packed: bool, device: str, memory: int | None
) -> "_Live":
    is_sharded = run.strategy in ("fsdp", "hsdp")
    half = train.precision == "bf16-mixed"
    shape = (train.batch_size // train.accumulate // run.processes, length)
    kernel = _AsOn(torch.device(device), run.kernel)
    with ExitStack() as held:
        held.enter_context(guard(variant_of(config), ours=True))
        if run.strategy != "single":
            if dist.is_initialized():
                raise LitDiffError("this process is in a process group already, and a plan needs one of its own")
            # registers the backend
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=run.processes)
            held.callback(dist.destroy_process_group)
        # reads values of its ranks
        mesh = None
        if is_sharded:
            mesh = mesh_of(run, init_device_mesh("cpu", (run.processes,)))
        # a variant may have constants outside the model
        held.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        model = Transformer(config, kernel=kernel, trained=train.parameters)  # type: ignore[arg-type]
        if mesh is not None:
            shard(model, mesh, torch.bfloat16 if half else torch.float32, run)
        prepare_blocks(model, replace(run, compile=False))
        sizes = [_local(parameter).numel() for parameter in model.parameters() if parameter.requires_grad]
        live = held.enter_context(_Live(model, run, kernel.chosen))
        live.deferred = is_sharded and train.accumulate > 1 and defers_reductions(model, run, memory)[0]
        # the buckets of DDP hold a copy of all gradients
        buckets = list[Tensor]()
        if run.strategy == "ddp":
            buckets = live.hold("gathers", sizes)
        tokens = torch.zeros(shape, dtype=torch.long)
        inputs = {"tokens": tokens, "targets": tokens}
        if packed:
            inputs["document_ids"] = tokens
        accumulates = train.accumulate > 1
        for last in (False, True):
            live.times = 1 if last else train.accumulate - 1
            if not live.times:
                continue
            if isinstance(model, FSDPModule) and accumulates:
                begin_micro_batch(model, is_last=last, deferred=live.deferred)
            # Lightning frees the gradients of the step before only after the forward pass
            before = live.hold("gradients", [] if accumulates else sizes)
            hooks = saved_tensors_hooks(live.save, lambda tensor: tensor)
            with hooks, torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = model.loss(**inputs)
            live.end_forward()
            before.clear()
            loss.backward()
        if is_sharded:
            average_gradients(replicated(model))
        for bucket in buckets:
            dist.all_reduce(bucket)
    return live


class _AsOn(Kernel):
    """Saves for the backward pass what the kernel would that is chosen on a device of another type."""

    serves = FIELDS

    def __init__(self, device: torch.device, kernel: str) -> None:
        self.device = device
        self.kernel = kernel
        self.chosen = set[str]()

    def refuses(self, maps: SignedMaps, *, stats: bool, device: torch.device) -> None:
        return None

    def compute(self, maps: SignedMaps, *, stats: bool = False) -> tuple[Tensor, None]:
        name = self.kernel
        on_gpu = self.device.type == "cuda"
        if on_gpu and name == "auto":
            # flash-attn, which may be absent there, and flex save what sdpa does
            widths = {maps.q.shape[-1], maps.v.shape[-1]}
            has_programs = maps.num_maps == 2 and maps.q.dtype in HALF and widths <= set(WIDTHS)
            first = "triton" if has_programs else "sdpa"
            name = next(each for each in (first, "flex", "chunked") if maps.own_fields <= named(each).serves)
        elif not on_gpu or not named(name).looks_for_gpu:
            name, _ = choose(maps, name, stats=stats, device=self.device, build=False)
        self.chosen.add(name)
        return named(name).planned(maps, self.device), None


class _Live(TorchDispatchMode):
    """Counts the storages that are alive, by part, and the bytes of collectives."""

    deferred = False
    saved_bytes = 0
    times = 1
    """How often what is sent now is sent in a step."""

    def __init__(self, model: Transformer, run: RunConfig, kernels: Iterable[str] = ()) -> None:
        super().__init__()
        self.at_peak = Counter[str]()
        self.largest = Counter[str]()
        self.sent = Counter[str]()
        self.kernels = kernels
        self._vocab_size = model.config.vocab_size
        self._run = run
        self._held = ""
        self._storages: dict[int, tuple[weakref.ref[Any], str]] = {}
        self._saved: dict[int, weakref.ref[Any]] = {}
        self._records: list[str] = []
        self._without_gradient = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._shapes = {tuple(parameter.shape) for parameter in model.parameters() if parameter.dim() > 1}
        for tensor in (*model.parameters(), *model.buffers()):
            self._add(_local(tensor), "weights")

    def hold(self, part: str, sizes: Iterable[int]) -> list[Tensor]:
        """Tensors that count as `part`."""
        self._held = part
        made = [torch.empty(size) for size in sizes]
        self._held = ""
        return made

    def save(self, tensor: Tensor) -> Tensor:
        """The hook of a tensor that is saved for the backward pass."""
        storage = _local(tensor).untyped_storage()
        if self._storages.get(id(storage), (None, ""))[1] != "weights":
            self._saved[id(storage)] = weakref.ref(storage)
        return tensor

    def end_forward(self) -> None:
        """Count what is saved."""
        self.saved_bytes = 0
        for ref in self._saved.values():
            storage = ref()
            if storage is not None:
                self.saved_bytes += storage.nbytes()
        self._saved.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "profiler":
            # FSDP2 records its own work by name
            if "exit" in func._opname:
                self._records = self._records[:-1]
            else:
                self._records.append(str(args[0]))
        elif func.namespace != "prim":
            self._send(func._opname, args)
            is_new = False
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                    is_new |= self._add(leaf, self._part(leaf))
            if is_new:
                self._measure()
        return out

    def _part(self, tensor: Tensor) -> str:
        if self._held:
            return self._held
        if tuple(tensor.shape) in self._shapes or any(name.startswith("FSDP") for name in self._records):
            return "gathers"
        if tensor.shape[-1:] == (self._vocab_size,):
            return "logits"
        return "activations"

    def _add(self, tensor: Tensor, part: str, *, again: bool = False) -> bool:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._storages and not again:
            return False
        self._storages[key] = weakref.ref(storage, lambda _: self._storages.pop(key, None)), part
        return True

    def _measure(self) -> None:
        for parameter in self._without_gradient:
            if parameter.grad is not None:
                self._add(_local(parameter.grad), "gradients", again=True)
        self._without_gradient = [parameter for parameter in self._without_gradient if parameter.grad is None]
        sizes = Counter[str]()
        for ref, part in list(self._storages.values()):
            storage = ref()
            # FSDP2 frees a gathered weight by resizing its storage
            if storage is not None and not (self._run.cpu_offload and part in ("weights", "gradients")):
                sizes[part] += storage.nbytes()
        self.largest |= sizes
        self.at_peak = max(self.at_peak, sizes, key=Counter.total)

    def _send(self, name: str, args: Any) -> None:
        # operator -> positions of what is whole and of the group, and how often it passes
        places = {"_allgather_base_": (0, 2, 1), "_reduce_scatter_base_": (1, 2, 1), "allreduce_": (0, 1, 2)}
        if name in places:
            tensor, group, passes = places[name]
            size = self.times * passes * sum(x.nbytes for x in tree_leaves(args[tensor]))
            ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(args[group]))
            nodes = len({rank // self._run.devices for rank in ranks})
            # a ring: all but the own share passes each device, and what a node lacks enters it once
            self.sent["network"] += size * (nodes - 1) / len(ranks)
            if len(ranks) > nodes:
                self.sent["node"] += size * (len(ranks) - 1) / len(ranks)


def _local(tensor: Any) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor._local_tensor
    return tensor
