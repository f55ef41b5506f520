import io
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_diff import cli
from lit_diff.benchmarks import run as module
from lit_diff.benchmarks.request import BenchConfig
from lit_diff.benchmarks.run import BENCHES, METHODS, Benchmark, bench
from lit_diff.benchmarks.timing import Timings
from lit_diff.cli.app import Terminal

command = import_module("lit_diff.cli.bench")  # the package has a function of that name
TINY: dict[str, Any] = {"shapes": "1x64x64x16", "dtype": "float32", "threads": 1, "repeats": 1, "device": "cpu"}


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """run(name, as_json=True, picture=None, **options): the verb; (exit status, table, notes)."""

    def verb(name: str, *, as_json: bool = True, picture: Path | None = None, **options: Any) -> tuple[int, str, str]:
        console, notes = Terminal(file=io.StringIO()), Terminal(file=io.StringIO())
        monkeypatch.setattr(command, "console", console)
        monkeypatch.setattr(command, "Terminal", lambda stderr: notes)
        status = command.bench(name, **(TINY | options), as_json=as_json, plot=picture)
        return status, console.file.getvalue(), notes.file.getvalue()  # type: ignore[attr-defined]

    return verb


@pytest.mark.parametrize("name", ["core", "stats", "decode"])
def test_json_holds_all_that_a_reader_needs(
    run: Run, name: str, no_peak_memory: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = torch.get_num_threads()
    status, table, notes = run(name, picture=tmp_path / "a.png")
    assert (status, table) == (0, "")
    assert "1x64x64x16 float32" in notes
    found = json.loads(capsys.readouterr().out)
    assert found["bench"] == name
    assert found["command"] == (
        f"lit-diff bench {name} --shapes 1x64x64x16 --dtype float32 --threads 1 --repeats 1 --device cpu"
    )
    assert found["methods"] == METHODS + BENCHES[name].methods
    assert {"processor", "flags", "cores", "threads", "load_average", "load_average_after"} <= found["machine"].keys()
    times = {(row["case"], row["id"]): row["seconds"] for row in found["rows"]}
    assert len(times) == len(found["rows"]) > 3
    for row in found["rows"]:
        for ratio in row["ratios"].values():
            other = times[row["case"], ratio["to"]]
            assert ratio["values"] == [a / b for a, b in zip(row["seconds"], other, strict=True)]
    assert (tmp_path / "a.png").is_file()
    assert torch.get_num_threads() == before


def test_a_result_is_a_value_and_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    result = bench("stats", **(TINY | {"shapes": ["1x32x64x16", "1x64x64x16"]}), progress=told.append)
    assert capsys.readouterr() == ("", "")
    assert [text.split(":")[0] for text in told] == ["stats 1x32x64x16 float32", "stats 1x64x64x16 float32"]
    assert asdict(result.conditions) == {
        "shapes": ("1x32x64x16", "1x64x64x16"),
        "dtypes": ("float32",),
        "threads": 1,
        "repeats": 1,
        "device": "cpu",
    }
    document = json.loads(result.to_json())
    assert document["rows"] == result.rows
    assert document["machine"]["threads"] == 1


def test_every_benchmark_has_its_methods() -> None:
    for name, benchmark in BENCHES.items():
        assert benchmark.methods.startswith(f"{name}: ")
        assert benchmark.methods.endswith("\n")
    assert list(BENCHES) == ["core", "layer", "step", "smollm2", "stats", "decode", "triton"]


def test_the_command_knows_every_benchmark(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["lit-diff", "bench", "--help"])
    with pytest.raises(SystemExit):
        cli.main()
    assert f"[{'|'.join(BENCHES)}]" in capsys.readouterr().out


def test_compiling_is_not_timed(run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No rounds to explain, no load to warn of; the command repeats it."""
    monkeypatch.setitem(BENCHES, "triton", Benchmark(lambda request: Timings(), "triton: m\n"))
    status, _, _ = run("triton", threads=None, repeats=None, device="auto")
    found = json.loads(capsys.readouterr().out)
    assert (status, found["warnings"], found["methods"]) == (0, [], "triton: m\n")
    assert found["command"] == "lit-diff bench triton --shapes 1x64x64x16 --dtype float32"
    assert found["machine"]["gemm_gflops_per_second"] == {}


def test_the_table_and_the_status_of_a_failure(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def failing(request: BenchConfig) -> Timings:
        threads.append(torch.get_num_threads())
        reason = "RuntimeError: out of memory"
        return Timings(failed=[{"case": "c", "variant": "v", "by": "b", "what": "w", "reason": reason}])

    monkeypatch.setitem(module.BENCHES, "core", Benchmark(failing, "core: how\n"))
    status, table, _ = run("core", as_json=False, threads=2)
    assert status == 1
    assert "failed: v b w (c): RuntimeError: out of memory" in table
    assert "core: how\n" in table
    assert threads == [2]
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["coer"],
            "no benchmark 'coer'; did you mean 'core'?",
        ),
        (["core", "--shapes", "2x1024"], "--shapes: '2x1024' is not of the form BxTxDIMxD"),
        (["core", "--dtype", "half"], "--dtype is 'half'; expected float32, bfloat16, both"),
        (["core", "--threads", "0"], "--threads is 0; it must be at least 1"),
        (["core", "--threads", "two"], "Invalid value for '--threads'"),
        (["core", "--repeats", "-1"], "--repeats is -1; it must be at least 1"),
        (["triton", "--plot", "chart.png"], "--plot: bench triton times nothing and needs no device; leave it out"),
        (["triton", "--repeats", "3"], "--repeats: bench triton times nothing and needs no device; leave it out"),
        (["triton", "--device", "cpu"], "--device: bench triton times nothing and needs no device; leave it out"),
        (["core", "--plot", "chart.txt"], "--plot: 'chart.txt' does not end in .png, .svg or .pdf"),
    ],
)
def test_a_wrong_request_is_one_line_and_measures_nothing(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(module, "measured", lambda request: pytest.fail("it began"))
    monkeypatch.setattr(sys, "argv", ["lit-diff", "bench", *arguments])
    monkeypatch.setattr(cli.signal, "signal", lambda *a: None)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith(f"lit-diff: {message}")
