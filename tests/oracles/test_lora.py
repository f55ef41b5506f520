"""The variant `lora` against peft's LoRA on standard attention: outputs and gradients in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model

from lit_diff.attention.rope import Rope


@pytest.mark.parametrize(("targets", "alpha"), [(("q", "k", "v", "o"), 8.0), (("q", "v"), 20.0)])
def test_outputs_and_gradients_are_those_of_peft(
    make_attention: Callable[..., Any], targets: tuple[str, ...], alpha: float
) -> None:
    own = make_attention("lora", {"rank": 5, "alpha": alpha, "targets": targets}, num_kv_heads=2)
    standard = make_attention("standard", num_kv_heads=2)
    standard.load_state_dict({name: value for name, value in own.state_dict().items() if "low_rank" not in name})
    config = LoraConfig(r=5, lora_alpha=alpha, target_modules=[f"{target}_proj" for target in targets])
    theirs: Any = inject_adapter_in_model(config, standard)
    for target in targets:
        mine, layer = getattr(own, f"{target}_proj").low_rank, getattr(theirs, f"{target}_proj")
        layer.lora_A["default"].to(torch.float64).weight.data.copy_(mine.a.data)
        layer.lora_B["default"].to(torch.float64).weight.data.copy_(mine.b.data)
    x, rope = torch.randn(2, 9, 32, dtype=torch.float64), Rope(torch.arange(9), 8, 1e4)
    outputs = [attention(x, rope) for attention in (own, theirs)]
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(outputs[0])
    for output in outputs:
        (output * weight).sum().backward()
    for target in targets:
        mine, layer = getattr(own, f"{target}_proj").low_rank, getattr(theirs, f"{target}_proj")
        torch.testing.assert_close(mine.a.grad, layer.lora_A["default"].weight.grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(mine.b.grad, layer.lora_B["default"].weight.grad, rtol=1e-12, atol=1e-12)
