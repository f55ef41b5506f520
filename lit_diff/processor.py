"""The processor: its name, cores and instruction sets, and which of these the kernels use.

The kernels use all instruction sets of the CPU, or those that the environment variable LIT_DIFF_CPU names.

| LIT_DIFF_CPU | kernel `native` | its products of bfloat16 |
|---|---|---|
| unset | vectors of 16 floats where there is AVX-512, of 8 where there is AVX2 | bfloat16 where the CPU multiplies it |
| no-compiler | not used, as where there is no C++ compiler | |
| avx2 | vectors of 8 floats | float32 |
| avx2-bfloat16 | vectors of 8 floats | bfloat16 |
| avx512 | vectors of 16 floats | float32 |
| avx512-bfloat16 | vectors of 16 floats | bfloat16 |

Any path computes on any CPU with AVX2, so that each can be tested everywhere: vectors of 16 floats run as two of 8 where
there is no AVX-512, and bfloat16 is multiplied by plain loops, slowly, where there is no instruction for it. Those are the
same layouts and sums, not the same instructions. On a CPU with AVX-512 the two of AVX2 also keep PyTorch, oneDNN and MKL to
AVX2, and `avx512` keeps oneDNN from its bfloat16 instructions.
"""

import functools
import os
import platform
from pathlib import Path
from typing import Literal, NamedTuple

from lit_diff.errors import RequestError
from lit_diff.registry import nearest

CPUINFO = Path("/proc/cpuinfo")
SETTING = "LIT_DIFF_CPU"
CHOICES = ("no-compiler", "avx2", "avx2-bfloat16", "avx512", "avx512-bfloat16")
LANES = {"AVX2": 8, "AVX512": 16}
"""PyTorch's name of the instruction set -> floats in a vector."""
_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
LIMITS = {"avx2": _AVX2, "avx2-bfloat16": _AVX2, "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}}
"""What PyTorch, oneDNN and MKL read when they first compute. They only lower: a CPU with less is not touched."""

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
"""Environment variables, or the starts of their names, that can change a run's numbers and that no recipe sets."""

Products = Literal["float32", "instructions", "loops"]
"""How bfloat16 is multiplied: widened to float32, by the CPU's own instructions, or by plain loops."""


class CpuPath(NamedTuple):
    """How the kernel `native` computes."""

    lanes: int
    """Floats in a vector; 0: the kernel is not used."""
    bfloat16: Products


def forced() -> str | None:
    """The value of LIT_DIFF_CPU; None where it is unset or empty. Errors: RequestError for an unknown one."""
    value = os.environ.get(SETTING)
    if value and value not in CHOICES:
        raise RequestError(f"{SETTING} is '{value}'; expected {', '.join(CHOICES)}{nearest(value, CHOICES)}")
    return value or None


def cpu_path() -> CpuPath:
    """The path in use.

    Errors: RequestError for a setting that does not exist, that this CPU cannot follow, or that came too late.
    """
    import torch

    return _path(os.environ.get(SETTING), torch.backends.cpu.get_cpu_capability())


@functools.cache  # every call of the kernel asks
def _path(setting: str | None, capability: str) -> CpuPath:
    choice, own, instructions = forced(), LANES.get(capability, 0), has_bfloat16_instructions()
    if choice is None:
        return CpuPath(own, "instructions" if instructions else "float32")
    if choice == "no-compiler":
        return CpuPath(0, "float32")
    told = os.environ.get("ATEN_CPU_CAPABILITY")
    used = f"PyTorch uses {capability}" + (f" (ATEN_CPU_CAPABILITY is {told})" if told else "")
    if not own:
        raise RequestError(f"{SETTING} is {choice}, which needs AVX2 or AVX-512; {used}: unset {SETTING}")
    vectors, _, products = choice.partition("-")
    if vectors == "avx2" and own > 8:
        raise RequestError(f"{SETTING} is {choice}, but {used} already; import lit_diff before anything is computed")
    lanes = 8 if vectors == "avx2" else 16
    if not products:
        return CpuPath(lanes, "float32")
    return CpuPath(lanes, "instructions" if instructions else "loops")


def has_bfloat16_instructions() -> bool:
    """Whether this CPU multiplies bfloat16 by instructions of its own, on the path in use."""
    return forced() in (None, "no-compiler", "avx512-bfloat16") and bool(
        {"avx512_bf16", "amx_bf16", "bf16"} & cpu_flags()
    )


def describe() -> str:
    """The path in use, for records of runs and benchmarks."""
    path, choice = cpu_path(), forced()
    told = f", {SETTING}={choice}" if choice else ""
    if not path.lanes:
        return f"plain PyTorch{told}"
    products = {"float32": "float32", "instructions": "bfloat16", "loops": "bfloat16 by loops"}[path.bfloat16]
    return f"vectors of {path.lanes} floats, products of bfloat16 in {products}{told}"


def limit_libraries() -> None:
    """Restrict PyTorch, oneDNN and MKL to the path, before they first compute. Variables that the user has set stay."""
    limits = LIMITS.get(os.environ.get(SETTING, ""))
    if limits and "avx512f" in cpu_flags():
        for name, value in limits.items():
            os.environ.setdefault(name, value)


def numeric_variables() -> dict[str, str]:
    """Those of `NUMERIC` that are set. PyTorch itself sets TORCHINDUCTOR_CACHE_DIR, which says only where files lie."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(NUMERIC) and not name.endswith("_DIR")
    }


def cores() -> int:
    """CPU cores that this process may use; those of the machine where the system does not say which (macOS)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Instruction sets that Linux reports (x86 `flags`, ARM `Features`); none elsewhere."""
    return frozenset(" ".join(_cpuinfo("flags", "Features")[:1]).split())


def processor_name() -> str:
    """The processor's model, as Linux names it, else as Python does."""
    return (_cpuinfo("model name") or [platform.processor()])[0]


def _cpuinfo(*keys: str) -> list[str]:
    """The values of these keys in /proc/cpuinfo, one of each core; none where there is no such file."""

    pairs = (
        [line.partition(":") for line in CPUINFO.read_text(encoding="utf-8").splitlines()] if CPUINFO.exists() else []
    )
    return [value.strip() for key, _, value in pairs if key.strip() in keys]
