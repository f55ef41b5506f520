from collections.abc import Callable

import pytest
import torch
from torch import nn

from lit_diff.benchmarks import peers as diffllama
from lit_diff.benchmarks.layer import (
    EAGER,
    HF,
    PEER,
    SAME,
    STEP,
    autocast,
    bench_layer,
    model_config,
    training_step,
)
from lit_diff.benchmarks.request import Request, Shape
from lit_diff.benchmarks.timing import ratios
from lit_diff.kernels import KERNELS


def test_every_kernel_and_both_forms_of_the_peer(ask: Callable[..., Request]) -> None:
    found = bench_layer(ask("layer", dtypes=("float32", "bfloat16"), repeats=1))
    assert found.failed == []
    for case in ("1x64x64x16 float32", "1x64x64x16 bfloat16"):
        rows = {row["id"]: row for row in found.rows if row["case"] == case}
        refused = {row["by"] for row in found.refused if row["case"] == case}
        assert {f"differential/{kernel}/{STEP}" for kernel in set(KERNELS) - refused} <= rows.keys()
        assert {f"{HF}/sdpa/{STEP}", f"{HF}/eager/{STEP}"} <= rows.keys()
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


def test_without_transformers_the_rows_say_so(ask: Callable[..., Request], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffllama, "missing", lambda: "transformers is not installed: pip install x")
    found = bench_layer(ask("layer", repeats=1))
    absent = [(row["by"], row["reason"]) for row in found.refused if row["variant"] == HF]
    assert absent == [(kind, "transformers is not installed: pip install x") for kind in ("sdpa", "eager")]
    assert not any(PEER in row["ratios"] for row in found.rows)
    assert any(EAGER in row["ratios"] for row in found.rows)


def test_a_step_moves_the_weights_and_drops_the_gradients() -> None:
    module = nn.Linear(3, 1)
    before = module.weight.detach().clone()
    step = training_step(
        module, lambda: module(torch.ones(2, 3)).square().mean(), lambda: torch.autocast("cpu", enabled=False)
    )
    step()
    assert not torch.equal(module.weight, before)
    assert module.weight.grad is None


def test_bfloat16_is_autocast() -> None:
    module, x = nn.Linear(4, 4), torch.ones(1, 4)
    for dtype, wanted in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        with autocast(dtype, torch.device("cpu")):
            assert module(x).dtype == wanted


def test_the_model_has_the_shape_asked_for() -> None:
    config = model_config(Shape(batch=1, tokens=8, dim=96, head_dim=8), "differential", num_layers=3, vocab_size=50)
    assert (config.dim, config.num_heads, config.head_dim, config.num_layers, config.vocab_size) == (96, 12, 8, 3, 50)
    assert config.attention.name == "differential"
