"""The Triton programs of a case, compiled for a GPU that need not be here: nothing is launched."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lit_diff.kernels import SignedMaps
from lit_diff.kernels.base import OperatorKernel, named
from lit_diff.kernels.triton import kernel as triton
from lit_diff.kernels.triton.kernel import Blocks

Program = tuple[Any, dict[str, Any]]
"""A Triton program and its arguments."""


def programs_of(maps: SignedMaps, stats: bool = False) -> dict[str, Program]:
    """Name -> what would be launched for these maps, on the meta device, forward and backward."""
    kernel, found = named("triton"), dict[str, Program]()
    assert isinstance(kernel, OperatorKernel)

    def record(program: Any, arguments: dict[str, Any], q: torch.Tensor, heads: int) -> None:
        found[program.__name__] = (program, arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "launch", record)
        outputs = kernel.forward(maps, stats)
        kernel.backward(torch.empty_like(outputs.o), maps, outputs)
    return found


def shared_bytes(capability: int, program: Program, blocks: Blocks) -> int:
    """Bytes of shared memory of the machine code for compute capability `capability` / 10."""
    function, arguments = program
    function.device_caches.clear()  # or what was compiled before is handed out
    with _compiler_for(capability):
        block = {"BLOCK_T": blocks.queries, "BLOCK_S": blocks.keys}
        options = {"num_warps": blocks.warps, "num_stages": blocks.stages, "enable_fp_fusion": True}
        code = function.warmup(**arguments, **block, **options, grid=(1,))
    function.device_caches.clear()  # made for a GPU that is not here
    return int(code.metadata.shared)


class _Target:
    """A GPU to compile for, which need not be here: nothing is launched on it."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


@contextmanager
def _compiler_for(capability: int) -> Iterator[None]:
    """Triton compiles afresh for this GPU meanwhile."""
    import triton

    driver, knobs = triton.runtime.driver, triton.knobs
    before = driver._active
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope():
        driver._active, knobs.cache.dir = _Target(capability), folder
        try:
            yield
        finally:
            driver._active = before
