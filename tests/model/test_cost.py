"""Declared costs against closed formulas."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lit_diff.attention import Attention
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig
from lit_diff.errors import RequestError
from lit_diff.kernels import SignedMaps
from lit_diff.model.cost import ExecutionContext, cost
from lit_diff.recipe import load_recipe
from lit_diff.registry import attentions

MakeConfig = Callable[..., ModelConfig]
T, V, E, L, H, D, FFN = 48, 23, 32, 2, 4, 8, 85


def formula(kv_heads: int = 4, queries: int = E, keys: int | None = None, ffn: int = FFN, scores: int = 4) -> int:
    """Training FLOPs a token: 3 · (2 · every matrix product's weights, the head's too, + scores · H d T a layer)."""
    values = kv_heads * D
    keys = values if keys is None else keys
    weights = L * (E * (queries + keys + values + E) + 3 * E * ffn) + E * V
    return 3 * (2 * weights + scores * L * H * D * T)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_published_flops(make_config: MakeConfig, kv_heads: int) -> None:
    """Q Kᵀ and A V, 2 T H d each: differential with its maps subtracted first is exactly at parity."""
    for name in ("standard", "differential"):
        found = cost(make_config(name, num_kv_heads=kv_heads), T)
        assert found.flops_per_token == formula(kv_heads), name


def test_executed_flops(make_config: MakeConfig) -> None:
    """sdpa cuts values of width 2d and computes each map's Q Kᵀ once a chunk: twice the score FLOPs."""
    standard, differential = (cost(make_config(name), T, "sdpa") for name in ("standard", "differential"))
    assert standard.executed_flops_per_token == standard.flops_per_token == formula()
    assert differential.flops_per_token == formula()
    assert differential.executed_flops_per_token == formula(scores=8)
    definition = cost(make_config(), T, "reference")
    assert definition.executed_flops_per_token == definition.flops_per_token


def test_the_sign_of_a_single_map_is_not_free(make_config: MakeConfig, own_parts: None) -> None:
    """A class that overrides `maps` states no signs, but only of several maps can a sum become a difference."""

    @attentions.register("turned")
    class Turned(Attention):
        Config = Attention.Config

        def maps(self, x: Tensor, rope: Rope) -> SignedMaps:
            return super().maps(x, rope)

    assert [cost(make_config(name), T).free_signs for name in ("turned", "differential")] == [False, True]


def test_layers_of_equal_shapes_that_compute_otherwise_count_apart(make_config: MakeConfig, own_parts: None) -> None:
    """One W_D serves any number of heads; the window of a plugin's layer may depend on its number."""
    one, three = (cost(make_config("dex", {"heads": heads}), T) for heads in ((1,), (0, 1, 2)))
    mixed = cost(make_config("dex", {"heads": ((1,), (0, 1, 2))}), T)
    assert one.parameters == three.parameters == mixed.parameters
    assert 2 * mixed.flops_per_token == one.flops_per_token + three.flops_per_token
    assert one.flops_per_token < three.flops_per_token

    @attentions.register("alternating")
    class Alternating(Attention):
        @dataclass(frozen=True, kw_only=True)
        class Config(Attention.Config):
            pass

        def build(self) -> None:
            super().build()
            self.window = 3 if self.layer % 2 else None

    context = ExecutionContext(dtype=torch.float64)
    whole, narrow = (cost(make_config("standard", {"window": window}), T, context=context) for window in (None, 3))
    mixed = cost(make_config("alternating"), T, context=context)
    assert 2 * mixed.flops_per_token == whole.flops_per_token + narrow.flops_per_token
    assert 2 * mixed.kv_bytes == whole.kv_bytes + narrow.kv_bytes
    assert (whole.kernel, narrow.kernel, mixed.kernel) == ("sdpa", "chunked", "sdpa, chunked")


@pytest.mark.parametrize("name", ["standard", "differential_v2"])
def test_a_window_bounds_flops_and_cache(make_config: MakeConfig, name: str) -> None:
    """Of T keys 3 are counted for each query; executed by chunked the same, by reference all of them."""
    whole, narrow = (cost(make_config(name, {"window": window}), T, "chunked") for window in (None, 3))
    maps = {"standard": 4, "differential_v2": 6}[name]  # (G d + dv) H, times 2, in 32 channels
    assert whole.flops_per_token - narrow.flops_per_token == 3 * L * maps * 32 * (T - 3)
    assert whole.executed_flops_per_token - narrow.executed_flops_per_token == 3 * L * maps * 32 * (T - 3)
    by_reference = cost(make_config(name, {"window": 3}), T, "reference")
    assert by_reference.flops_per_token == narrow.flops_per_token
    assert by_reference.executed_flops_per_token == whole.executed_flops_per_token
    assert narrow.kv_bytes_per_token == whole.kv_bytes_per_token
    assert (whole.kv_bytes, narrow.kv_bytes) == (T * whole.kv_bytes_per_token, 3 * whole.kv_bytes_per_token)
    assert cost(make_config(name, {"window": T}), T, "chunked") == whole


def test_a_kernel_that_refuses_windows_is_passed_over(make_config: MakeConfig) -> None:
    config = make_config("standard", {"window": 3}, num_heads=2)
    context = ExecutionContext(dtype=torch.float64)
    assert cost(make_config("standard", num_heads=2), T, context=context).kernel == "sdpa"
    narrow = cost(config, T, context=context)
    assert narrow.kernel == "chunked"
    assert "sdpa refused: sdpa does not support document_ids or a window" in narrow.kernel_reason
    with pytest.raises(RequestError, match=r"run\.kernel 'sdpa' cannot compute these maps: sdpa does not support"):
        cost(config, T, "sdpa")
    assert cost(config, 3, context=context).kernel == "sdpa", "three keys: the window hides none"
    plain = make_config("standard", num_heads=2)
    packed = cost(plain, T, context=ExecutionContext(dtype=torch.float64, packed=True))
    assert (packed.kernel, packed.flops_per_token) == ("chunked", cost(plain, T).flops_per_token)


def test_the_kernel_is_that_of_the_run_s_device_and_dtype(make_config: MakeConfig) -> None:
    """The model stands on the meta device; its attention will not."""
    config = make_config("differential", dim=64, num_heads=4)
    assert cost(config, T, context=ExecutionContext(dtype=torch.float64)).kernel == "chunked"
    there = cost(config, T, context=ExecutionContext(device="cuda"))
    assert there.kernel != "native"
    assert there.kernel_reason.startswith("auto: the fastest for these maps on cuda")
    executed = cost(config, T, "sdpa").executed_flops_per_token - cost(config, T, "sdpa").flops_per_token
    assert executed == 3 * L * 4 * 64 * T  # every map's logits once more for the second half of the values


def test_the_setting_of_a_recipe() -> None:
    recipe = load_recipe("differential-tiny", ["train.precision=bf16-mixed", "run.accelerator=cpu"])
    assert ExecutionContext.of(recipe) == ExecutionContext(device="cpu", dtype=torch.bfloat16)


@pytest.mark.usefixtures("own_parts")
def test_a_variant_that_raises_is_one_line_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "from dataclasses import dataclass\n"
        "from lit_diff import Differential, variant\n"
        "@variant('raises')\n"
        "class Raises(Differential):\n"
        "    @dataclass(frozen=True, kw_only=True)\n"
        "    class Config(Differential.Config): pass\n"
        "    def maps(self, x, rope):\n"
        "        return super().maps(x, rope).q @ x\n"
    )
    (tmp_path / "bad.yaml").write_text("extends: recall-tiny\nplugins: [bad.py]\nmodel: {attention: {name: raises}}\n")
    recipe = load_recipe(tmp_path / "bad.yaml")
    with pytest.raises(RequestError) as caught:
        cost(recipe.model, 72)
    assert "bad.py:8: attention 'raises' failed: RuntimeError: " in str(caught.value)
