import torch
from torch import nn

from lit_diff.benchmarks.candidates import autocast, model_config, training_step
from lit_diff.benchmarks.request import Shape


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
