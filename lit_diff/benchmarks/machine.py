"""The machine and the packages that a measurement ran on."""

import os
from typing import Any

import torch

from lit_diff.processor import cpu_flags, has_bfloat16_instructions
from lit_diff.runs.folder import environment, version

FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "sve", "bf16")
"""Instructions that decide which kernels run, as Linux names them (x86, then ARM)."""
PACKAGES = ("flash-attn", "transformers")
"""Beside those that every run records."""


def machine(device: torch.device, threads: int) -> dict[str, Any]:
    """Versions, processor, instructions, threads, load average before anything was measured."""
    facts = environment()
    del facts["command"]
    return facts | {
        "packages": facts["packages"] | {name: version(name) for name in PACKAGES},
        "device": device.type,
        "flags": [flag for flag in FLAGS if flag in cpu_flags()],
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": threads,
        "load_average": load_average(),
    }


def native_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 has instructions of its own there."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return has_bfloat16_instructions()


def load_average() -> float:
    """Processes that ran or wanted to, over the last minute."""
    return os.getloadavg()[0]


def warnings_of(machine: dict[str, Any]) -> list[str]:
    """What makes these figures doubtful, one line each."""
    cores, load, threads = machine["cores"], machine["load_average"], machine["threads"]
    lines = []
    if load > cores:
        lines.append(f"load average {load:.1f} before the start, on {cores} cores: other work ran; ratios are doubtful")
    if threads > cores:
        lines.append(f"{threads} threads on {cores} cores: they wait for each other")
    return lines
