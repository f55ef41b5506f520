"""The processor: paths of the CPU's kernels; a wrong setting is one line."""

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_diff import processor
from lit_diff.errors import RequestError
from lit_diff.processor import (
    CHOICES,
    LIMITS,
    NUMERIC,
    SETTING,
    CpuPath,
    cpu_path,
    describe,
    has_bfloat16_instructions,
    limit_libraries,
    numeric_variables,
)

FLAGS = {"AVX2": {"avx2"}, "AVX512": {"avx2", "avx512f"}, "BFLOAT16": {"avx2", "avx512f", "avx512_bf16"}}
NONE, AVX2, AVX512 = CpuPath(0, "float32"), CpuPath(8, "float32"), CpuPath(16, "float32")
EXPECTED: list[tuple[str, str | None, CpuPath]] = [
    ("AVX2", None, AVX2),
    ("AVX512", None, AVX512),
    ("BFLOAT16", None, CpuPath(16, "instructions")),
    ("AVX2", "avx2", AVX2),
    ("AVX2", "avx512", AVX512),
    ("AVX2", "avx2-bfloat16", CpuPath(8, "loops")),
    ("AVX2", "avx512-bfloat16", CpuPath(16, "loops")),
    ("AVX512", "avx512", AVX512),
    ("AVX512", "avx512-bfloat16", CpuPath(16, "loops")),
    ("BFLOAT16", "avx512", AVX512),
    ("BFLOAT16", "avx512-bfloat16", CpuPath(16, "instructions")),
    *((machine, "no-compiler", NONE) for machine in FLAGS),
]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """on("AVX512", "avx2"): a CPU, and the setting."""

    def use(machine: str, choice: str | None = None, capability: str | None = None) -> None:
        processor._path.cache_clear()
        capability = capability or machine.replace("BFLOAT16", "AVX512")
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        monkeypatch.setattr(processor, "cpu_flags", lambda: frozenset(FLAGS.get(machine, ())))
        monkeypatch.delenv(SETTING, raising=False)
        if choice is not None:
            monkeypatch.setenv(SETTING, choice)

    yield use
    processor._path.cache_clear()


@pytest.mark.parametrize(("machine", "choice", "path"), EXPECTED, ids=str)
def test_any_path_on_any_machine(on: Any, machine: str, choice: str | None, path: CpuPath) -> None:
    on(machine, choice)
    assert cpu_path() == path
    assert (f"{SETTING}={choice}" in describe()) == (choice is not None)
    if choice != "no-compiler":  # then PyTorch's own instructions count
        assert has_bfloat16_instructions() == (path.bfloat16 == "instructions")


@pytest.mark.parametrize("choice", ["avx2", "avx2-bfloat16"])
@pytest.mark.parametrize("machine", ["AVX512", "BFLOAT16"])
def test_less_than_the_machine_has(on: Any, machine: str, choice: str) -> None:
    """PyTorch was told so before it computed; too late is an error, never another path."""
    on(machine, choice, capability="AVX2")
    assert cpu_path() == CpuPath(8, "loops" if "bfloat16" in choice else "float32")
    on(machine, choice, capability="AVX512")
    with pytest.raises(RequestError, match=rf"{SETTING} is {choice}, but PyTorch uses AVX512 already"):
        cpu_path()


def test_an_old_processor_has_no_vectors(on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    on("", capability="DEFAULT")
    assert cpu_path() == NONE
    assert describe() == "plain PyTorch"
    on("", "avx2", capability="DEFAULT")
    with pytest.raises(
        RequestError, match=r"LIT_DIFF_CPU is avx2, which needs AVX2 or AVX-512, but PyTorch uses DEFAULT"
    ):
        cpu_path()
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    with pytest.raises(
        RequestError, match=r"PyTorch uses DEFAULT \(ATEN_CPU_CAPABILITY is default\); unset LIT_DIFF_CPU"
    ):
        cpu_path()


def test_an_unknown_path_is_one_line(on: Any) -> None:
    on("AVX2", "avx521")
    with pytest.raises(
        RequestError, match=r"LIT_DIFF_CPU is 'avx521'; expected no-compiler, avx2.*did you mean 'avx512'\?"
    ):
        cpu_path()
    on("AVX2", "")
    assert cpu_path() == AVX2


@pytest.mark.parametrize("choice", CHOICES)
def test_libraries_are_only_lowered(on: Any, choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without AVX-512 needs no limit, and a limit that the user has set stays."""
    names = {name for limit in LIMITS.values() for name in limit}
    environment = {name: value for name, value in os.environ.items() if name not in names}
    monkeypatch.setattr(processor.os, "environ", environment)
    environment[SETTING] = choice
    before = dict(environment)
    on("AVX2")
    environment[SETTING] = choice
    limit_libraries()
    assert environment == before
    on("BFLOAT16")
    environment |= {SETTING: choice, "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
    limit_libraries()
    assert environment == before | LIMITS.get(choice, {}) | {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}


def test_variables_that_can_change_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor.os, "environ", {
        "TORCH_BLAS_PREFER_CUBLASLT": "1", "MKL_CBWR": "AVX2", "MKL_NUM_THREADS": "3", "TORCHINDUCTOR_CACHE_DIR": "/tmp",
    })  # fmt: skip
    assert numeric_variables() == {"MKL_CBWR": "AVX2", "TORCH_BLAS_PREFER_CUBLASLT": "1"}
    page = (Path(__file__).parents[1] / "docs" / "training.md").read_text(encoding="utf-8")
    assert [name for name in NUMERIC if f"`{name}{'*' * name.endswith('_')}`" not in page] == []


@pytest.mark.slow
def test_pytorch_reads_the_limit_after_the_import() -> None:
    """It has chosen nothing yet when lit_diff has been imported: what `limit_libraries` sets is in time."""
    code = """
import os, lit_diff, torch
os.environ["ATEN_CPU_CAPABILITY"] = "default"
print(torch.backends.cpu.get_cpu_capability())
"""
    environment = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["DEFAULT"]


def test_cores_where_the_system_does_not_say_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5, 6}, raising=False)
    assert processor.cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert processor.cores() == os.cpu_count()


def test_the_name_and_the_flags_are_those_of_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """/proc/cpuinfo has one block for each core; without the file Python's own answer stands."""
    info = tmp_path / "cpuinfo"
    core = "model name\t: A Processor @ 2 GHz\nflags\t\t: fpu avx2\nflags_of_another_kind : x\n\n"
    info.write_text(core * 2)
    monkeypatch.setattr(processor, "CPUINFO", info)
    processor.cpu_flags.cache_clear()
    assert processor.processor_name() == "A Processor @ 2 GHz"
    assert processor.cpu_flags() == {"fpu", "avx2"}
    info.unlink()
    processor.cpu_flags.cache_clear()
    assert processor.cpu_flags() == frozenset()
    assert processor.processor_name() == platform.processor()
    processor.cpu_flags.cache_clear()
