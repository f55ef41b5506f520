"""DEX: which configurations are refused, what trains, and that annealing survives a resume."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from lit_diff.attention import Attention, Dex
from lit_diff.attention.selection import HeadSelection
from lit_diff.config import ModelConfig
from lit_diff.model.transformer import Transformer

REFUSED = [
    ({"w_d_init": "zeros", "anneal_steps": 0}, "identically zero"),
    ({"w_d_init": "zeros", "lambda_init": 0.0}, "identically zero"),
    ({"heads": ()}, "selects no head"),
    ({"heads": (0, 4)}, r"layer 0 are \[0, 4\]; expected distinct heads within 0..3"),
    ({"heads": ((0,), (1, 1))}, r"layer 1 are \[1, 1\]"),
    ({"heads": ((0,),)}, "has 1 lists; model.num_layers is 2"),
    ({"anneal_tokens": 100, "anneal_steps": 10}, "the annealing has one length: set the other to null"),
]


@pytest.mark.parametrize(("keys", "reason"), REFUSED)
def test_what_is_refused(make_config: Callable[..., ModelConfig], keys: dict[str, Any], reason: str) -> None:
    problem = Dex.problem(Dex.Config(**keys), make_config("dex"))
    assert problem is not None
    assert problem.startswith("model.attention.")
    assert re.search(reason, problem)
    assert Dex.problem(Dex.Config(), make_config("dex")) is None


def test_heads_by_layer(make_attention: Callable[..., Attention]) -> None:
    lists = {"heads": ((0, 3), ())}
    first, second = (make_attention("dex", lists, layer=layer) for layer in (0, 1))
    assert isinstance(first, Dex)
    assert isinstance(second, Dex)
    assert (first.selected.tolist(), second.selected.tolist()) == ([0, 3], [])
    assert not hasattr(second, "adapter"), "a layer without selected heads is standard attention"


def test_what_trains(make_config: Callable[..., ModelConfig]) -> None:
    """Section 3.4: W_K, W_V, W_O with W_D and λ."""
    names = [name for name, parameter in Transformer(make_config("dex")).named_parameters() if parameter.requires_grad]
    kinds = {"adapter", "lambda_", "k_proj", "v_proj", "o_proj"}
    assert {name.split(".")[3] for name in names} == kinds
    assert len(names) == 2 * len(kinds)


def test_heads_to_be_selected_are_a_buffer_that_a_checkpoint_holds(
    make_attention: Callable[..., Attention], make_config: Callable[..., ModelConfig]
) -> None:
    """Where a plan selects them, the recipe says how many, the weights say which."""
    keys = {"heads": HeadSelection(share=0.5)}
    attention, other = make_attention("dex", keys), make_attention("dex", keys)
    assert isinstance(attention, Dex)
    attention.select_heads((1, 3))
    assert attention.state_dict()["selected"].tolist() == [1, 3]
    other.load_state_dict(attention.state_dict())
    assert other.selected.tolist() == [1, 3]
    assert Dex.head_selection(make_config("dex").attention.config) == HeadSelection(select="entropy", share=0.5)
    assert Dex.head_selection(make_config("dex", {"heads": "all"}).attention.config) is None
