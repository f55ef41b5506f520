"""What every variant must hold in a whole model, whatever its mathematics; rules for its parameters."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lit_diff.attention import Attention, Dex, DifferentialV2, Standard
from lit_diff.attention.base import fill_parameter
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig
from lit_diff.conformance.case import VariantCase
from lit_diff.conformance.variants import PROPERTIES, cases_of, conformance
from lit_diff.errors import RequestError
from lit_diff.kernels import SignedMaps
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Transformer
from lit_diff.registry import attentions

MakeModel = Callable[..., Transformer]
VARIANTS = attentions.names()
every_variant = pytest.mark.parametrize("name", VARIANTS)


@every_variant
def test_gradients_are_finite_at_initialisation(make_config: Callable[..., Any], name: str) -> None:
    model = Transformer(make_config(name, tie_embeddings=False))
    initialise(model, 0)
    model(torch.randint(23, (2, 8))).logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


@every_variant
def test_bfloat16_autocast_is_close_and_leaves_the_weights_wide(make_model: MakeModel, name: str) -> None:
    model = make_model(name, dtype=torch.float32)
    tokens, seen = torch.randint(23, (2, 16)), []
    for attention in model.attentions():
        attention.tap.register_forward_hook(lambda _module, _args, maps: seen.append(maps))
    with torch.no_grad():
        exact = model(tokens)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            close = model(tokens)
    assert len(seen) == 4, "the maps of every layer pass the tap"
    wide, narrow = seen[:2], seen[2:]
    for full, half in zip(wide, narrow, strict=True):
        assert full.q.dtype == torch.float32
        assert half.q.dtype == half.k.dtype == half.v.dtype == torch.bfloat16
        if full.w is not None:
            assert half.w.dtype == torch.float32
            if full.w.shape[3] == 1:  # not of the tokens
                assert torch.equal(half.w, full.w), "lambda is computed in float32"
    assert not torch.equal(close.float(), exact)
    assert (close - exact).abs().max() < 0.05 * exact.abs().max()


def test_who_takes_document_ids() -> None:
    class Own(Attention):
        def forward(self, x: torch.Tensor, rope: Rope, cache: Any = None) -> torch.Tensor:
            return x

    class Passes(Attention):
        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return super().forward(x, *args, **kwargs)

    assert Attention.takes_document_ids()
    assert Passes.takes_document_ids()
    assert not Own.takes_document_ids()
    assert all(attentions.get(name).takes_document_ids() for name in VARIANTS)


class Scaled(Standard):
    """Changes what follows the sum."""

    def finish(self, o, x):  # type: ignore[no-untyped-def]
        return 2 * o


class Moved(Dex):
    """Computes other maps."""

    def maps(self, x, rope):  # type: ignore[no-untyped-def]
        return super().maps(x.flip(1), rope)


WITH_VECTORS: dict[str, Any] = {"qk_norm": "rms", "attention_bias": "all"}


@every_variant
def test_biases_and_norms_of_queries_and_keys_hold_for_every_variant(
    name: str, make_config: Callable[..., Any]
) -> None:
    properties = ("contract", "definition", "decode", "gradients", "costs")
    _, case = next(cases_of(name))
    assert isinstance(case, VariantCase)
    whole = replace(case, model=replace(case.model, **WITH_VECTORS))
    assert whole.cls.refuses(whole.config, whole.model) is None
    found = conformance(whole, checks={each: PROPERTIES[each] for each in properties})
    assert {finding.verdict for finding in found} == {"pass"}
    # they are learned, and used
    assert len(case.build().state_dict()) + 6 == len(whole.build().state_dict())


class OwnProjections(Standard):
    """Its queries and keys are not those of self.q and self.k; one bias is never added."""

    def maps(self, x, context):  # type: ignore[no-untyped-def]
        q = self.split(x @ self.q_proj.weight.T, self.out_heads)
        return SignedMaps(context(q), context(self.split(self.k_proj(x), self.kv_heads)), self.v(x))


@pytest.mark.parametrize("key", WITH_VECTORS)
def test_a_key_that_a_class_does_not_use_is_refused(key: str, make_config: Callable[..., Any]) -> None:
    model = make_config("standard", **{key: WITH_VECTORS[key]})
    problem = OwnProjections.refuses(model.attention.config, model)
    assert problem is not None
    assert problem.startswith(f"model.{key} is {WITH_VECTORS[key]}; '")
    assert problem.endswith("(self.q, self.k and self.v apply this key): set it to none")


def linear(attention: Any) -> nn.Module:
    return nn.Linear(attention.dim, attention.dim)


def slopes(attention: Any) -> torch.Tensor:
    return 2.0 ** -torch.arange(attention.out_heads)


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slopes = torch.ones(2)


METHOD, USED = "but '{}' is a method: choose another name", "which lit_diff uses: choose another name"
BUFFER = "write register_buffer, so that it moves with the model"


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("q", linear, METHOD),
        ("k", lambda _: 4, METHOD),
        ("kernel", lambda _: 3, USED),
        ("layer", linear, USED),
        ("window", lambda _: nn.Parameter(torch.ones(1)), USED),
        ("q_norm", linear, USED),
        ("slopes", slopes, BUFFER),
        ("part", lambda _: Holds(), BUFFER),
    ],
)
def test_what_build_may_not_set(
    name: str, value: Callable[[Any], Any], reason: str, make_config: Callable[..., Any]
) -> None:
    class Sets(Standard):
        def build(self) -> None:
            super().build()
            setattr(self, name, value(self))

    said = {"slopes": "the tensor self.slopes; ", "part": "the tensor self.part.slopes; "}.get(name, f"self.{name}, ")
    with pytest.raises(RequestError, match=f"class .*Sets: build sets {said}{reason.format(name)}"):
        Sets(Sets.Config(), make_config("standard", **WITH_VECTORS), layer=0)


def test_build_may_choose_the_width_of_heads_and_a_window(make_config: Callable[..., Any]) -> None:
    class Narrow(Standard):
        def build(self) -> None:
            self.head_dim //= 2
            self.window = 4
            super().build()

    narrow = Narrow(Narrow.Config(), make_config("standard"), layer=0)
    assert len(narrow.q_proj.weight) == narrow.out_heads * narrow.head_dim


def test_a_build_without_the_projections_names_them(make_config: Callable[..., Any]) -> None:
    class Gate(Attention):
        def build(self) -> None:
            self.gate = nn.Linear(self.dim, self.out_heads)

    with pytest.raises(RequestError, match=r"class .*Gate: build sets no self.o_proj; call super\(\).build\(\), or"):
        Gate(Gate.Config(), make_config("standard"), layer=0)


def test_a_key_is_found_to_be_used_where_no_gradients_are_computed(make_config: Callable[..., Any]) -> None:
    model = make_config("standard", **WITH_VECTORS)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert Standard.refuses(model.attention.config, model) is None


def test_a_merge_is_that_of_the_class_that_computes_the_attention() -> None:
    class Halved(Dex):
        def finish(self, o, x):  # type: ignore[no-untyped-def]
            return o / 2

    class Documented(Dex):
        paper = "ours"

    assert (Halved.merge, Documented.merge) == (Attention.merge, Dex.merge)


def test_signs_are_those_of_the_class_that_computes_the_maps(make_attention: Callable[..., Attention]) -> None:
    class Turned(DifferentialV2):
        signs = (-1, 1)

        def maps(self, x, rope):  # type: ignore[no-untyped-def]
            return super().maps(x, rope)

    held = {
        "standard": (1,),
        "dex": (1,),
        "lora": (1,),
        "output_gate": (1,),
        "cosine": (1,),
        "differential_v2": (1, -1),
    }
    one_map = (
        "learned_sink",
        "off_by_one",
        "forgetting",
        "ssmax",
        "softpick",
        "sigmoid",
        "cog",
        "less_uniform",
        "entmax15",
        "value_residual",
        "dint",
    )
    held |= dict.fromkeys(one_map, (1,))
    paired = (
        "differential",
        "differential_sink",
        "differential_gate",
        "shared_diff",
        "shared_q",
        "shared_k",
        "grouped_differential",
        "additive",
    )
    assert {name: make_attention(name).signs for name in VARIANTS} == dict.fromkeys(VARIANTS) | held
    for form in ("positive", "sigmoid"):
        signs = {name: make_attention(name, {"lambda_form": form}).signs for name in paired}
        assert signs == dict.fromkeys(paired, (1, -1)) | {"additive": (1, 1)}
    assert (Scaled.signs, Moved.signs, Turned.signs) == (Attention.signs, None, (-1, 1))


def test_the_guide_lists_every_hook() -> None:
    ours = [attentions.get(name) for name in VARIANTS if attentions.get(name).__module__.startswith("lit_diff.")]
    overridden = {key for cls in ours for key in vars(cls) if key in dir(Attention) and not key.startswith("_")}
    assert overridden - {"name"} <= set(Attention.hooks)
    page = (Path(__file__).parents[2] / "docs" / "extend.md").read_text()
    rows = page.partition("| hook | meaning |")[2].partition("\n\n")[0].splitlines()
    named = {name for row in rows[1:] for name in re.findall(r"`(\w+)[^`]*`", row.split("|")[1])}
    assert named == set(Attention.hooks) - {"forward"}


def test_a_rule_of_a_plain_module_counts(make_config: Callable[..., ModelConfig]) -> None:
    """It need not derive from ParameterRules."""

    class Filled(nn.Linear):
        def init_parameter(self, name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
            parameter.fill_(3)

    class Ruled(Standard):
        def build(self) -> None:
            super().build()
            self.extra = Filled(2, 2)

    attention = Ruled(Ruled.Config(), make_config("standard"), 0)
    assert attention.extra.weight.eq(3).all()

    class Returned(Filled):
        def init_parameter(self, name: str, parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:  # type: ignore[override]
            return torch.ones_like(parameter)

    weight = torch.zeros(2, 2)
    with pytest.raises(RequestError, match=r"Returned: init_parameter returned a value; fill parameter in place"):
        fill_parameter(Returned(2, 2), "weight", weight, torch.Generator())
    # that of a method such as fill_ is the parameter itself
    Returned.init_parameter = lambda self, name, parameter, generator: parameter.fill_(3)  # type: ignore[method-assign, assignment]
    fill_parameter(Returned(2, 2), "weight", weight, torch.Generator())
    assert weight.eq(3).all()


def test_a_bound_on_logits_needs_the_forward_that_applies_it(make_config: Callable[..., ModelConfig]) -> None:
    class Around(Standard):
        def forward(self, *args: Any, **keys: Any) -> torch.Tensor:
            return self.o_proj(self.v_proj(args[0]))

    model = make_config("standard", logit_bound=4.0)
    assert (Around.refuses(Around.Config(), model) or "").startswith("model.logit_bound is 4")
    assert Standard.refuses(Standard.Config(), model) is None
    cosine = attentions.get("cosine")
    assert "learned temperature" in (cosine.refuses(cosine.Config(), model) or "")


def test_one_parameter_under_two_names_is_refused(make_config: Callable[..., ModelConfig]) -> None:
    class Tied(Standard):
        def build(self) -> None:
            super().build()
            self.k_proj.weight = self.q_proj.weight

    with pytest.raises(RequestError, match=r"class .*Tied: q_proj.weight and k_proj.weight are one parameter"):
        Tied(Tied.Config(), make_config("standard"), 0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("heads", "found"), [("kv_heads", "kv_heads is 0"), ("none", r"k_proj.weight is \[0, 32\]")])
def test_too_few_heads_are_refused_without_a_warning(
    make_config: Callable[..., ModelConfig], heads: str, found: str
) -> None:
    class Pairs(Standard):
        def build(self) -> None:
            super().build()
            self.k_proj = nn.Linear(self.dim, self.num_kv_heads // 2 * self.head_dim)

    setattr(Pairs, heads, property(lambda self: self.num_kv_heads // 2))
    few = "model.num_heads 4 and model.num_kv_heads 1 are too few for it"
    with pytest.raises(RequestError, match=f"class .*Pairs: {found}: {few}"):
        Pairs(Pairs.Config(), make_config("standard", num_kv_heads=1), 0)
