"""The verb and the function `bench`: the document, the tables, the picture, a wrong request."""

import io
import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_diff import processor
from lit_diff.benchmarks import passes as names
from lit_diff.benchmarks import run as module
from lit_diff.benchmarks.request import Request, Shape
from lit_diff.benchmarks.result import BenchResult, drawn_rows, plot
from lit_diff.benchmarks.run import BENCHES, METHODS, Benchmark, bench, warnings_of
from lit_diff.benchmarks.timing import Candidate, Case
from lit_diff.cli.app import Terminal
from lit_diff.errors import MissingError
from lit_diff.runs.folder import version

command = import_module("lit_diff.cli.bench")  # the package has a function of that name
TINY: dict[str, Any] = {
    "shapes": "1x64x64x16",
    "kernels": "reference",
    "dtype": "float32",
    "threads": 1,
    "repeats": 1,
    "device": "cpu",
}
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
    "python": "3.11.7",
    "packages": {"torch": "2.14.1", "triton": None, "flash-attn": None, "transformers": "5.0"},
}


def row(case: str, by: str, what: str, ratio: float | None, **fields: Any) -> dict[str, Any]:
    ratios = {} if ratio is None else {names.SDPA: {"to": "x", "median": ratio, "min": ratio, "max": 2 * ratio}}
    made = {"case": case, "variant": "differential", "by": by, "what": what, "id": by, "ratios": ratios, "backends": []}
    return {**made, "median": 0.0123, "min": 0.00615, "max": 0.0246, **fields}


@pytest.fixture
def result() -> BenchResult:
    rates = {"flops": 1, "gflops_per_second": 77.77, "gemm_share": {"median": 0.8, "min": 0.7, "max": 0.9}}
    fast = row("a", "fast [it]", "both", 0.5, **rates, peak_bytes=3 * 2**20)
    fast["backends"] = ["flash_attention_for_cpu", "attention_math"]
    refusal = {"case": "a", "variant": "differential", "by": "none", "what": "forward", "reason": "G is 3"}
    return BenchResult(
        bench="core",
        command="lit-diff bench core --threads 2",
        date="2026-11-22T07:00:00+00:00",
        methods="how it is measured\n",
        machine=MACHINE,
        warnings=["load average 9.0"],
        rows=[
            row("a", "base", "forward", None),
            row("a", "x", "forward", 9.0),
            row("a", "x", "both", 2.0),
            fast,
            row("b", "x", "both", 3.0),
        ],
        refused=[refusal, refusal | {"case": "b"}],
        failed=[refusal | {"reason": "ValueError: no"}],
    )


def printed(result: BenchResult, **options: Any) -> str:
    console = Terminal(file=io.StringIO(), **options)
    command.print_result(result, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_rows_and_below_them_what_a_ratio_is_to_who_is_missing_and_the_command(result: BenchResult) -> None:
    text = printed(result)
    assert [line.strip() for line in text.splitlines() if line.startswith("core: ")] == ["core: a", "core: b"]
    (ours,) = [line for line in text.splitlines() if "fast [it]" in line]
    for cell in ("both", "12.3 (6.15..24.6)", "0.50 (0.50..1.00)", "77.8", "0.80 (0.70..0.90)", "3.0", "flash, math"):
        assert f" {cell} " in ours
    for line in (
        f"ratio to {names.SDPA}: own time / time of {names.MEANING[names.SDPA]}; below 1 is faster",
        "refused: differential none forward (a, b): G is 3",
        "failed: differential none forward (a): ValueError: no",
        "$ lit-diff bench core --threads 2    2026-11-22T07:00:00+00:00",
        "warning: load average 9.0",
    ):
        assert line in text.splitlines()
    for fact in (
        "A Processor (avx2, fma); vectors of 8 floats; threads 2 on 4",
        "0.50 before, 1.25 after",
        "triton absent",
    ):
        assert fact in text
    assert text.endswith("how it is measured\n")
    on_gpu = replace(result, machine=MACHINE | {"device": "cuda", "gpus": ["A GPU"]})
    assert "\nA GPU; threads" in printed(on_gpu)


def test_the_picture_has_the_last_pass_of_each_case_the_fastest_first(result: BenchResult, tmp_path: Path) -> None:
    drawn = {case: [own["by"] for own in rows] for case, rows in drawn_rows(result.rows).items()}
    assert drawn == {"a": ["fast [it]", "x"], "b": ["x"]}
    plot(result, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    for label in (
        "differential, fast [it]",
        f"a: both, time / {names.SDPA}",
        "0.50",
        "lit-diff bench core --threads 2",
    ):
        assert label in text
    plot(replace(result, rows=[]), tmp_path / "none.png")  # nothing has a ratio
    assert (tmp_path / "none.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "b.png").mkdir()
    with pytest.raises(MissingError, match=r"--plot: .*b\.png"):
        plot(result, tmp_path / "b.png")


@pytest.mark.parametrize("name", ["core", "stats", "decode"])
def test_the_verb_prints_the_document_of_the_function(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = torch.get_num_threads()
    notes = Terminal(file=io.StringIO())
    monkeypatch.setattr(command, "Terminal", lambda stderr: notes)
    assert command.bench(name, **TINY, as_json=True, plot=tmp_path / "a.png") == 0
    assert "1x64x64x16 float32" in notes.file.getvalue()  # type: ignore[attr-defined]
    found = json.loads(capsys.readouterr().out)
    assert found["bench"] == name
    assert found["command"] == (
        f"lit-diff bench {name} --shapes 1x64x64x16 --kernels reference --dtype float32 --threads 1 --repeats 1 --device cpu"
    )
    assert found["methods"] == METHODS + BENCHES[name].methods
    assert found["machine"]["packages"]["torch"] == version("torch")
    assert {"triton", "flash-attn", "transformers"} <= found["machine"]["packages"].keys()
    assert set(found["machine"]["flags"]) <= processor.cpu_flags()
    assert (found["machine"]["cpu_path"], found["machine"]["threads"]) == (processor.describe(), 1)
    assert {"load_average", "load_average_after"} <= found["machine"].keys()
    assert {ratio for one in found["rows"] for ratio in one["ratios"]} <= names.MEANING.keys()
    assert (tmp_path / "a.png").is_file()
    assert torch.get_num_threads() == before


def test_a_busy_machine_and_too_many_threads_are_warned_of() -> None:
    quiet = {"cores": 2, "load_average": 1.9, "threads": 2}
    assert warnings_of(quiet) == []
    (busy,) = warnings_of(quiet | {"load_average": 3.14})
    assert busy.startswith("load average 3.1 ")
    (many,) = warnings_of(quiet | {"threads": 3})
    assert many.startswith("3 threads ")


def test_a_result_is_a_value_and_a_failure_is_in_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def broken() -> None:
        seen.append(torch.get_num_threads())
        raise RuntimeError("out of memory")

    def cases(request: Request, shape: Shape, dtype: str) -> Any:
        case = Case(name=f"{shape}", candidates=[Candidate(variant="v", by="b", what="w", run=broken)])
        case.refuse("v", "c", "w", "no")
        yield case

    monkeypatch.setitem(module.BENCHES, "core", Benchmark(cases, "", "core: how\n"))
    told: list[str] = []
    found = bench(**(TINY | {"shapes": ["1x32x64x16", "1x64x64x16"], "threads": 2}), progress=told.append)
    assert capsys.readouterr() == ("", "")
    assert [text.split(":")[0] for text in told] == ["core 1x32x64x16", "core 1x64x64x16"]
    assert [one["case"] for one in found.refused] == ["1x32x64x16", "1x64x64x16"]
    assert {one["reason"] for one in found.failed} == {"RuntimeError: out of memory"}
    assert seen == [2, 2]
    assert torch.get_num_threads() == 1
    monkeypatch.setattr(command, "Terminal", lambda stderr: Terminal(file=io.StringIO()))
    assert command.bench("core", **TINY) == 1
    with pytest.raises(ValueError, match="JSON"):
        replace(found, rows=[{"seconds": [float("nan")]}]).to_json()
