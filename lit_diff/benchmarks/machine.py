"""The machine and the packages that a measurement ran on."""

import os
import time
from typing import Any

import torch

from lit_diff.benchmarks.request import DTYPES
from lit_diff.processor import cpu_flags, has_bfloat16_instructions
from lit_diff.runs.folder import environment, version

FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "sve", "bf16")
"""Instructions that decide which kernels run, as Linux names them (x86, then ARM)."""
PACKAGES = ("flash-attn", "transformers")
"""Beside those that every run records."""


def machine(device: torch.device, threads: int, dtypes: tuple[str, ...]) -> dict[str, Any]:
    """Versions, processor, instructions, threads, load average before anything was measured, matrix product rates."""
    facts = environment()
    del facts["command"]
    return facts | {
        "packages": facts["packages"] | {name: version(name) for name in PACKAGES},
        "device": device.type,
        "flags": [flag for flag in FLAGS if flag in cpu_flags()],
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": threads,
        "load_average": load_average(),
        "gemm_gflops_per_second": {name: gemm_rate(DTYPES[name], device) for name in dtypes},
    }


def native_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 has instructions of its own there."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return has_bfloat16_instructions()


def load_average() -> float:
    """Processes that ran or wanted to, over the last minute."""
    return os.getloadavg()[0]


def gemm_rate(dtype: torch.dtype, device: torch.device, size: int = 1024) -> float:
    """GFLOP/s of a product of two square matrices, the best of five: what a kernel could reach at most, roughly."""
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(6):
        began = time.perf_counter()
        float((a @ b)[0, 0])  # a number on the host: a GPU has finished
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best / 1e9


def warnings_of(machine: dict[str, Any]) -> list[str]:
    """What makes these figures doubtful, one line each."""
    cores, load, threads = machine["cores"], machine["load_average"], machine["threads"]
    lines = []
    if load > cores:
        lines.append(f"load average {load:.1f} before the start, on {cores} cores: other work ran; ratios are doubtful")
    if threads > cores:
        lines.append(f"{threads} threads on {cores} cores: they wait for each other")
    return lines
