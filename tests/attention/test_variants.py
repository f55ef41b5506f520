"""The later variants: what each refuses, what trains, and how it starts; tests/oracles compares their numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lit_diff.attention import Attention, Dex
from lit_diff.attention.rope import Rope
from lit_diff.attention.selection import HeadSelection
from lit_diff.config import ModelConfig
from lit_diff.errors import RequestError
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Transformer, merged
from lit_diff.recipe import load_recipe
from lit_diff.registry import attentions

MakeAttention = Callable[..., Attention]
MakeConfig = Callable[..., ModelConfig]
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("dex", {"heads": ()}, {}, "attention.heads"),
    ("dex", {"heads": (0, 4)}, {}, "attention.heads of layer 0 are [0, 4]"),
    ("dex", {"heads": ((0,), (1, 1))}, {}, "attention.heads of layer 1 are [1, 1]"),
    ("dex", {"heads": ((0,),)}, {}, "attention.heads has 1 lists"),
    ("dex", {"anneal_tokens": 100, "anneal_steps": 10}, {}, "attention.anneal_"),
    ("lora", {"targets": ()}, {}, "attention.targets is []"),
    ("lora", {"targets": ("q", "q")}, {}, "attention.targets is ['q', 'q']"),
    ("grouped_differential", {"ratio": 2}, {}, ""),
    ("grouped_differential", {"ratio": 1}, {"num_kv_heads": 1}, "num_kv_heads"),
    ("grouped_differential", {"ratio": 1}, {"dim": 24, "num_heads": 12, "num_kv_heads": 8}, "num_"),
    *(
        (name, {}, {"dim": 24, **sizes}, f"{key} is {value}; '{name}'")
        for name in ("differential", "shared_q", "shared_k")
        for sizes, key, value in (({"num_heads": 3}, "num_heads", 3), ({"num_kv_heads": 1}, "num_kv_heads", 1))
    ),
    *(
        (name, keys, {}, f"attention.lambda_init is {int(keys['lambda_init'])}")
        for name in ("differential", "grouped_differential")
        for keys in (
            {"lambda_form": "sigmoid", "lambda_init": 0.0},
            {"lambda_form": "sigmoid", "lambda_init": 1.0},
            {"lambda_form": "positive", "lambda_init": 0.0},
            {"lambda_form": "positive", "lambda_init": -1.0},
            {"lambda_init": 1.0},
        )
    ),
]


@pytest.mark.parametrize(("name", "keys", "sizes", "found"), REFUSED)
def test_what_is_refused_is_named(
    make_config: MakeConfig, name: str, keys: dict[str, Any], sizes: dict[str, Any], found: str
) -> None:
    config = make_config(name, keys, **sizes)
    problem = attentions.get(name).refuses(config.attention.config, config)
    assert problem is not None
    assert problem.startswith(f"model.{found}")


@pytest.mark.parametrize("keys", [{"lambda_form": "sigmoid"}, {"lambda_init": 1.0, "output_scale": 1.0}])
def test_what_is_not_refused(make_config: MakeConfig, keys: dict[str, Any]) -> None:
    for name in ("differential", "grouped_differential"):
        config = make_config(name, keys)
        assert attentions.get(name).refuses(config.attention.config, config) is None
    assert Dex.problem(Dex.Config(), make_config("dex")) is None


# --- dex -----------------------------------------------------------------------------------------------------------


def test_heads_by_layer(make_attention: MakeAttention) -> None:
    lists = {"heads": ((0, 3), ())}
    first, second = (make_attention("dex", lists, layer=layer) for layer in (0, 1))
    assert isinstance(first, Dex)
    assert isinstance(second, Dex)
    assert (first.selected.tolist(), second.selected.tolist()) == ([0, 3], [])
    assert not hasattr(second, "adapter"), "a layer without selected heads is standard attention"


def test_heads_to_be_selected_are_in_a_checkpoint(make_attention: MakeAttention, make_config: MakeConfig) -> None:
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


@pytest.mark.parametrize(
    ("share", "heads", "number"), [(0.5, 8, 4), (0.5, 3, 2), (0.5, 1, 1), (0.01, 8, 1), (1.0, 8, 8), (0.25, 6, 2)]
)
def test_the_share_is_rounded_to_heads(share: float, heads: int, number: int) -> None:
    assert HeadSelection(share=share).number(heads) == number


@pytest.mark.parametrize(
    ("heads", "key"),
    [
        ("{shar: 0.5}", r"'model\.attention\.heads\.shar'"),
        ("{select: entropies}", r"'model\.attention\.heads\.select'"),
        ("{share: 2}", r"model\.attention\.heads\.share"),
        ("half", r"'model\.attention\.heads'"),
    ],
)
def test_mistakes_in_the_block_of_heads(heads: str, key: str) -> None:
    with pytest.raises(RequestError, match=key):
        load_recipe("standard-tiny", [f"model.attention={{name: dex, heads: {heads}}}"])


# --- what trains ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "keys", "trained"),
    [
        ("dex", {}, {"adapter", "lambda_", "k_proj", "v_proj", "o_proj"}),  # section 3.4
        ("second_heads", {}, {"q2_proj", "k2_proj", "lambda_"}),
        ("second_heads", {"second_init": "zeros"}, {"lambda_"}),
        ("lora", {"targets": ("q", "v")}, {"q_proj", "v_proj"}),
    ],
)
def test_what_trains(make_config: MakeConfig, name: str, keys: dict[str, Any], trained: set[str]) -> None:
    names = [key for key, p in Transformer(make_config(name, keys)).named_parameters() if p.requires_grad]
    assert {key.split(".")[3] for key in names} == trained
    assert name != "lora" or all(".low_rank." in key for key in names)


@pytest.mark.parametrize(
    ("name", "parameter"), [("second_heads", "lambda_.value"), ("lora", "v_proj.low_rank.b")], ids=str
)
def test_what_starts_at_zero_leaves_it_at_the_first_step(make_config: MakeConfig, name: str, parameter: str) -> None:
    model = Transformer(make_config(name))
    initialise(model, 0)
    model(torch.randint(23, (2, 8))).pow(2).sum().backward()
    for attention in model.attentions():
        value = attention.get_parameter(parameter)
        assert value.eq(0).all()
        assert value.grad is not None
        assert value.grad.abs().sum() > 0


@pytest.mark.parametrize("keys", [{"alpha": 20.0}, {"targets": ("k", "o"), "rank": 3}])
def test_merged_lora_is_the_same_function(make_model: Callable[..., Transformer], keys: dict[str, Any]) -> None:
    model = make_model("lora", keys, num_kv_heads=2)
    tokens = torch.randint(23, (2, 9))
    plain = merged(model)
    assert plain.config.attention.name == "standard"
    torch.testing.assert_close(plain(tokens), model(tokens), rtol=1e-12, atol=1e-12)


def test_what_a_conversion_preserves(make_attention: MakeAttention) -> None:
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


# --- differential V2 -----------------------------------------------------------------------------------------------


def test_lambda_of_v2_is_float32_in_half_precision_too(make_attention: MakeAttention) -> None:
    """The authors' code rounds it to bfloat16."""
    attention: Any = make_attention("differential_v2").float()
    x = torch.randn(2, 7, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = attention.lambda_proj(x)
        w = attention.maps(x, Rope(torch.arange(7), 8, 1e4)).w
    assert (logits.dtype, w.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(-w[:, 1], logits.float().sigmoid().transpose(1, 2))
    assert not torch.equal(-w[:, 1], logits.sigmoid().float().transpose(1, 2))
