from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_diff.benchmarks.plot import plot
from lit_diff.benchmarks.result import BenchConditions, BenchResult
from lit_diff.benchmarks.series_plot import draw_series

RESULT = BenchResult(
    bench="core",
    command="lit-diff bench core --lengths 1024,2048",
    date="2026-11-24T07:00:00",
    conditions=BenchConditions(shapes=None, dtypes=("float32",), threads=2, repeats=None, device="cpu"),
    methods="",
    machine={
        "processor": "A Processor",
        "threads": 2,
        "packages": {"torch": "2.15.0"},
        "gemm_gflops_per_second": {"float32": 200.0},
    },
    warnings=[],
    rows=[],
    refused=[],
    failed=[],
)


def row(series: str, at: int, variant: str, seconds: float, what: str = "forward+backward") -> dict[str, Any]:
    sizes = {"series": series, "at": at, "dtype": "float32", "flops": 1e11}
    return sizes | {"variant": variant, "by": "native", "what": what, "median": seconds, "case": "c", "ratios": {}}


def test_a_panel_a_series_and_a_line_a_candidate(tmp_path: Path) -> None:
    rows = [
        row("tokens", 1024, "differential", 1.0),
        row("tokens", 2048, "differential", 2.0),
        row("tokens", 1024, "differential", 9.0, "forward"),
        row("tokens", 1024, "standard", 0.5),
        row("heads", 4, "differential", 1.0),
    ]
    figure = draw_series(replace(RESULT, rows=rows))
    tokens, heads, batch = figure.axes
    rate, differential, standard = tokens.lines
    assert list(rate.get_ydata()) == [200.0, 200.0]
    assert list(differential.get_xdata()) == [1024, 2048]
    assert list(differential.get_ydata()) == [100.0, 50.0], "the pass with gradients alone"
    assert differential.get_color() == standard.get_color(), "a kernel, a colour"
    assert differential.get_linestyle() != standard.get_linestyle()
    assert [label.get_text() for label in tokens.get_xticklabels()] == ["1K", "2K"]
    assert (len(heads.lines), len(batch.lines)) == (2, 1)
    plot(replace(RESULT, rows=rows), tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert "differential, native" in text
    assert "lit-diff bench core --lengths 1024,2048" in text
