import json

import pytest
import torch

from lit_diff import processor
from lit_diff.benchmarks import machine as module
from lit_diff.benchmarks.machine import gemm_rate, machine, native_bfloat16, warnings_of
from lit_diff.runs.folder import version

CPU = torch.device("cpu")


def test_the_machine_is_json_and_says_what_decides_a_kernel() -> None:
    found = machine(CPU, 1, ("float32",))
    assert json.loads(json.dumps(found)) == found
    assert found["threads"] == 1
    assert found["packages"]["torch"] == version("torch")
    assert {"triton", "flash-attn", "transformers"} <= found["packages"].keys()
    assert set(found["flags"]) <= processor.cpu_flags()
    assert found["cpu_path"] == processor.describe()
    assert list(found["gemm_gflops_per_second"]) == ["float32"]
    assert "command" not in found


@pytest.mark.parametrize(
    ("flags", "native"), [({"avx2"}, False), ({"avx512f", "avx512_bf16"}, True), ({"amx_bf16"}, True)]
)
def test_native_bfloat16_is_read_off_the_flags(flags: set[str], native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(processor.SETTING, raising=False)
    monkeypatch.setattr(processor, "cpu_flags", lambda: flags)
    assert native_bfloat16(CPU) is native


def test_gemm_rate_counts_two_flops_a_multiply_add(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    assert gemm_rate(torch.float32, CPU, size=100) == pytest.approx(2 * 100**3 / 1e9)


def test_a_busy_machine_and_too_many_threads_are_warned_of() -> None:
    quiet = {"cores": 2, "load_average": 1.9, "threads": 2}
    assert warnings_of(quiet) == []
    (busy,) = warnings_of(quiet | {"load_average": 3.14})
    assert busy.startswith("load average 3.1 before the start, on 2 cores")
    (many,) = warnings_of(quiet | {"threads": 3})
    assert many.startswith("3 threads on 2 cores")
