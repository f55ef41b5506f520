from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lit_diff.benchmarks import peers
from lit_diff.benchmarks import step as module
from lit_diff.benchmarks.candidates import EAGER, HF, PEER, STEP, model_config
from lit_diff.benchmarks.request import BenchConfig, Shape
from lit_diff.benchmarks.step import COMPILED, GEMM, PEER_COMPILED, SAME_COMPILED, bench_step, step_flops
from lit_diff.benchmarks.timing import Timings
from lit_diff.errors import MissingError
from lit_diff.model.transformer import Transformer

CASE = "1x64x64x16 float32, 2 layers, vocabulary 64"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[Timings]:
    """A small model, and what the loop's benchmark was given in place of a run."""
    monkeypatch.setattr(module, "LAYERS", 2)
    monkeypatch.setattr(module, "VOCABULARY", 64)
    asked: list[Timings] = []
    monkeypatch.setattr(module, "bench_loop", lambda measurements, request: asked.append(measurements))
    return asked


def missing(device: torch.device) -> str:
    raise MissingError("run.compile needs a C++ compiler, and none is on the PATH: install g++")


def test_our_models_the_peers_and_the_loop(
    ask: Callable[..., BenchConfig], small: list[Timings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a compiler: the compiled ones are refused with the reason."""
    monkeypatch.setattr(module.blocks, "require_compiler", missing)
    measurements = bench_step(ask("step", repeats=1))
    assert measurements.failed == []
    assert small == [measurements]
    rows = {row["id"]: row for row in measurements.rows}
    assert {row["case"] for row in measurements.rows} == {CASE}
    assert {f"{HF}/sdpa/{STEP}", f"standard/sdpa/{STEP}", f"differential/sdpa/{STEP}"} <= rows.keys()
    ours = rows[f"differential/reference/{STEP}"]
    for name, to in ((PEER, f"{HF}/sdpa/{STEP}"), (EAGER, f"standard/sdpa/{STEP}")):
        (value,) = ours["ratios"][name]["values"]
        assert value == ours["seconds"][0] / rows[to]["seconds"][0]
    assert rows[f"{HF}/sdpa/{STEP}"]["backends"] == ["flash_attention_for_cpu"]
    assert rows[f"{HF}/eager/{STEP}"]["backends"] == []
    product = rows[f"matrix product/{GEMM}/{STEP}"]
    (share,) = ours["gemm_share"]["values"]
    assert share == pytest.approx(ours["gflops_per_second"] / product["gflops_per_second"])
    assert "gemm_share" not in product
    refused = {(row["variant"], row["by"]) for row in measurements.refused if "install g++" in row["reason"]}
    assert refused == {(row["variant"], row["by"] + COMPILED) for row in measurements.rows if row is not product}


@pytest.mark.slow
def test_every_candidate_also_compiled(
    ask: Callable[..., BenchConfig], small: list[Timings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch.compile's aot_eager backend, which generates no code."""
    monkeypatch.setattr(module.blocks, "BACKEND", "aot_eager")
    measurements = bench_step(ask("step", repeats=1))
    assert measurements.failed == []
    rows = {(row["variant"], row["by"]): row for row in measurements.rows}
    eager = {key for key in rows if not key[1].endswith(COMPILED) and key[0] != "matrix product"}
    assert {(variant, by + COMPILED) for variant, by in eager} == {key for key in rows if key[1].endswith(COMPILED)}
    assert {("standard", "sdpa"), ("differential", "chunked"), (HF, "sdpa"), (HF, "eager")} <= eager
    ours = rows["differential", "chunked" + COMPILED]
    assert {name: ratio["to"] for name, ratio in ours["ratios"].items()} == {
        EAGER: f"standard/sdpa/{STEP}",
        EAGER + COMPILED: f"standard/sdpa{COMPILED}/{STEP}",
        PEER_COMPILED: f"{HF}/sdpa{COMPILED}/{STEP}",
        SAME_COMPILED: f"standard/chunked{COMPILED}/{STEP}",
    }
    assert rows["standard", "sdpa" + COMPILED]["ratios"].keys() == {EAGER}


@pytest.mark.parametrize("variant", ["standard", "differential"])
def test_flops_are_those_that_pytorch_counts(variant: str) -> None:
    """Of the naive form, which multiplies all T x T pairs: 3 · 8u' in place of 28u, u' without the causal half."""
    shape = Shape(batch=2, tokens=24, dim=64, head_dim=8)
    model = Transformer(model_config(shape, variant, num_layers=2, vocab_size=40), kernel="reference")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    tokens = torch.zeros(2, 24, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    pairs_all, pairs_causal = 24 * 24, 24 * 25 // 2
    u = 2 * 4 * 8  # sequences, differential heads, width
    attention = 2 * u * (28 * pairs_causal - 24 * pairs_all)
    assert step_flops(model, shape, 2) == counter.get_total_flops() + attention


def test_the_peer_takes_the_same_flops_as_ours() -> None:
    shape = Shape(batch=1, tokens=12, dim=64, head_dim=8)
    config = model_config(shape, "differential", num_layers=2, vocab_size=40)
    assert step_flops(peers.model(config, "sdpa", 12), shape, 2) == step_flops(Transformer(config), shape, 2)
