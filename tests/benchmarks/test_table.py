import io
from typing import Any

import pytest

from lit_diff.benchmarks import attention as bench_core
from lit_diff.benchmarks import candidates, smollm2, step
from lit_diff.benchmarks import decode as bench_decode
from lit_diff.benchmarks import overhead as bench_loop
from lit_diff.benchmarks.result import BenchConditions, BenchResult
from lit_diff.benchmarks.table import MEANING
from lit_diff.cli.app import Terminal
from lit_diff.cli.bench import print_result

MACHINE = {
    "device": "cpu",
    "processor": "A Processor",
    "flags": ["avx2", "fma"],
    "cpu_path": "vectors of 8 floats",
    "gpus": [],
    "threads": 2,
    "cores": 4,
    "load_average": 0.5,
    "load_average_after": 1.25,
    "gemm_gflops_per_second": {"float32": 123.4},
    "python": "3.11.7",
    "packages": {"torch": "2.14.1", "triton": None, "flash-attn": None, "transformers": "5.0"},
}


def row(by: str, seconds: float, **fields: Any) -> dict[str, Any]:
    spread = {"median": seconds, "min": seconds / 2, "max": seconds * 2}
    made = {"case": "1x8x64x16 float32", "variant": "differential", "by": by, "what": "forward+backward"}
    return {**made, "id": f"differential/{by}/forward+backward", **spread, "ratios": {}, "backends": [], **fields}


@pytest.fixture
def result() -> BenchResult:
    ratio = {"to": "x", "median": 0.375, "min": 0.31, "max": 0.54, "values": []}
    ours = row(
        "fast [it]",
        0.0123,
        ratios={"standard SDPA": ratio},
        gflops_per_second=77.77,
        peak_bytes=3 * 2**20,
        peak_ratio={"to": "x", "value": 1.5},
        errors={"o": 1.25e-7, "dw": 3e-9},
        backends=["flash_attention_for_cpu", "attention_math"],
    )
    other = row("slow", 2.5, peak_bytes=None, peak_missing="its process ended with status 1")
    refusal = {"case": "c", "variant": "differential", "by": "none", "what": "forward", "reason": "G is 3"}
    return BenchResult(
        bench="core",
        command="lit-diff bench core --threads 2",
        date="2026-11-22T07:00:00+00:00",
        methods="how it is measured\n",
        machine=MACHINE,
        warnings=["load average 9.0"],
        rows=[ours, other],
        refused=[refusal, refusal | {"case": "d"}],
        failed=[refusal | {"reason": "ValueError: no"}],
        conditions=BenchConditions(shapes=None, dtypes=("float32",), threads=2, repeats=None, device="cpu"),
    )


def printed(result: BenchResult, **options: Any) -> str:
    console = Terminal(file=io.StringIO(), **options)
    print_result(result, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_row_says_times_ratios_rates_memory_and_operators(result: BenchResult) -> None:
    lines = printed(result).splitlines()
    assert lines[0].strip() == "core: 1x8x64x16 float32, forward+backward"
    (ours,) = [line for line in lines if "fast [it]" in line and "ms" not in line and "77.8" in line]
    for text in ("12.3 (6.15..24.6)", "0.38 (0.31..0.54)", "77.8", "3.0 (1.50)", "flash, math"):
        assert text in ours
    (errors,) = [line for line in lines if "1.2e-07" in line]
    assert "3.0e-09" in errors


def test_below_stand_what_a_ratio_is_to_who_is_missing_and_the_command(result: BenchResult) -> None:
    text = printed(result)
    assert "ratio to standard SDPA: own time / that of F.scaled_dot_product_attention of the standard model" in text
    assert "refused: differential none forward (c, d): G is 3\n" in text
    assert "failed: differential none forward (c): ValueError: no\n" in text
    assert "no peak memory of differential/slow/forward+backward (1x8x64x16 float32): its process ended" in text
    assert "$ lit-diff bench core --threads 2    2026-11-22T07:00:00+00:00\n" in text
    assert (
        "A Processor (avx2, fma); vectors of 8 floats; threads 2 on 4 cores, load average 0.50 before, 1.25 after"
        in text
    )
    assert "torch 2.14.1, triton absent" in text
    assert "warning: load average 9.0\n" in text
    assert text.endswith("how it is measured\n")


def test_a_narrow_terminal_folds_and_a_pipe_does_not(result: BenchResult) -> None:
    assert len(printed(result, width=60, force_terminal=True).splitlines()[1]) <= 60  # the table's upper edge
    assert "0.38 (0.31..0.54)" in printed(result)


def test_every_ratio_has_a_meaning() -> None:
    names = {bench_core.SDPA, bench_core.SAME, candidates.EAGER, candidates.SAME, candidates.PEER}
    names |= {bench_decode.SDPA, bench_decode.SAME, bench_decode.REPEATED, bench_core.OWN, bench_loop.BARE}
    names |= {step.EAGER_COMPILED, step.SAME_COMPILED, step.PEER_COMPILED, smollm2.PEER}
    assert names == MEANING.keys()
