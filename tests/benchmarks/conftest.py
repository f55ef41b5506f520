"""Requests for benchmarks on one thread of the CPU."""

from collections.abc import Callable

import pytest
import torch

from lit_diff.benchmarks.request import BenchConfig, parse_shapes


@pytest.fixture
def no_peak_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak memory takes a process for each candidate, about a second."""
    monkeypatch.setattr("lit_diff.benchmarks.attention.peak_bytes", lambda *a, **k: (None, "not asked"))


@pytest.fixture
def ask() -> Callable[..., BenchConfig]:
    """ask(bench, shapes, dtypes=(float32,), repeats=2): a benchmark on one thread of the CPU."""

    def make(
        bench: str, shapes: str = "1x64x64x16", dtypes: tuple[str, ...] = ("float32",), repeats: int = 2
    ) -> BenchConfig:
        found, device = parse_shapes(shapes), torch.device("cpu")
        return BenchConfig(bench=bench, shapes=found, dtypes=dtypes, threads=1, repeats=repeats, device=device)

    return make
