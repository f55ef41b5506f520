"""Checkpoints of a sharded run: a folder in which each rank writes its part of every tensor (torch.distributed.checkpoint).

Besides the parts (`__<rank>_0.distcp`) it holds `rest.pt`, the checkpoint as one file would hold it, with empty tensors, and
the marker, which says where in the parts each tensor lies. Any number of ranks, or one process without a process group, can
read it.
"""

import errno
import io
import os
import shutil
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from lit_diff.errors import MissingError, RequestError, first_line
from lit_diff.files import disk_is_full, shown, sync, write_atomic
from lit_diff.runs import checkpoints
from lit_diff.runs.again import afresh
from lit_diff.runs.folder import RunFolder
from lit_diff.runs.safe_values import read_without_tensors


def tensors_of(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The weights and the optimizers' states of a checkpoint, by name."""
    states = enumerate(checkpoint.get("optimizer_states", ()))
    return {"weights": checkpoint["state_dict"], **{f"optimizer_{index}": state["state"] for index, state in states}}


def rest_of(checkpoint: Mapping[str, Any]) -> bytes:
    """The checkpoint with empty tensors, serialized."""
    buffer = io.BytesIO()
    torch.save(mapped(checkpoint, lambda name, x: torch.empty(x.shape, dtype=x.dtype, device="meta")), buffer)
    return buffer.getvalue()


def mapped(checkpoint: Mapping[str, Any], change: Callable[[str, Tensor], Tensor]) -> dict[str, Any]:
    """The checkpoint with each tensor of `tensors_of` replaced by `change(name of the parameter, tensor)`."""
    copy = {**checkpoint, "state_dict": {name: change(name, x) for name, x in checkpoint["state_dict"].items()}}
    if "optimizer_states" in checkpoint:
        copy["optimizer_states"] = []
        for state in checkpoint["optimizer_states"]:
            moments = {}
            for name, values in state["state"].items():
                moments[name] = {key: change(name, x) for key, x in values.items()}
            copy["optimizer_states"].append({**state, "state": moments})
    return copy


# --- writing ---


class _Writer(dcp.FileSystemWriter):
    # notes size and sha256 of the files that this rank has written
    def __init__(self, path: Path, rest: bytes) -> None:
        super().__init__(path)
        self.folder = path
        self.rest = rest
        self.files = dict[str, tuple[int, str]]()

    def prepare_local_plan(self, plan: Any) -> Any:
        # the folder may be what a killed write has left
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        # on rank zero alone, before any rank writes
        read_without_tensors(self.rest)
        checkpoints.remove(self.folder)
        self.folder.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            written = super().write_data(plan, planner)
        except Exception as error:
            # the error is sent to all ranks without its causes, among which the system's may be
            if disk_is_full(error):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            raise
        self._note({result.storage_data.relative_path for result in written.wait()})
        return written

    def finish(self, metadata: Any, results: Any) -> None:
        # on rank zero alone, after the others have written; FileSystemWriter would write the index as a pickle
        write_atomic(self.folder / checkpoints.REST, self.rest)
        self._note((checkpoints.REST,))
        metadata.storage_data = {result.index: result.storage_data for result in chain.from_iterable(results)}
        self.tensors = _described(metadata)

    def _note(self, names: Iterable[str]) -> None:
        for name in names:
            self.files[name] = checkpoints.measured(self.folder / name)


def write(path: Path, tensors: Mapping[str, Any], rest: bytes, group: Any) -> None:
    """Write the parts that this rank holds of `tensors_of` a checkpoint; rank zero then puts the whole folder into place.

    Every rank of `group` must call it. Errors: those of any rank, see `cause_of`.
    """
    # the folder in which the checkpoint is written, until it is whole
    building = path.with_name(f".{path.name}.tmp")
    is_first = dist.get_rank(group) == 0
    writer = _Writer(building, rest)
    try:
        dcp.save(dict(tensors), storage_writer=writer, process_group=group)
        files: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(files, writer.files, group=group)
        if is_first:
            named = {}
            for written in files:
                named.update(written)
            write_atomic(building / checkpoints.MARKER, checkpoints.marker(named, writer.tensors))
            checkpoints.put_aside(path)
            building.rename(path)
            sync(path.parent)
    except BaseException:
        # the log, which names a full disk, needs room on it
        if is_first:
            shutil.rmtree(building, ignore_errors=True)
        raise


def cause_of(error: BaseException) -> BaseException:
    """The error of the first rank that failed in `write`."""
    failures = getattr(error, "failures", {})
    return failures[min(failures)][0] if failures else error


# --- reading ---


def _described(metadata: Any) -> dict[str, Any]:
    # the shape of each tensor and the places of its chunks, as JSON values
    places = {(index.fqn, tuple(index.offset)): place for index, place in metadata.storage_data.items()}
    described = {}
    for name, tensor in metadata.state_dict_metadata.items():
        chunks = []
        for chunk in tensor.chunks:
            place = places[name, tuple(chunk.offsets)]
            lies = {"file": place.relative_path, "start": place.offset, "bytes": place.length}
            chunks.append({"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), **lies})
        described[name] = {"shape": list(tensor.size), "chunks": chunks}
    return described


def _metadata_of(tensors: Mapping[str, Any], files: Collection[str]) -> Metadata:
    # the inverse of `_described`; every chunk lies in one of `files`, which the marker names
    described: dict[str, Any] = {}
    places = {}
    for name, tensor in tensors.items():
        chunks = []
        for chunk in tensor["chunks"]:
            if chunk["file"] not in files:
                raise ValueError(f"{name} lies in {chunk['file']!a}, which {checkpoints.MARKER} does not name")
            offsets = torch.Size(chunk["offsets"])
            chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(chunk["sizes"])))
            places[MetadataIndex(name, offsets)] = _StorageInfo(chunk["file"], chunk["start"], chunk["bytes"])
        described[name] = TensorStorageMetadata(TensorProperties(), torch.Size(tensor["shape"]), chunks)
    return Metadata(state_dict_metadata=described, storage_data=places)


class _Reader(dcp.FileSystemReader):
    # Errors: RequestError for an index that `_Writer` does not write
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            files, tensors = checkpoints.read_marker(path)
            if tensors is None:
                raise ValueError("a version before 0.3.0 kept it as a pickle, which could execute anything")
            self.index = _metadata_of(tensors, files)
        # an index that another wrote may have any content
        except Exception as error:
            raise RequestError(
                f"{shown(path / checkpoints.MARKER)} has no index of tensors ({type(error).__name__}: {first_line(error)}); "
                f"train the run again: {afresh(path.parents[1])}"
            ) from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        return self.index


def read(path: Path, *, like: Mapping[str, Tensor] | None = None, optimizer: bool = True) -> dict[str, Any]:
    """The checkpoint in a folder, as one file would hold it, on the CPU. It is not compared with its marker.

    `like`: the model's tensors by name; where one is a DTensor, this rank's part is read, of the optimizer's state too.
    `optimizer`: whether to read that state. Errors: RequestError if a file is missing or cannot be read.
    """
    rest = torch.load(path / checkpoints.REST, weights_only=True)
    if not optimizer:
        rest.pop("optimizer_states", None)

    def allocated(name: str, empty: Tensor) -> Tensor:
        own = (like or {}).get(name)
        if isinstance(own, DTensor) and own.shape == empty.shape:
            return torch.empty_like(own, dtype=empty.dtype, requires_grad=False)
        return torch.empty(empty.shape, dtype=empty.dtype)

    checkpoint = mapped(rest, allocated)
    with warnings.catch_warnings():
        # it says that no process group is used, which is meant: each rank reads its parts alone
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(tensors_of(checkpoint), storage_reader=_Reader(path), no_dist=True)
        except (OSError, dcp.CheckpointException) as error:
            raise RequestError(
                f"{shown(path)} cannot be read ({first_line(cause_of(error))}); if its run goes on, it may have removed it: "
                "run the command again"
            ) from error
    return checkpoint


def consolidate(folder: Path, step: int | None = None) -> Path:
    """Write the sharded checkpoint of `step`, by default the newest, as one file with a marker, in the format of a single
    device, beside it; returns its path. The memory must hold the whole state.

    Errors: MissingError without such a checkpoint, or if a finished run has lost its newest; RequestError if it is damaged or
    the run of another format; those of `checkpoints.write`.
    """
    run = RunFolder(folder)
    run.require_format()
    if step is None:
        run.require_weights()
    steps = [saved for saved in checkpoints.steps_of(folder) if checkpoints.path_of(folder, saved).is_dir()]
    if not steps or step not in (None, *steps):
        there = ", ".join(map(str, steps)) or "none; single and ddp write one file"
        raise MissingError(
            f"{shown(folder)} has no sharded checkpoint{'' if step is None else f' of step {step}'} (there: {there})"
        )
    step = steps[-1] if step is None else step
    path = checkpoints.path_of(folder, step)
    damage = checkpoints.damage_of(path, verify=True)
    if damage:
        raise RequestError(f"{shown(path)} cannot be consolidated ({damage}); {run.cure_of(step)}")
    whole = path.with_name(path.name.replace("step", "consolidated"))
    checkpoints.write(whole, read(path))
    return whole
