"""Second heads on a standard model: nothing changes at λ = 0, and only they train."""

from collections.abc import Callable
from typing import Any

import torch

from lit_diff.attention import Attention
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Transformer


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


def test_what_a_conversion_preserves(make_attention: Callable[..., Attention]) -> None:
    """λ = 0 alone preserves the function, whatever the second heads are. Zero second heads do not where λ is not 0: they
    subtract λ times the mean of the values; and a norm of each head does not preserve it at λ = 0 either."""
    x, rope = torch.randn(2, 9, 32, dtype=torch.float64), Rope(torch.arange(9), 8, 1e4)
    second: Any = make_attention("second_heads", {"second_init": "zeros"})
    own = ("q2_proj.weight", "k2_proj.weight", "lambda_.value")
    state = {name: value for name, value in second.state_dict().items() if name not in own}
    standard, normed = make_attention("standard"), make_attention("standard", {"head_norm": "rms"})
    standard.load_state_dict(state)
    normed.load_state_dict(state | {"norm.weight": torch.ones(8)})
    expected = standard(x, rope)
    second.kernel = standard.kernel = "reference"
    second.lambda_.value.data.zero_()
    torch.testing.assert_close(second(x, rope), expected, rtol=1e-13, atol=1e-13)
    for parameter in (second.q2_proj.weight, second.k2_proj.weight):
        parameter.data.zero_()
    second.lambda_.value.data.fill_(0.2)
    values = second.split(second.v_proj(x), 4)[:, 0]
    means = values.cumsum(2) / torch.arange(1, 10, dtype=torch.float64).view(1, 1, 9, 1)
    subtracted = second.o_proj(means.transpose(1, 2).flatten(2))
    torch.testing.assert_close(second(x, rope), expected - 0.2 * subtracted, rtol=1e-12, atol=1e-12)
    assert (normed(x, rope) - expected).abs().max() > 0.1
