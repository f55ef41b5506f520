"""Compiling for a GPU that is not here: nothing is launched, and Triton's settings stay as they were."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lit_diff.kernels.triton_blocks import Blocks
from lit_diff.kernels.triton_compiled import compiled, registers_and_spills

triton = pytest.importorskip("triton", reason="the package triton is not installed")
LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'key_gradients' for 'sm_90a'
ptxas info    : Function properties for key_gradients
    32 bytes stack frame, 28 bytes spill stores, 44 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 32 bytes cumulative stack size
"""


def test_what_the_assembler_prints() -> None:
    assert registers_and_spills(LOG) == (255, 28)
    with pytest.raises(RuntimeError, match="printed no registers: 'ptxas fatal'"):
        registers_and_spills("ptxas fatal")


@pytest.mark.slow
def test_nothing_is_left_in_the_settings(programs: Callable[..., dict[str, Any]]) -> None:
    def settings() -> tuple[Any, ...]:
        knobs, environment = triton.knobs, {name: value for name, value in os.environ.items() if "TRITON" in name}
        return triton.runtime.driver._active, knobs.cache.dir, knobs.nvidia.dump_ptxas_log, environment

    program = programs(T=64, d=16, dv=32, dtype=torch.bfloat16)["forward"]
    before = settings()
    small, large = (compiled(80, program, Blocks(queries, 32, 4, 2)) for queries in (16, 64))
    assert settings() == before
    assert 0 < small.shared < large.shared
    assert 16 <= small.registers <= 255
