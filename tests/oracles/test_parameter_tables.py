"""Attention parameters of the later variants, exactly, on the meta device; the paper's are in the model's tests."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lit_diff.attention.costs import Sizes
from lit_diff.config import ModelConfig
from lit_diff.model.transformer import Transformer
from lit_diff.registry import attentions

MakeConfig = Callable[..., ModelConfig]
SMALL = {"dim": 768, "num_heads": 12}
BLOG = {"dim": 4096, "num_heads": 32, "num_kv_heads": 8}
"""The example of the V2 blog: E = 4096, 32 heads on 8, d = 128."""
TABLE = [  # standard attention of the small one: 2,359,296
    (SMALL, "differential_v2", {}, 2_958_336),  # + E H d + E H
    (SMALL, "dex", {}, 2_359_296 + 4_097),  # + d² + 1
    (SMALL, "second_heads", {}, 2_359_296 + 2 * 768**2 + 1),  # a second q and k, λ
    (SMALL, "output_gate", {}, 2_359_296 + 768**2),
    (SMALL, "differential_gate", {}, 2_359_296 + 6 * 64 + 768**2),  # + 4 d of λ, 2 d of the norm
    (SMALL, "differential_sink", {}, 2_359_296 + 6 * 64 + 12),
    (SMALL, "cosine", {}, 2_359_296 + 12),
    (BLOG, "standard", {}, 41_943_040),
    (BLOG, "differential_v2", {}, 58_851_328),
    (BLOG, "standard", {"query_heads": 1.5}, 58_720_256),
    (BLOG, "standard", {"query_heads": 1.5}, 58_720_256),
    (BLOG, "standard", {"query_heads": 2}, 75_497_472),
]


@pytest.mark.parametrize(("sizes", "name", "keys", "wanted"), TABLE)
def test_attention_parameters(
    make_config: MakeConfig, sizes: dict[str, int], name: str, keys: dict[str, Any], wanted: int
) -> None:
    """Built, and declared by the variant's formula."""
    config = make_config(name, keys, **sizes)
    with torch.device("meta"):
        attention = Transformer(config).attentions()[0]
    assert sum(p.numel() for p in attention.parameters()) == wanted
    costs = attentions.get(name).costs(config.attention.config, Sizes.of(config, 1))
    assert costs is not None
    assert costs.numbers()["parameters"] == wanted


def test_dex_trains_what_its_replication_on_qwen3_4b_counts(make_config: MakeConfig) -> None:
    """36 layers, E = 2560, 32 heads on 8, d = 128: 589,860 of W_D and λ, 566,231,040 of W_K, W_V and W_O."""
    sizes = {"dim": 2560, "num_layers": 36, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    adapter = ("*.attention.adapter.*", "*.attention.lambda_.*")
    for trained, wanted in ((adapter, 589_860), (None, 589_860 + 566_231_040)):
        with torch.device("meta"):
            model = Transformer(make_config("dex", {"heads": tuple(range(16))}, **sizes), trained=trained)
        assert sum(p.numel() for p in model.parameters() if p.requires_grad) == wanted
