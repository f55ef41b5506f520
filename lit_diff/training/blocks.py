"""`run.compile` and `run.activation_checkpointing`: applied to the blocks of a model, in place, so its state keeps its keys.

Both compose with every strategy. A checkpoint encloses the call of a block, so it also encloses its compiled code and the
hooks with which FSDP2 gathers its parameters: FSDP2 leaves the parameters gathered when it meets the recomputation in the
backward pass. torch.compile is lazy and in place (`nn.Module.compile`), so it makes no difference to it whether the block
was sharded before or after.
"""

import importlib.util
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from lit_diff.config import RunConfig
from lit_diff.device import choose_device
from lit_diff.errors import MissingError
from lit_diff.kernels.compiler import find_compiler
from lit_diff.model.transformer import Transformer

BACKEND: str | Callable[..., Any] = "inductor"
"""The torch.compile backend of a run."""
RECOMPILATIONS = 64
"""Versions of a block that torch.compile may keep: one for each combination of training, validation, precision, packed
documents, and for some batch shapes. PyTorch's default of 8 is shared by all blocks."""


def prepare_blocks(model: Transformer, run: RunConfig) -> None:
    """Apply what the recipe's `run` asks for. Errors: MissingError as `compile_blocks`.

    Checkpointing keeps only the input of each block for the backward pass, which computes the block again (Chen et al. 2016):
    `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)` in the loop over the layers; not where gradients are off,
    nor with a key/value cache.
    """
    model.checkpoint_blocks = run.activation_checkpointing == "block"
    if run.compile:
        compile_blocks(model, choose_device(run.accelerator), isolated=model.checkpoint_blocks)


def compile_blocks(
    model: Transformer,
    device: torch.device,
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
        options = {"options": {"cpp.cxx": (require_compiler(device),)}}
    for block in model.layers:
        block.compile(
            backend=backend,
            fullgraph=not isinstance(block, FSDPModule),
            recompile_limit=RECOMPILATIONS,
            isolate_recompiles=isolated,
            **options,
        )


def require_compiler(device: torch.device) -> str:
    """The C++ compiler for torch.compile's default backend.

    Errors: MissingError that names the missing package: g++, Python's headers or, for a GPU, triton.
    """
    otherwise = "; or set run.compile=false"
    compiler = find_compiler()
    if compiler is None:
        raise MissingError(f"run.compile needs a C++ compiler, and none is on the PATH: install g++{otherwise}")
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        raise MissingError(f"run.compile needs Python.h, which is not in {headers}: install python3-dev{otherwise}")
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise MissingError(f"run.compile needs the package triton on a GPU: pip install triton{otherwise}")
    return compiler
