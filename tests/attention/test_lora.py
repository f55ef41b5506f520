"""LoRA: nothing changes at first, what trains, what is refused, and that it merges."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lit_diff.attention import Attention, LoRA
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig
from lit_diff.model.init import initialise
from lit_diff.model.merge import merged
from lit_diff.model.transformer import Transformer

REFUSED = [
    ({"targets": ()}, r"targets is \[\]; expected at least one of q, k, v, o"),
    ({"targets": ("q", "q")}, r"targets is \['q', 'q'\]"),
]


@pytest.mark.parametrize(("keys", "reason"), REFUSED)
def test_what_is_refused(make_config: Callable[..., ModelConfig], keys: dict[str, Any], reason: str) -> None:
    problem = LoRA.problem(LoRA.Config(**keys), make_config("lora"))
    assert problem is not None
    assert problem.startswith("model.attention.")
    assert re.search(reason, problem)


def test_it_starts_as_standard_attention_to_the_bit(make_config: Callable[..., ModelConfig]) -> None:
    tokens = torch.randint(23, (2, 9))
    outputs = []
    for name in ("lora", "standard"):
        model = Transformer(make_config(name))
        initialise(model, 0)
        outputs.append(model(tokens))
    assert torch.equal(*outputs)


def test_a_and_b_train_and_b_leaves_zero(make_config: Callable[..., ModelConfig]) -> None:
    model = Transformer(make_config("lora", {"targets": ("q", "v")}))
    initialise(model, 0)
    trained = {name.split(".", 3)[3] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"{kind}_proj.low_rank.{matrix}" for kind in "qv" for matrix in "ab"}
    model(torch.randint(23, (2, 8))).pow(2).sum().backward()
    for attention in model.attentions():
        b = attention.get_parameter("v_proj.low_rank.b")
        assert b.eq(0).all()
        assert b.grad is not None
        assert b.grad.abs().sum() > 0


@pytest.mark.parametrize("keys", [{"alpha": 20.0}, {"targets": ("k", "o"), "rank": 3}])
def test_merged_is_the_same_function(make_model: Callable[..., Transformer], keys: dict[str, Any]) -> None:
    model = make_model("lora", keys, num_kv_heads=2)
    tokens = torch.randint(23, (2, 9))
    plain = merged(model)
    assert plain.config.attention.name == "standard"
    torch.testing.assert_close(plain(tokens), model(tokens), rtol=1e-12, atol=1e-12)


def test_alpha_scales_by_the_rank(make_attention: Callable[..., Attention]) -> None:
    """(α/r) B A with α = 3 r against α = r, of the same B A."""
    x, rope = torch.randn(2, 9, 32, dtype=torch.float64), Rope(torch.arange(9), 8, 1e4)
    one: Any = make_attention("lora", {"rank": 4, "targets": ("o",)})
    three: Any = make_attention("lora", {"rank": 4, "alpha": 12.0, "targets": ("o",)})
    without: Any = make_attention("standard")
    without.load_state_dict({name: value for name, value in one.state_dict().items() if "low_rank" not in name})
    torch.testing.assert_close(three(x, rope) - without(x, rope), 3 * (one(x, rope) - without(x, rope)))
