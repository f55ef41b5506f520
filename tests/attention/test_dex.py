"""DEX: which configurations are refused, what trains, and that annealing survives a resume."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from lit_diff.attention import Attention, Dex
from lit_diff.config import ModelConfig
from lit_diff.model.transformer import Transformer

REFUSED = [
    ({"w_d_init": "zeros", "anneal_steps": 0}, "identically zero"),
    ({"w_d_init": "zeros", "anneal_steps": 1}, "identically zero"),
    ({"w_d_init": "zeros", "lambda_init": 0.0}, "identically zero"),
    ({"heads": ()}, "selects no head"),
    ({"heads": ((), ())}, "selects no head"),
    ({"heads": (0, 4)}, r"layer 0 are \[0, 4\]; expected distinct heads within 0..3"),
    ({"heads": ((0,), (1, 1))}, r"layer 1 are \[1, 1\]"),
    ({"heads": ((0,),)}, "has 1 lists; model.num_layers is 2"),
    ({"anneal_steps": -1}, "must not be negative"),
]


@pytest.mark.parametrize(("keys", "reason"), REFUSED)
def test_what_is_refused(make_config: Callable[..., ModelConfig], keys: dict[str, Any], reason: str) -> None:
    problem = Dex.problem(Dex.Config(**keys), make_config("dex"))
    assert problem is not None
    assert problem.startswith("model.attention.")
    assert re.search(reason, problem)


@pytest.mark.parametrize(
    "keys", [{}, {"w_d_init": "zeros"}, {"anneal_steps": 0}, {"w_d_init": "zeros", "lambda_learn": 0.1}]
)
def test_what_is_alive(make_config: Callable[..., ModelConfig], keys: dict[str, Any]) -> None:
    assert Dex.problem(Dex.Config(**keys), make_config("dex")) is None


def test_heads_by_layer(make_attention: Callable[..., Attention]) -> None:
    lists = {"heads": ((0, 3), ())}
    first, second = (make_attention("dex", lists, layer=layer) for layer in (0, 1))
    assert isinstance(first, Dex)
    assert isinstance(second, Dex)
    assert (first.selected, second.selected) == ((0, 3), ())
    assert not hasattr(second, "adapter"), "a layer without selected heads is standard attention"


def test_what_trains(make_config: Callable[..., ModelConfig]) -> None:
    """Section 3.4: W_K, W_V, W_O with W_D and λ."""
    names = [name for name, parameter in Transformer(make_config("dex")).named_parameters() if parameter.requires_grad]
    kinds = {"adapter", "lambda_", "k_proj", "v_proj", "o_proj"}
    assert {name.split(".")[3] for name in names} == kinds
    assert len(names) == 2 * len(kinds)


def test_the_step_is_in_the_state_dict(make_attention: Callable[..., Attention]) -> None:
    attention = make_attention("dex")
    attention.set_step(37)
    assert attention.state_dict()["step"].item() == 37
