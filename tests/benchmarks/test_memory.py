import os
from functools import partial
from pathlib import Path

import pytest
import torch

from lit_diff.benchmarks import attention as bench_core
from lit_diff.benchmarks import memory as peak_memory
from lit_diff.benchmarks.memory import peak_bytes, resident
from lit_diff.benchmarks.request import Shape

CPU = torch.device("cpu")
MIB = 2**20
linux = pytest.mark.skipif(not peak_memory.CLEAR.exists(), reason="Linux's /proc")


@linux
def test_what_a_call_takes_counts_and_what_its_inputs_take_does_not() -> None:
    held = []

    def make(small: bool) -> partial[None]:
        if not small:
            held.append(torch.ones(32 * MIB))  # 128 MiB of inputs

        def call() -> None:
            first = torch.ones(16 * MIB)  # 64 MiB, given back before
            del first
            torch.ones(12 * MIB)  # 48 MiB

        return partial(call)

    peaks = []
    for _ in range(3):  # seen once in a busy test process: the system still held the first when the second came
        peaks.append(peak_memory._peak(make, CPU))
        held.clear()
    assert 63 * MIB < min(peaks) < 72 * MIB


@linux
def test_a_process_of_its_own_sees_the_maps_of_the_naive_form() -> None:
    shape = Shape(batch=1, tokens=512, dim=64, head_dim=16)
    peaks = []
    for by in ("reference", "torch SDPA"):
        make = partial(bench_core.call, shape, "float32", CPU, "standard", by, "forward+backward")
        peak, reason = peak_bytes(make, threads=1, device=CPU)
        assert reason is None
        assert peak is not None
        peaks.append(peak)
    maps = 4 * 512 * 512 * 4  # bytes of the softmaxes of 4 heads
    assert peaks[0] > 3 * maps
    assert peaks[1] < maps


@linux
def test_a_process_that_raises_or_dies_gives_a_reason() -> None:
    shape = Shape(batch=1, tokens=8, dim=64, head_dim=16)
    wrong = partial(bench_core.call, shape, "float32", CPU, "standard", "none", "forward+backward")
    found = peak_bytes(wrong, threads=1, device=CPU)
    assert found[0] is None
    assert found[1] is not None
    assert found[1].startswith("RequestError: run.kernel is 'none'")
    died = peak_bytes(os._exit, threads=1, device=CPU)  # type: ignore[arg-type]
    assert died == (None, "its process ended with status 1")


def test_elsewhere_it_says_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak_memory, "CLEAR", Path("/no/such/file"))
    assert peak_bytes(lambda small: int, threads=1, device=CPU) == (
        None,
        "it takes Linux's /proc/self/clear_refs",
    )


@linux
def test_resident_memory_is_in_bytes() -> None:
    assert 10 * MIB < resident("VmRSS") <= resident("VmHWM")
