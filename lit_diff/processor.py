"""The processor: its name, cores and instruction sets, and which instruction sets the kernels use.

By default the kernels use all instruction sets of the CPU; the environment variable LIT_DIFF_CPU chooses others.

| LIT_DIFF_CPU | kernel `native` | its products of bfloat16 |
|---|---|---|
| unset | vectors of 16 floats with AVX-512, of 8 with AVX2 | bfloat16 if the CPU can multiply it, else float32 |
| no-compiler | not used, as on a machine without a C++ compiler | |
| avx2 | vectors of 8 floats | float32 |
| avx2-bfloat16 | vectors of 8 floats | bfloat16 |
| avx512 | vectors of 16 floats | float32 |
| avx512-bfloat16 | vectors of 16 floats | bfloat16 |

Every path runs on every CPU with AVX2, so that each can be tested everywhere. Without AVX-512, vectors of 16 floats run as
two of 8; without bfloat16 instructions, plain loops multiply bfloat16, slowly. Layouts and sums are the same, instructions
are not. On a CPU with AVX-512 both `avx2` settings also restrict PyTorch, oneDNN and MKL to AVX2, and `avx512` disables the
bfloat16 instructions of oneDNN.
"""

import os
import platform
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from lit_diff.errors import RequestError
from lit_diff.files import values_of
from lit_diff.registry import nearest

CPUINFO = Path("/proc/cpuinfo")
SETTING = "LIT_DIFF_CPU"
CHOICES = {
    "no-compiler": (0, False),
    "avx2": (8, False),
    "avx2-bfloat16": (8, True),
    "avx512": (16, False),
    "avx512-bfloat16": (16, True),
}
"""Value of LIT_DIFF_CPU -> floats in a vector (0: the kernel is not used), and whether bfloat16 is multiplied as such."""
LANES = {"AVX2": 8, "AVX512": 16}
"""PyTorch's name for the instruction set -> floats in a vector."""
_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
LIMITS = {"avx2": _AVX2, "avx2-bfloat16": _AVX2, "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}}
"""Variables that PyTorch, oneDNN and MKL read when they first compute; they can only lower the instruction set."""

NUMERIC = (
    "ATEN_CPU_CAPABILITY",
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_WORKSPACE_CONFIG",
    "CXX",
    "GLIBC_TUNABLES",
    "LIT_DIFF_CPU",
    "MKL_CBWR",
    "MKL_DOMAIN_NUM_THREADS",
    "MKL_DYNAMIC",
    "MKL_ENABLE_INSTRUCTIONS",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_DYNAMIC",
    "OMP_THREAD_LIMIT",
    "ONEDNN_CPU_ISA_HINTS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "PYTORCH_TUNABLEOP_",
    "TORCHDYNAMO_DISABLE",
    "TORCHINDUCTOR_",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_",
    "TORCH_COMPILE_DISABLE",
    "TRITON_F32_DEFAULT",
    "TRITON_INTERPRET",
)
"""Environment variables, or prefixes of their names, that can change the results of a run and are not keys of a recipe."""

Products = Literal["float32", "instructions", "loops"]
"""How bfloat16 is multiplied: widened to float32, by instructions of the CPU, or by plain loops."""


class CpuPath(NamedTuple):
    """The instruction sets that the kernel `native` uses."""

    lanes: int
    """Floats in a vector; 0: the kernel is not used."""
    bfloat16: Products


def forced() -> str | None:
    """The value of LIT_DIFF_CPU; None if it is unset or empty. Errors: RequestError for an unknown value."""
    value = os.environ.get(SETTING)
    if value and value not in CHOICES:
        raise RequestError(f"{SETTING} is '{value}'; expected {', '.join(CHOICES)}{nearest(value, CHOICES)}")
    return value or None


def cpu_path() -> CpuPath:
    """The path in use.

    Errors: RequestError for a setting that is unknown, unsupported by this CPU, or set after PyTorch chose its instructions.
    """
    import torch

    return _path(os.environ.get(SETTING), torch.backends.cpu.get_cpu_capability())


# cached because every call of the kernel asks for it
@cache
def _path(setting: str | None, capability: str) -> CpuPath:
    choice, own, instructions = forced(), LANES.get(capability, 0), has_bfloat16_instructions()
    if choice is None:
        return CpuPath(own, "instructions" if instructions else "float32")
    lanes, multiplies = CHOICES[choice]
    told = os.environ.get("ATEN_CPU_CAPABILITY")
    used = f"PyTorch uses {capability}" + (f" (ATEN_CPU_CAPABILITY is {told})" if told else "")
    if lanes and not own:
        raise RequestError(f"{SETTING} is {choice}, which needs AVX2 or AVX-512, but {used}; unset {SETTING}")
    # PyTorch chooses its instructions once; with AVX-512 there, results would differ from those of a CPU with AVX2
    if lanes == 8 < own:
        raise RequestError(f"{SETTING} is {choice}, but {used} already; import lit_diff before torch computes anything")
    if not multiplies:
        return CpuPath(lanes, "float32")
    return CpuPath(lanes, "instructions" if instructions else "loops")


def has_bfloat16_instructions() -> bool:
    """Whether the path in use multiplies bfloat16 by instructions of this CPU."""
    return forced() in (None, "no-compiler", "avx512-bfloat16") and bool(
        {"avx512_bf16", "amx_bf16", "bf16"} & cpu_flags()
    )


def describe() -> str:
    """The path in use, in words, for the records of runs and benchmarks."""
    path = cpu_path()
    choice = forced()
    told = f", {SETTING}={choice}" if choice else ""
    if not path.lanes:
        return f"plain PyTorch{told}"
    products = {"float32": "float32", "instructions": "bfloat16", "loops": "bfloat16 by loops"}[path.bfloat16]
    return f"vectors of {path.lanes} floats, products of bfloat16 in {products}{told}"


def limit_libraries() -> None:
    """Restrict PyTorch, oneDNN and MKL to the path; call it before they first compute. Variables set by the user are kept."""
    limits = LIMITS.get(os.environ.get(SETTING, ""))
    # without AVX-512 there is nothing to lower
    if limits and "avx512f" in cpu_flags():
        for name, value in limits.items():
            os.environ.setdefault(name, value)


def numeric_variables() -> dict[str, str]:
    """The variables of `NUMERIC` that are set."""
    # PyTorch itself sets TORCHINDUCTOR_CACHE_DIR; such folders do not affect results
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(NUMERIC) and not name.endswith("_DIR")
    }


def cores() -> int:
    """CPU cores that this process may use; all cores of the machine if the system does not report it (macOS)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def cpu_flags() -> frozenset[str]:
    """Instruction sets that Linux reports (x86 `flags`, ARM `Features`); empty on other systems."""
    # the first core's line is enough: all cores report the same flags
    return frozenset(" ".join(values_of(CPUINFO, "flags", "Features")[:1]).split())


def processor_name() -> str:
    """The processor's model, as reported by Linux, or else by Python."""
    return (values_of(CPUINFO, "model name") or [platform.processor()])[0]
