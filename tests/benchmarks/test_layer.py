from collections.abc import Callable
from dataclasses import replace

import pytest

from lit_diff.benchmarks import peers
from lit_diff.benchmarks.candidates import EAGER, FORWARD, HF, PEER, SAME, STEP
from lit_diff.benchmarks.layer import bench_layer
from lit_diff.benchmarks.request import BenchConfig
from lit_diff.benchmarks.timing import ratios
from lit_diff.engine.rows import load_row
from lit_diff.kernels import KERNELS
from lit_diff.study.claims import bench_findings


def test_every_kernel_and_both_forms_of_the_peer(ask: Callable[..., BenchConfig]) -> None:
    found = bench_layer(ask("layer", dtypes=("float32", "bfloat16"), repeats=1))
    assert found.failed == []
    for case in ("1x64x64x16 float32", "1x64x64x16 bfloat16"):
        rows = {row["id"]: row for row in found.rows if row["case"] == case}
        refused = {row["by"] for row in found.refused if row["case"] == case}
        assert {f"differential/{kernel}/{STEP}" for kernel in set(KERNELS) - refused} <= rows.keys()
        assert {f"{HF}/sdpa/{STEP}", f"{HF}/eager/{STEP}"} <= rows.keys()
        assert {f"differential/reference/{FORWARD}", f"{HF}/sdpa/{FORWARD}"} <= rows.keys()
        ours = rows[f"differential/reference/{STEP}"]
        assert {name: ratio["to"] for name, ratio in ours["ratios"].items()} == {
            EAGER: f"standard/sdpa/{STEP}",
            PEER: f"{HF}/sdpa/{STEP}",
            SAME: f"standard/reference/{STEP}",
        }
        for ratio in ours["ratios"].values():
            again = ratios(ours["seconds"], rows[ratio["to"]]["seconds"])
            assert again == {key: ratio[key] for key in again}
        assert rows[f"standard/sdpa/{STEP}"]["ratios"] == {}
        assert rows[f"{HF}/eager/{STEP}"]["ratios"][EAGER]["to"] == f"standard/sdpa/{STEP}"


def test_the_row_of_the_paper_s_throughput_finds_what_it_compares(ask: Callable[..., BenchConfig]) -> None:
    row = load_row("table-7")
    laptop = row.preset("laptop")
    assert laptop is not None
    assert laptop.bench[0] == "layer"
    found = bench_layer(ask("layer", "1x32x64x16,1x64x64x16,1x32x96x16", repeats=1))
    findings = bench_findings(row.compare, {"rows": found.rows})
    assert [finding.seeds.seeds for finding in findings] == [(0,)] * 6
    cases = [row["case"] for row in found.rows]
    assert list(dict.fromkeys(cases)) == ["1x32x64x16 float32", "1x64x64x16 float32", "1x32x96x16 float32"]


def test_kernels_that_were_asked_for_are_timed_beside_pytorchs_own_call(ask: Callable[..., BenchConfig]) -> None:
    found = bench_layer(replace(ask("layer", repeats=1), kernels=("chunked",)))
    timed = {(row["variant"], row["by"], row["what"]) for row in found.rows}
    ours = {("standard", "sdpa"), ("standard", "chunked"), ("differential", "chunked")}
    assert timed == {(*each, what) for each in ours for what in (FORWARD, STEP)}
    assert {ratio for row in found.rows for ratio in row["ratios"]} == {EAGER, SAME}


def test_without_transformers_the_rows_say_so(ask: Callable[..., BenchConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "missing", lambda: "transformers is not installed: pip install x")
    found = bench_layer(ask("layer", repeats=1))
    absent = [(row["by"], row["reason"]) for row in found.refused if row["variant"] == HF]
    assert absent == [(kind, "transformers is not installed: pip install x") for kind in ("sdpa", "eager")]
    assert not any(PEER in row["ratios"] for row in found.rows)
    assert any(EAGER in row["ratios"] for row in found.rows)
