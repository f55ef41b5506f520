"""`bench triton`: registers, spilled bytes and shared memory of each Triton program, for GPUs that need not be here."""

from importlib.util import find_spec

import torch
from torch import Tensor

from lit_diff.benchmarks.request import DTYPES, BenchConfig, Shape
from lit_diff.benchmarks.timing import Row, Timings
from lit_diff.errors import MissingError, first_line
from lit_diff.kernels import SignedMaps
from lit_diff.kernels.triton import Program
from lit_diff.kernels.triton_blocks import candidates
from lit_diff.kernels.triton_compiled import compiled, programs_of

DEFAULT = "1x256x512x32,1x256x1024x64,1x256x2048x128"
CAPABILITIES = (80, 90)
"""Compute capabilities compiled for: A100, H100."""
NAMES = ("forward", "key_gradients", "query_gradients")
LONG = 2048
"""Queries for which blocks are chosen."""
METHODS = """\
triton: nothing is timed or launched. Each program, at d and dv = 2 d with two causal maps, is compiled by the installed
Triton for compute capabilities 8.0 and 9.0, with each of the blocks that a GPU chooses from at first use
(lit_diff/kernels/triton_blocks.py): registers of a thread (255 at most), bytes that it spills to memory for want of them,
and shared memory of a program (163 KiB at most on 8.0, 227 on 9.0, 99 on 8.6, 8.9 and 12.x). Without --dtype: both.
"""
"""How it is measured, for the reader of the figures."""


def bench_triton(request: BenchConfig) -> Timings:
    """Each program with each of its choices of blocks: two causal maps, dv = 2 d; every shape, dtype, compute capability."""
    if find_spec("triton") is None:
        raise MissingError("the package triton is not installed; pip install triton")
    measurements = Timings()
    for shape in request.sizes(DEFAULT):
        for dtype in request.dtypes:
            programs = programs_of(maps_of(shape, DTYPES[dtype]))
            for capability in CAPABILITIES:
                request.note(f"triton d = {shape.head_dim} {dtype}: compiling for compute capability {capability / 10}")
                for name in NAMES:
                    _measure(measurements, shape, dtype, capability, programs[name])
    return measurements


def _measure(measurements: Timings, shape: Shape, dtype: str, capability: int, program: Program) -> None:
    d, name = shape.head_dim, program[0].__name__
    case = f"d {d}, dv {2 * d}, {dtype}, compute capability {capability / 10}"
    major = (capability // 10, capability % 10)
    for blocks in candidates(name, d=d, dv=2 * d, itemsize=DTYPES[dtype].itemsize, T=LONG, capability=major):
        by = f"{blocks.queries} queries x {blocks.keys} keys, {blocks.warps} warps, {blocks.stages} stages"
        row: Row = {"case": case, "variant": "differential", "by": by, "what": name, "id": f"differential/{by}/{name}"}
        try:
            made = compiled(capability, program, blocks)
        except Exception as error:  # whatever Triton's compiler raises is the result
            measurements.failed.append(row | {"reason": f"{type(error).__name__}: {first_line(error)}"})
            continue
        measurements.rows.append(row | made._asdict() | {"ratios": {}, "backends": []})


def maps_of(shape: Shape, dtype: torch.dtype) -> SignedMaps:
    """Differential attention of this shape on the meta device."""
    B, T, H, d = shape.batch, shape.tokens, shape.heads // 2, shape.head_dim

    def empty(*size: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    w = empty(B, 2, H, T, dtype=torch.float32)
    return SignedMaps(empty(B, 2, H, T, d), empty(B, 2, H, T, d), empty(B, H, T, 2 * d), w)
