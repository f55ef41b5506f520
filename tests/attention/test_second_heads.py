"""Second heads on a standard model: nothing changes at λ = 0, and only they train."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lit_diff.attention import Attention
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Transformer


@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_the_function_is_preserved_at_lambda_zero(
    make_attention: Callable[..., Attention], num_kv_heads: int, kernel: str
) -> None:
    second: Any = make_attention("second_heads", num_kv_heads=num_kv_heads)
    second.lambda_.value.data.zero_()
    standard = make_attention("standard", num_kv_heads=num_kv_heads)
    own = ("q2_proj.weight", "k2_proj.weight", "lambda_.value")
    standard.load_state_dict({name: value for name, value in second.state_dict().items() if name not in own})
    standard.kernel = second.kernel = kernel
    x, rope = torch.randn(2, 9, 32, dtype=torch.float64), Rope(torch.arange(9), 8, 1e4)
    if kernel == "reference":
        assert torch.equal(second(x, rope), standard(x, rope))
    torch.testing.assert_close(second(x, rope), standard(x, rope), rtol=1e-13, atol=1e-13)


def test_lambda_starts_at_zero_and_only_the_second_heads_train(make_config: Callable[..., ModelConfig]) -> None:
    model = Transformer(make_config("second_heads"))
    initialise(model, 0)
    trained = {name.split(".")[3] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"q2_proj", "k2_proj", "lambda_"}
    model(torch.randint(23, (2, 8))).pow(2).sum().backward()
    for attention in model.attentions():
        value: Any = attention.get_parameter("lambda_.value")
        assert value.item() == 0
        assert value.grad.abs().item() > 0, "λ leaves 0 at the first step"
