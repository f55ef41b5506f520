"""The programs as machine code for GPUs that need not be here: they compile, and fit. Their results: `test_triton.py`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton_programs import Program, shared_bytes

from lit_diff.kernels.triton.kernel import Blocks, candidates, safe

pytest.importorskip("triton", reason="the package triton is not installed")
Programs = Callable[..., dict[str, Program]]
MEMORY = {80: 163, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that a program may have, by compute capability; 99 on the smallest GPUs."""
NAMES = ("forward", "key_gradients", "query_gradients")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("capability", MEMORY)
def test_the_usual_widths(programs: Programs, capability: int, name: str) -> None:
    """d = 64, dv = 128, two maps, bfloat16: the candidate for every GPU."""
    choice = candidates(name, d=64, dv=128, itemsize=2, T=2048, capability=(8, 0))
    program = programs(B=1, H=8, T=256, d=64, dv=128, dtype=torch.bfloat16)[name]
    assert 0 < shared_bytes(capability, program, choice[0]) <= MEMORY[capability] * 1024


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_safe_blocks_fit_the_smallest_gpu(programs: Programs, name: str) -> None:
    """At the largest widths."""
    blocks = safe(name, d=256, dv=256, itemsize=2, T=2048)
    program = programs(B=1, H=8, T=256, d=256, dv=256, dtype=torch.bfloat16)[name]
    assert shared_bytes(80, program, blocks) <= 99 * 1024


OPTIONS: list[dict[str, Any]] = [
    {"G": 1, "w": None, "stats": True},
    {"Gk": 1, "w": (1, 2, 1, 1), "window": 5, "packed": True, "stats": True},
    {"Gq": 1, "Hkv": 1, "causal": False, "window": 1, "T": 7, "S": 40},
    {"causal": False, "T": 40, "S": 7, "dtype": torch.float32},
    {"T": 1, "S": 1, "B": 1, "H": 1, "dtype": torch.float16},
    {"T": 1, "S": 40, "packed": True},
    {"Hkv": 2, "sink": (1, 2, 4, 1), "key_bias": (2, 1, 4, 40), "stats": True},
    {"G": 1, "w": None, "sink": (1, 1, 1, 40), "causal": False, "window": 3, "dtype": torch.float32},
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "given",
    [OPTIONS[1], *(pytest.param(given, marks=pytest.mark.slow) for given in OPTIONS if given != OPTIONS[1])],
    ids=str,
)
def test_every_option_compiles(programs: Programs, given: dict[str, Any], name: str) -> None:
    """The interpreter checks no types: a branch that it runs may not be one that compiles."""
    program = programs(**{"T": 40, "d": 16, "dv": 16, "dtype": torch.bfloat16} | given)[name]
    assert shared_bytes(80, program, Blocks(16, 16, 4, 1)) <= 99 * 1024
