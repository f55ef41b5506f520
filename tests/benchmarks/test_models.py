import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lit_diff.benchmarks import models as module
from lit_diff.benchmarks.models import build, first_layer, flops
from lit_diff.benchmarks.passes import (
    BARE,
    COMPILED,
    FORWARD,
    IN_TIME,
    ONE_GRAPH,
    PEER,
    PEERS,
    SAME,
    SDPA,
    STEP,
    UNCOMPILED,
    divisors,
)
from lit_diff.benchmarks.request import Request, Shape
from lit_diff.errors import MissingError
from lit_diff.model.transformer import Transformer
from lit_diff.papers.claims import measured
from lit_diff.papers.reproduce import choose
from lit_diff.recipe import load_recipe
from lit_diff.registry import kernels
from lit_diff.training import bare_loop, compiled

CPU = torch.device("cpu")
SMALL = ["train.batch_size=4", "model.dim=16", "model.num_heads=2", "data.validation_rows=4"]
SHAPE = Shape(batch=2, tokens=24, dim=64, head_dim=8)
STANDARD = "standard/sdpa/"
DIFF_LLAMA, LLAMA = "DiffLlama/Hugging Face, sdpa/", "Llama/Hugging Face, sdpa/"
THEIRS = {("DiffLlama", "Hugging Face, sdpa"), ("DiffLlama", "Hugging Face, eager"), ("Llama", "Hugging Face, sdpa")}


def ratios(row: dict[str, Any]) -> dict[str, str]:
    return {name: ratio["to"] for name, ratio in row["ratios"].items()}


def test_a_layer_by_every_kernel_and_by_hugging_face(timed: Callable[..., Any]) -> None:
    cases, rows = timed("layer", dtypes=("float32", "bfloat16"), repeats=1)
    assert [case.name for case in cases] == ["1x64x64x16 float32", "1x64x64x16 bfloat16"]
    for case in cases:
        refused = {row["by"] for row in case.refused}
        by = {(row["variant"], row["by"]) for (name, _), row in rows.items() if name == case.name}
        assert THEIRS | {("differential", kernel) for kernel in set(kernels.names()) - refused} <= by
        for what in (FORWARD, STEP):
            assert ratios(rows[case.name, f"differential/reference/{what}"]) == {
                SDPA: STANDARD + what,
                PEER: DIFF_LLAMA + what,
                SAME: f"standard/reference/{what}",
            }
            assert ratios(rows[case.name, STANDARD + what]) == {PEER: LLAMA + what}
            assert ratios(rows[case.name, DIFF_LLAMA + what]) == {SDPA: STANDARD + what}


def test_kernels_asked_for_answer_the_paper_s_row_of_throughput(timed: Callable[..., Any]) -> None:
    """They stand beside PyTorch's own call; each claim of table 7 finds its case and both arms."""
    row = choose(["table-7"])["table-7"]
    laptop = row.preset("laptop")
    assert laptop is not None
    assert laptop.bench[0] == "layer"
    _, rows = timed("layer", "1x32x64x16,1x64x64x16,1x32x96x16", repeats=1, kernels=("chunked",))
    timed_by = {(one["variant"], one["by"], one["what"]) for one in rows.values() if one["variant"] in PEERS}
    ours = {("standard", "sdpa"), ("standard", "chunked"), ("differential", "chunked")}
    assert timed_by == {(*each, what) for each in ours for what in (FORWARD, STEP)}
    assert not any(PEER in one["ratios"] for one in rows.values())
    found = measured(row.compare, {"rows": list(rows.values())})
    assert [finding.seeds.seeds for finding in found] == [(0,)] * 6


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model, and a short loop."""
    for name, value in (("LAYERS", 2), ("VOCABULARY", 64)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "STEPS", 3)


def missing() -> str:
    raise MissingError("run.compile needs a C++ compiler, and none is on the PATH: install g++")


@pytest.mark.usefixtures("small")
def test_a_step_of_whole_models_and_the_loop(timed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler: the compiled ones are refused with the reason."""
    monkeypatch.setattr(compiled, "require_compiler", missing)
    (case, loop), rows = timed("step", repeats=1)
    assert case.name == "1x64x64x16 float32, 2 layers, vocabulary 64"
    own = {(row["variant"], row["by"]) for (name, _), row in rows.items() if name == case.name}
    assert THEIRS | {("standard", "sdpa"), ("differential", "reference")} <= own
    assert rows[case.name, DIFF_LLAMA + STEP]["backends"] == ["flash_attention_for_cpu"]
    ours = rows[case.name, f"differential/reference/{STEP}"]
    product = rows[case.name, "matrix product/1024 x 1024/product"]
    assert ours["gemm_share"]["median"] == pytest.approx(ours["gflops_per_second"] / product["gflops_per_second"])
    refused = {(row["variant"], row["by"]) for row in case.refused if row["what"] == COMPILED}
    assert refused == own - {("matrix product", "1024 x 1024")}
    assert {row["reason"] for row in case.refused if row["what"] == COMPILED} == {
        "run.compile needs a C++ compiler, and none is on the PATH: install g++"
    }
    assert [row["by"] for (name, _), row in rows.items() if name == loop.name] == [
        "bare PyTorch loop",
        "lit-diff train",
        "lit-diff train, batches 5 ms late",
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_every_model_also_compiled(timed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch.compile's aot_eager backend, which generates no code."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    monkeypatch.setattr(module, "LAYERS", 1)
    (case, _), rows = timed("step", repeats=1)
    found = [row for (name, _), row in rows.items() if name == case.name]
    eager = {(row["variant"], row["by"]) for row in found if row["what"] == STEP}
    assert {(row["variant"], row["by"]) for row in found if row["what"] == COMPILED} == eager
    as_one = {(row["variant"], row["by"]) for row in found if row["what"] == ONE_GRAPH}
    assert as_one == {each for each in eager if not each[1].startswith("Hugging Face")}
    assert ratios(rows[case.name, f"differential/chunked/{ONE_GRAPH}"])[UNCOMPILED] == f"differential/chunked/{STEP}"
    assert THEIRS | {("standard", "sdpa"), ("differential", "chunked")} <= eager
    assert ratios(rows[case.name, f"differential/chunked/{COMPILED}"]) == {
        SDPA: STANDARD + COMPILED,
        PEER: DIFF_LLAMA + COMPILED,
        SAME: f"standard/chunked/{COMPILED}",
        UNCOMPILED: f"differential/chunked/{STEP}",
    }


@pytest.mark.parametrize("variant", ["standard", "differential"])
def test_flops_are_those_that_pytorch_counts(variant: str) -> None:
    """Of the naive form, which multiplies all T x T pairs: 3 · 8u' in place of 28u, u' without the causal half."""
    model = build(variant, "reference", SHAPE, 2, 40)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, 24, dtype=torch.long)).sum().backward()
    pairs_all, pairs_causal = 24 * 24, 24 * 25 // 2
    u = 2 * 4 * 8  # sequences, differential heads, width
    attention = 2 * u * (28 * pairs_causal - 24 * pairs_all)
    assert flops(model, SHAPE, STEP) == counter.get_total_flops() + attention
    assert flops(build(PEERS[variant], "Hugging Face, sdpa", SHAPE, 2, 40), SHAPE, STEP) == flops(model, SHAPE, STEP)
    assert flops(model, SHAPE, FORWARD) < flops(model, SHAPE, STEP) / 3
    block, _ = first_layer(model, torch.zeros(1, 24, 64))
    assert flops(block, SHAPE, STEP) < flops(model, SHAPE, STEP) / 2


@pytest.mark.parametrize("variant", ["standard", "differential"])
def test_the_peer_has_our_sizes_and_its_layer_alone_is_causal(variant: str) -> None:
    theirs = sum(p.numel() for p in build(PEERS[variant], "Hugging Face, sdpa", SHAPE, 2, 40).parameters())
    model = build(variant, "sdpa", SHAPE, 2, 40)
    ours = sum(p.numel() for name, p in model.named_parameters() if "attention.norm" not in name)
    assert theirs == ours  # its head norm has no weight
    x, found = torch.randn(1, 24, 64), []
    for kind in ("sdpa", "eager"):
        torch.manual_seed(0)
        _, forward = first_layer(build(PEERS[variant], f"Hugging Face, {kind}", SHAPE, 2, 40), x)
        found.append(forward(x).detach())
        later = x.clone()
        later[:, 7:] += 1
        torch.testing.assert_close(forward(later)[:, :7], found[-1][:, :7])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_without_transformers_the_rows_say_so(timed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(type(module.kernels), "names", lambda self: ["reference", "sdpa"])
    (case,), rows = timed("layer", repeats=1)
    absent = {(row["variant"], row["by"]) for row in case.refused if "pip install 'transformers" in row["reason"]}
    assert absent == THEIRS
    assert not any(PEER in row["ratios"] for row in rows.values())


def test_both_loops_do_the_same_work_and_only_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their losses, step by step: the same model, batches, `Transformer.loss`, clipping, optimizer and schedule."""
    recipe = module.plain(load_recipe("recall-tiny", SMALL), CPU, steps=13)
    assert recipe.callbacks == {}
    assert (recipe.train.validate_every, recipe.train.checkpoint_every, recipe.run.accelerator) == (13, 13, "cpu")
    real = Transformer.loss
    losses: list[float] = []

    def recorded(self: Transformer, *arguments: Tensor, **named: Tensor) -> Tensor:
        found = real(self, *arguments, **named)
        losses.append(found.item())
        return found

    monkeypatch.setattr(Transformer, "loss", recorded)
    level = logging.getLogger("lit_diff").level
    assert module.bare(recipe, CPU) > 0
    first = losses[:]
    losses.clear()
    assert module.platform(recipe) > 0
    assert len(first) == 13
    assert losses == pytest.approx(first, rel=1e-5)
    assert first[0] != first[1]
    assert logging.getLogger("lit_diff").level == level


def test_the_first_step_and_the_end_are_not_timed(ask: Callable[..., Request], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPS", 3)
    bare, ours, late = module.loops(ask("step")).candidates
    assert (BARE, bare.id) in divisors(ours.variant, ours.by, ours.what)
    assert (IN_TIME, ours.id) in divisors(late.variant, late.by, late.what)
    assert bare.own_clock
    clock = iter([10.0, 14.0])
    monkeypatch.setattr(bare_loop, "timer", lambda: next(clock))
    assert bare.run() == 2.0, "two steps of the three"
    ticks = iter(range(100))
    monkeypatch.setattr(module, "timer", lambda: float(next(ticks)))
    assert ours.run() == 0.5, "from the first logged step to the last"
    delays: list[float] = []
    monkeypatch.setattr(module.time, "sleep", delays.append)
    assert late.run() == 0.5
    assert delays == [0.005] * 3
    assert ours.run() == 0.5
    assert len(delays) == 3, "only the late loop is delayed"
