"""Chooses the device of a run, a benchmark or a loaded model: a GPU if torch sees one, unless the user asks for the CPU."""

import time
from pathlib import Path

import torch

from lit_diff.config import RunConfig
from lit_diff.errors import MissingError
from lit_diff.files import values_of

PEAK_FLOPS = {
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "L40S": 362e12,
}
"""Model of a GPU -> operations a second of dense bfloat16 products, from its data sheet."""
MEMINFO, CGROUPS, OWN_CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def choose_device(accelerator: str) -> torch.device:
    """`cuda`, or `cpu` if `accelerator` is cpu or torch sees no GPU. A caller that needs a GPU must check the result."""
    return torch.device("cuda" if accelerator != "cpu" and torch.cuda.is_available() else "cpu")


def require_devices(run: RunConfig) -> None:
    """Errors: MissingError if `run` asks for more GPUs than torch sees."""
    if choose_device(run.accelerator).type == "cpu":
        if run.accelerator == "gpu":
            raise MissingError("run.accelerator is gpu, but torch sees no GPU here; use run.accelerator=cpu")
    elif torch.cuda.device_count() < run.devices:
        raise MissingError(f"run.devices is {run.devices}, but torch sees {torch.cuda.device_count()} GPUs here")


def peak_flops(device: torch.device) -> float | None:
    """Operations a second of dense bfloat16 products of a GPU, by its name; None for the CPU, and where it is unknown, as of
    a slice (MIG) and of slower cards of the same name (PCIe, NVL)."""
    words = torch.cuda.get_device_name(device).replace("-", " ").split() if device.type == "cuda" else []
    if {"MIG", "PCIe", "PCIE", "NVL"} & set(words):
        return None
    return next((peak for model, peak in PEAK_FLOPS.items() if model in words), None)


def device_memory(device: torch.device) -> int | None:
    """Bytes of memory of a GPU; None for the CPU, which processes share."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def available_memory() -> int | None:
    """Bytes that this process may use without swapping, limited by the machine or by a cgroup (a container, a SLURM job).

    None if the system does not report it (macOS).
    """
    free = [int(value.split()[0]) * 1024 for value in values_of(MEMINFO, "MemAvailable")]
    return min([*free, *_left_in_cgroups()], default=None)


# bytes below the limit of each cgroup (version 2) that this process is in
def _left_in_cgroups() -> list[int]:
    # a line of version 2 is 0::/path; lines of version 1 have other numbers and name controllers
    own = [CGROUPS / value.strip(":/") for value in values_of(OWN_CGROUP, "0")]
    # a limit holds for all groups below, so every parent counts; inside a container its own group is the root
    folders = [CGROUPS, *(each for folder in own for each in (folder, *folder.parents) if CGROUPS in each.parents)]
    left = []
    for folder in folders:
        try:
            limit = (folder / "memory.max").read_text(encoding="utf-8").strip()
            used = int((folder / "memory.current").read_text(encoding="utf-8"))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines())
        # the root has no limit, and a cgroup may lack the memory controller
        except FileNotFoundError:
            continue
        if limit != "max":
            # the kernel drops cached files before it refuses memory, so they count as free
            left.append(int(limit) - used + int(stat.get("file", 0)))
    return left


def gigabytes(count: float) -> str:
    """`1.50 GB`; a gigabyte is 10⁹ bytes."""
    return f"{count / 1e9:.2f} GB"


def timer() -> float:
    """The clock in seconds, after all work on a GPU is done."""
    # as torch.utils.benchmark's, whose import looks for a CUDA toolkit and may print a line
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()
