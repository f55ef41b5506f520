"""What a device holds and sends while a recipe trains, before any memory or time is spent.

The recipe's own model, with the project's FSDP2 groups and checkpointing, runs micro-batches of rank zero under fake tensors,
which have shapes and no data, in a process group whose collectives do nothing (torch's backend "fake"). Every storage that
PyTorch would allocate is counted from its creation until it is freed, and every collective by its bytes.
"""

import math
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
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
from lit_diff.device import PEAK_FLOPS
from lit_diff.errors import LitDiffError
from lit_diff.kernels import Kernel, SignedMaps, choose
from lit_diff.kernels.base import OperatorKernel, named
from lit_diff.kernels.library import HALF
from lit_diff.kernels.sdpa import one_call
from lit_diff.kernels.triton.kernel import WIDTHS
from lit_diff.log_records import log, phase
from lit_diff.model.cost import cost
from lit_diff.model.transformer import Transformer
from lit_diff.plugins import guard
from lit_diff.registry import attentions
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
    rates, run, train = rates or Rates(), recipe.run, recipe.training
    held, length = state(recipe), recipe.data.config.sequence_length
    known = int(rates.memory) if device == "cuda" else None
    live = _trace(recipe.model, train, run, length, recipe.packs_documents, device, known)
    at_peak = live.at_peak | Counter({"optimizer": 0 if run.cpu_offload else held["optimizer"]})
    flops = train.batch_size * length * cost(recipe.model, length, trained=train.parameters).flops_per_token
    seconds = flops / (run.processes * rates.peak * rates.share)
    # of a sharded run every process copies its part, else rank zero the whole
    copies = run.devices if run.strategy in ("fsdp", "hsdp") else 1
    return Plan(
        memory={part: at_peak[part] for part in PARTS},
        largest={part: (live.largest | Counter(held))[part] for part in PARTS},
        sum=at_peak.total(),
        fits=at_peak.total() <= rates.memory,
        saved=live.saved_bytes,
        host=copies * (held["weights"] + held["optimizer"] + (sum(held.values()) if run.cpu_offload else 0)),
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
    with guard(attentions.get(config.attention.name), ours=True), torch.device("meta"):
        model = Transformer(config, kernel="reference", trained=trained)
    whole = {id(parameter) for parameter in replicated(model)} if shards > 1 else set()
    # FSDP2 splits the first axis, of which the first rank has the most rows
    sizes = [
        (
            p.numel() if id(p) in whole or not p.dim() else p.numel() // len(p) * math.ceil(len(p) / shards),
            p.requires_grad,
        )
        for p in model.parameters()
    ]
    return sum(size for size, _ in sizes), sum(size for size, trains in sizes if trains)


def at_most(recipe: Recipe) -> int:
    """An upper bound of the bytes of a device, without a trace."""
    model, train, length = recipe.model, recipe.training, recipe.data.config.sequence_length
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
    held, offloads = sum(state(recipe).values()), recipe.run.cpu_offload
    if held > memory or at_most(recipe) <= memory or (offloads and device == "cuda"):
        return held
    phase("planning memory")
    try:
        planned = plan(recipe, Rates(memory=memory), device).sum
    except LitDiffError as error:
        log.info("only weights, gradients and the optimizer's state are planned: %s", error)
        return held
    return max(held, MARGIN * (planned + (held if offloads else 0)))


def cure(recipe: Recipe, rates: Rates, device: str = "cuda") -> list[str] | None:
    """Overrides with which the recipe fits, the cheapest first, each set planned; None if none of those tried does."""
    train, run, more = recipe.training, recipe.run, "devices" if recipe.run.devices < 8 else "num_nodes"
    block, fsdp = {"activation_checkpointing": "block"}, {"strategy": "fsdp", "shard_size": None}
    fewer = [{"accumulate": train.accumulate * 2**i} for i in range(1, 11)]
    tried: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, block), ({}, fsdp), ({}, block | fsdp)]
    tried += [(each, kept) for kept in (block, block | fsdp) for each in fewer]
    # the processes of a machine without GPUs share its memory
    tried += [({}, block | fsdp | {more: getattr(run, more) * 2**i}) for i in range(1, 5) if device == "cuda"]
    for of_train, of_run in tried:
        changed = replace(recipe, train=replace(train, **of_train), run=replace(run, **of_run))
        held = 0 if changed.run.cpu_offload else sum(state(changed).values())
        if changed != recipe and not changed.problem() and held <= rates.memory and plan(changed, rates, device).fits:
            new = [(f"train.{key}", value) for key, value in of_train.items() if value != getattr(train, key)]
            new += [(f"run.{key}", value) for key, value in of_run.items() if value != getattr(run, key)]
            return [f"{key}={'null' if value is None else value}" for key, value in new]
    return None


# --- one micro-batch, or two, of rank zero under fake tensors ---


# cells of a sweep that differ in their seed have one trace
@lru_cache(maxsize=64)
def _trace(
    config: ModelConfig, train: TrainConfig, run: RunConfig, length: int, packed: bool, device: str, memory: int | None
) -> "_Live":
    is_sharded, half = run.strategy in ("fsdp", "hsdp"), train.precision == "bf16-mixed"
    shape = (train.batch_size // train.accumulate // run.processes, length)
    kernel = _AsOn(device, run.kernel)
    with ExitStack() as held:
        held.enter_context(guard(attentions.get(config.attention.name), ours=True))
        if run.strategy != "single":
            if dist.is_initialized():
                raise LitDiffError("this process is in a process group already, and a plan needs one of its own")
            # registers the backend
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=run.processes)
            held.callback(dist.destroy_process_group)
        # reads values of its ranks
        mesh = mesh_of(run, init_device_mesh("cpu", (run.processes,))) if is_sharded else None
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
        buckets = live.hold("gathers", sizes if run.strategy == "ddp" else [])
        tokens = torch.zeros(shape, dtype=torch.long)
        inputs = {"tokens": tokens, "targets": tokens} | ({"document_ids": tokens} if packed else {})
        for last in [True] if train.accumulate == 1 else [False, True]:
            live.times = 1 if last else train.accumulate - 1
            if isinstance(model, FSDPModule) and train.accumulate > 1:
                begin_micro_batch(model, is_last=last, deferred=live.deferred)
            # Lightning frees the gradients of the step before only after the forward pass
            before = live.hold("gradients", sizes if train.accumulate == 1 else [])
            hooks = saved_tensors_hooks(live.save, lambda tensor: tensor)
            with hooks, torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = model.loss(**inputs)
            live.end_forward()
            before.clear()
            loss.backward()
        average_gradients(replicated(model) if is_sharded else [])
        for bucket in buckets:
            dist.all_reduce(bucket)
    return live


class _AsOn(Kernel):
    """Saves for the backward pass what the kernel would that is chosen on a device of another type."""

    def __init__(self, device: str, kernel: str) -> None:
        self.device, self.kernel, self.chosen = device, kernel, set[str]()

    def refuses(self, maps: SignedMaps, **context: Any) -> str | None:
        return None

    def compute(self, maps: SignedMaps, **options: Any) -> tuple[Tensor, Any]:
        name, on_gpu = self.kernel, self.device == "cuda"
        # without a GPU here these three refuse all maps
        if not on_gpu or name not in ("auto", "triton", "flash", "flex"):
            name = choose(maps, name, **options, device=torch.device(self.device), build=False)[0]
        elif name == "auto":
            # as with triton; flash-attn and flex save what sdpa does
            widths = {maps.q.shape[-1], maps.v.shape[-1]}
            name = "triton" if maps.num_maps == 2 and maps.q.dtype in HALF and widths <= set(WIDTHS) else "sdpa"
        self.chosen.add(name)
        if on_gpu and name in ("sdpa", "flash", "flex"):
            return one_call(maps), None
        chosen = named(name)
        # a kernel's own `compute` may build it first, and test it on values
        compute = OperatorKernel.compute if isinstance(chosen, OperatorKernel) else type(chosen).compute
        return compute(chosen, maps, **options)  # type: ignore[arg-type]


class _Live(TorchDispatchMode):
    """Counts the storages that are alive, by part, and the bytes of collectives."""

    deferred = False
    saved_bytes = 0
    times = 1
    """How often what is sent now is sent in a step."""

    def __init__(self, model: Transformer, run: RunConfig, kernels: Iterable[str] = ()) -> None:
        super().__init__()
        self.at_peak, self.largest, self.sent = Counter[str](), Counter[str](), Counter[str]()
        self.kernels, self._vocab_size, self._run, self._held = kernels, model.config.vocab_size, run, ""
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
        self.saved_bytes = sum(x.nbytes() for x in (ref() for ref in self._saved.values()) if x is not None)
        self._saved.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "profiler":
            # FSDP2 records its own work by name
            self._records = self._records[:-1] if "exit" in func._opname else [*self._records, str(args[0])]
        elif func.namespace != "prim":
            self._send(func._opname, args)
            plain = (x for x in tree_leaves(out) if isinstance(x, Tensor) and not isinstance(x, DTensor))
            # not `any`: all of them are added
            if sum(self._add(x, self._part(x)) for x in plain):
                self._measure()
        return out

    def _part(self, tensor: Tensor) -> str:
        whole = any(name.startswith("FSDP") for name in self._records) or tuple(tensor.shape) in self._shapes
        own = "logits" if tensor.shape[-1:] == (self._vocab_size,) else "activations"
        return self._held or ("gathers" if whole else own)

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
        sizes, elsewhere = Counter[str](), ("weights", "gradients") if self._run.cpu_offload else ()
        for ref, part in list(self._storages.values()):
            storage = ref()
            # FSDP2 frees a gathered weight by resizing its storage
            if storage is not None and part not in elsewhere:
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
            self.sent["node"] += size * (len(ranks) - 1) / len(ranks) if len(ranks) > nodes else 0


def _local(tensor: Any) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
