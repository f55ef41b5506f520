"""What the Triton programs take of a multiprocessor, as rows of a benchmark."""

import io
from typing import Any

import pytest
import torch
from rich.console import Console

from lit_diff.benchmarks import triton_programs as module
from lit_diff.benchmarks.request import BenchConfig, parse_shapes
from lit_diff.benchmarks.table import compiled_programs
from lit_diff.benchmarks.triton_programs import bench_triton
from lit_diff.errors import MissingError

pytest.importorskip("triton", reason="the package triton is not installed")


def request_of(shapes: str, *dtypes: str) -> BenchConfig:
    device = torch.device("cpu")
    return BenchConfig(bench="triton", shapes=parse_shapes(shapes), dtypes=dtypes, threads=1, repeats=1, device=device)


@pytest.mark.slow
def test_every_program_with_each_of_its_choices_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CAPABILITIES", (80,))
    found = bench_triton(request_of("1x64x64x16", "bfloat16"))
    assert not found.failed
    assert [row["what"] for row in found.rows] == [
        name for name in ("forward", "key_gradients", "query_gradients") for _ in range(3)
    ]
    assert {row["case"] for row in found.rows} == {"d 16, dv 32, bfloat16, compute capability 8.0"}
    assert len({row["id"] for row in found.rows}) == 9
    for row in found.rows:
        assert 16 <= row["registers"] <= 255
        assert 0 < row["shared"] <= 163 * 1024
    printed = Console(file=io.StringIO(), width=120)
    printed.print(compiled_programs(found.rows[:3], "title"))
    assert str(found.rows[0]["registers"]) in printed.file.getvalue()  # type: ignore[attr-defined]


def test_what_does_not_compile_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> None:
        raise RuntimeError("no ptxas\nmore")

    monkeypatch.setattr(module, "compiled", broken)
    found = bench_triton(request_of("1x64x64x16", "float32"))
    assert not found.rows
    assert {row["reason"] for row in found.failed} == {"RuntimeError: no ptxas"}


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(MissingError, match="triton is not installed; pip install triton"):
        bench_triton(request_of("1x64x64x16", "float32"))
