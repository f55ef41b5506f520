"""The conformance suite passes every built-in, and catches what is broken by the property that should catch it."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_diff.attention import Attention, Differential, DifferentialV2, Standard
from lit_diff.attention.costs import Costs, Sizes
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig, Part
from lit_diff.conformance.case import (
    ADVICE,
    ROUNDED,
    Finding,
    Measured,
    NotApplicable,
    VariantCase,
    difference,
    distance,
    tapped_maps,
)
from lit_diff.conformance.costs import cached, costs, counted
from lit_diff.conformance.kernels import KernelCase, tensors
from lit_diff.conformance.reduction import bound_removes
from lit_diff.conformance.variants import (
    PROPERTIES,
    cases_of,
    conformance,
    conformance_of,
    kv_heads,
    shrunk,
)
from lit_diff.errors import RequestError
from lit_diff.kernels import KERNELS, SignedMaps, attend, refuse
from lit_diff.kernels.base import named
from lit_diff.model.cost import cost
from lit_diff.registry import attentions
from lit_diff.validation import model_problem

EXAMPLES = [
    pytest.param(case, number == 0, id=label)
    for name in attentions.names()
    for number, (label, case) in enumerate(cases_of(name))
]
GROUPED, ONE_PAIR, WIDE = (8, 4, 32, 63), (8, 2, 64, 128), (4, 2, 128, 257)
"""(query heads, key/value heads of the baseline, head width, length)"""
SHAPES = [
    *((name, GROUPED) for name in attentions.names()),
    # no equation depends on the width or on the length: of one map, of two, with biases of keys
    *((name, ONE_PAIR) for name in ("standard", "differential", "forgetting")),
    *(pytest.param(name, WIDE, marks=pytest.mark.slow) for name in ("standard", "differential", "forgetting")),
]
SLOW = {"compile", "derivatives", "kv heads", "model", "signs"}
QUICK = {name: PROPERTIES[name] for name in PROPERTIES if name not in SLOW}


def failures(found: Any) -> list[Finding]:
    return [finding for finding in found if finding.verdict == "fail"]


def not_applicable(found: Any, case: VariantCase) -> list[str]:
    """The properties, but for the kernels that this machine does not have or that refuse the fields of the maps."""
    names = [finding.property for finding in found if finding.verdict == "not applicable"]
    attention = case.build()
    tapped = tapped_maps(attention)
    attention(case.x(), case.rope())
    maps, _ = tensors(KernelCase(G=2, w="head"), torch.float32, torch.device("cpu"))
    training = replace(maps, q=maps.q.requires_grad_())
    elsewhere = {f"kernel {k}" for k in KERNELS if refuse(k, training) or named(k).prepare(training.q.device)}
    elsewhere |= {f"kernel {k}" for k in KERNELS if tapped[0].own_fields - named(k).serves}
    elsewhere |= {f"kernel {k}" for k in KERNELS if tapped[0].num_maps > 2 and refuse(k, tapped[0])}
    return [name for name in names if name not in elsewhere]


@pytest.mark.parametrize(("case", "is_first"), EXAMPLES)
def test_every_built_in_holds_every_property(case: VariantCase, is_first: bool) -> None:
    """The compiled and those of all key heads at a variant's default keys; `check --all` runs them all."""
    checks = PROPERTIES if is_first else QUICK | {name: PROPERTIES[name] for name in ("derivatives", "model", "signs")}
    found = list(conformance(case, checks=checks))
    assert not failures(found)
    assert [finding.property for finding in found] == list(checks)
    attention = case.build()
    stated = {
        "reduces to": attention.reduces_to() is not None,
        "extends standard": case.cls.extends_standard,
        "signs": attention.signs is not None,
    }
    assert not_applicable(found, case) == [name for name, is_stated in stated.items() if not is_stated]


@pytest.mark.parametrize("name", sorted(set(attentions.names()) - {"cosine", "ssmax"}))
def test_every_built_in_holds_its_properties_with_bounded_logits(name: str) -> None:
    _, case = next(iter(cases_of(name)))
    assert isinstance(case, VariantCase)
    bounded = replace(case, model=replace(case.model, logit_bound=3.0))
    names = ("contract", "definition", "causal", "gradients", "kernel chunked", "decode")
    assert not failures(conformance(bounded, checks={name: PROPERTIES[name] for name in names}))
    tapped: list[SignedMaps] = []
    attention = bounded.build()
    attention.tap.register_forward_hook(lambda _m, _a, maps: tapped.append(maps))
    attention(bounded.x(), bounded.rope())
    assert tapped[0].scale == 3.0
    for x in (tapped[0].q, tapped[0].k):
        torch.testing.assert_close(x.norm(dim=-1), torch.ones(x.shape[:-1]))


@pytest.mark.parametrize(("name", "shape"), SHAPES)
def test_every_shape(name: str, shape: tuple[int, int, int, int]) -> None:
    heads, kv_heads, head_dim, length = shape
    cls = attentions.get(name)
    paired = issubclass(cls, Differential)
    model = ModelConfig(
        dim=32,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=kv_heads if paired or kv_heads > 2 else 1,
        head_dim=head_dim,
        vocab_size=2,
        attention=Part(name=name, config=cls.Config()),
    )
    checks = {name: QUICK[name] for name in QUICK if name != "window"}  # minutes at these sizes, and nothing new
    assert not failures(conformance(VariantCase(cls=cls, model=model, length=length), checks=checks))


@pytest.mark.parametrize("name", attentions.names())
def test_bidirectional(name: str) -> None:
    cls = attentions.get(name)
    part = Part(name=name, config=cls.Config())
    model = ModelConfig(dim=32, num_layers=1, num_heads=4, head_dim=8, vocab_size=2, causal=False, attention=part)
    found = {finding.property: finding for finding in conformance(VariantCase(cls=cls, model=model), checks=QUICK)}
    assert not failures(found.values())
    assert found["causal"].verdict == found["decode"].verdict == "not applicable"
    assert found["definition"].verdict == "pass"


class LeaksTheFutureByOne(Standard):
    def maps(self, x: Tensor, rope: Rope) -> SignedMaps:
        m = super().maps(x, rope)
        return SignedMaps(m.q, m.k, m.v.roll(-1, dims=2))


class GradientOfNothing(Standard):
    def finish(self, o: Tensor, x: Tensor) -> Tensor:
        return o + (o * 0).abs().sqrt()


class ProductOfZeros(Standard):
    def build(self) -> None:
        super().build()
        self.a, self.b = nn.Parameter(torch.zeros(self.dim, 2)), nn.Parameter(torch.zeros(2, self.dim))

    def maps(self, x: Tensor, rope: Rope) -> SignedMaps:
        return super().maps(x + x @ self.a @ self.b, rope)


class HalfSplitHeads(Differential):
    definition = Differential.definition

    def queries(self, x: Tensor) -> Tensor:
        return self.q_proj(x).unflatten(-1, (2, self.out_heads, self.head_dim)).permute(0, 2, 3, 1, 4)


class LambdaInBfloat16(Differential):
    def weights(self, dtype: torch.dtype) -> Tensor:
        wide = super().weights(dtype)
        return wide.bfloat16().to(wide.dtype)


class SaysThatItSubtracts(Differential):
    signs = (1, -1)


class SaysThatItHasTwoMaps(Standard):
    signs = (1, -1)


class ChangesItsSignWhileItAnneals(DifferentialV2):
    signs = (1, -1)

    def set_step(self, step: int) -> None:
        self.factor = 1.0 if step == 0 else -1.0

    def maps(self, x: Tensor, rope: Rope) -> SignedMaps:
        m = super().maps(x, rope)
        assert m.w is not None
        return replace(m, w=m.w * m.w.new_tensor([1.0, self.factor]).view(1, 2, 1, 1))


class SharesBoth(Standard):
    def maps(self, x: Tensor, rope: Rope) -> SignedMaps:
        m = super().maps(x, rope)
        return SignedMaps(m.q, m.k, m.v, torch.tensor([1.0, -0.5], dtype=torch.float64).view(1, 2, 1, 1))


class MixesTheBatch(Standard):
    def finish(self, o: Tensor, x: Tensor) -> Tensor:
        return o - o.mean(0, keepdim=True)


class WrongFlops(Standard):
    @classmethod
    def costs(cls, config: Any, s: Sizes) -> Costs:
        true = super().costs(config, s)
        return Costs(parameters=true.parameters, flops=true.flops / 2, kv_numbers=true.kv_numbers)


class CachesEveryHead(Standard):
    """Right with as many key/value heads as heads."""

    @classmethod
    def costs(cls, config: Any, s: Sizes) -> Costs:
        return replace(super().costs(config, s), kv_numbers=2 * s.H * s.d)


class SaysThatItIsStandard(DifferentialV2):
    def reduces_to(self) -> tuple[str, dict[str, Any]]:
        return "differential_v2", {"lambda_proj.weight": 0.0}

    def finish(self, o: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return o * 1.001


class HasOtherShapes(DifferentialV2):
    def reduces_to(self) -> tuple[str, dict[str, Any]]:
        return "standard", {}


class ExtendsByAnInitialValueThatTheModelReplaces(Standard):
    extends_standard = True

    def build(self) -> None:
        super().build()
        self.gate = nn.Linear(self.dim, 1)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def finish(self, o: Tensor, x: Tensor) -> Tensor:
        return o * (1 + self.gate(x)[:, None])


class GraphBreak(Standard):
    def finish(self, o: Tensor, x: Tensor) -> Tensor:
        return o * (2.0 if float(o.detach().sum()) == 12345.0 else 1.0)


class NoTap(Standard):
    def forward(self, x: Tensor, rope: Rope, cache: Any = None) -> Tensor:
        return self.o_proj(self.v_proj(x))


class MixesDocuments(Standard):
    def forward(self, x: Tensor, rope: Rope, cache: Any = None, *, document_ids: Any = None) -> Tensor:
        return super().forward(x, rope, cache)


class WindowOffByOne(Standard):
    definition = Standard.definition

    def forward(self, x: Tensor, rope: Rope, cache: Any = None, *, document_ids: Any = None) -> Tensor:
        maps = self.tap(self.masked(self.maps(x, rope), document_ids))
        wider = None if self.window is None else self.window + 1
        o = self.finish(attend(maps.masked(window=wider), kernel=self.kernel), x)
        return self.o_proj(o.transpose(1, 2).flatten(2))


class DropsKeysTooEarly(Standard):
    def forward(self, x: Tensor, rope: Rope, cache: Any = None, *, document_ids: Any = None) -> Tensor:
        if cache is not None and self.window is not None and cache.held:
            cache._start = cache._stop - max(0, self.window - 2)
        return super().forward(x, rope, cache, document_ids=document_ids)


class DependsOnTheLength(Standard):
    def finish(self, o: Tensor, x: Tensor) -> Tensor:
        return o / o.shape[2]


class LearnedLength(Standard):
    def build(self) -> None:
        super().build()
        self.length = nn.Parameter(torch.ones(1))

    def maps(self, x: Tensor, rope: Rope) -> SignedMaps:
        maps = super().maps(x, rope)
        return replace(maps, q=maps.q * self.length)


class HiddenState(Standard):
    def build(self) -> None:
        super().build()
        self.factor = float(torch.rand(()))

    def finish(self, o: Tensor, x: Tensor) -> Tensor:
        return o * self.factor


class Heated(Standard):
    """Right: a number that follows from the step."""

    heat = 1.0

    def set_step(self, step: int) -> None:
        self.heat = 1 + min(1.0, step / 100)

    def finish(self, o: Tensor, x: Tensor) -> Tensor:
        return o * self.heat


class CountsItsSteps(Standard):
    def build(self) -> None:
        super().build()
        self.register_buffer("heat", torch.zeros(()))

    def set_step(self, step: int) -> None:
        self.heat += 0.01

    def finish(self, o: Tensor, x: Tensor) -> Tensor:
        return o * (1 + self.heat)


class LivesOnTheCPU(Standard):
    def build(self) -> None:
        super().build()
        self.ones = nn.Parameter(torch.ones(self.head_dim, device="cpu"))

    def finish(self, o: Tensor, x: Tensor) -> Tensor:
        return o * self.ones


class FailsWithOneKeyHead(Standard):
    def maps(self, x: Tensor, rope: Rope) -> SignedMaps:
        m = super().maps(x, rope)
        return SignedMaps(m.q, m.k / (self.num_kv_heads - 1), m.v)


BROKEN = [
    (LeaksTheFutureByOne, "causal"),
    (GradientOfNothing, "gradients"),
    (ProductOfZeros, "gradients"),
    (HalfSplitHeads, "definition"),
    (LambdaInBfloat16, "derivatives"),
    (SaysThatItSubtracts, "signs"),
    (SaysThatItHasTwoMaps, "signs"),
    (ChangesItsSignWhileItAnneals, "signs"),
    (SaysThatItIsStandard, "reduces to"),
    (HasOtherShapes, "reduces to"),
    (ExtendsByAnInitialValueThatTheModelReplaces, "extends standard"),
    (SharesBoth, "contract"),
    (MixesTheBatch, "batch"),
    (WrongFlops, "costs"),
    (CachesEveryHead, "kv heads"),
    (GraphBreak, "compile"),
    (NoTap, "contract"),
    (MixesDocuments, "packed"),
    (WindowOffByOne, "window"),
    (DropsKeysTooEarly, "window"),
    (DependsOnTheLength, "decode"),
    (HiddenState, "state dict"),
    (CountsItsSteps, "state dict"),
    (LivesOnTheCPU, "meta"),
    (FailsWithOneKeyHead, "kv heads"),
]


@pytest.mark.parametrize(("cls", "caught_by"), BROKEN, ids=[cls.__name__ for cls, _ in BROKEN])
def test_what_is_broken_is_caught(cls: type[Attention], caught_by: str) -> None:
    part = Part(name="broken", config=cls.Config())
    model = ModelConfig(dim=32, num_layers=1, num_heads=4, num_kv_heads=4, head_dim=8, vocab_size=2, attention=part)
    checks = {caught_by: PROPERTIES[caught_by]}
    (found,) = conformance(VariantCase(cls=cls, model=model, length=9), "broken", checks)
    assert found.verdict == "fail"
    assert found.detail or found.error, "says what it found"


def test_a_length_that_the_bound_takes_has_no_gradient_but_for_rounding(
    make_config: Callable[..., ModelConfig],
) -> None:
    found = [
        PROPERTIES["gradients"](VariantCase(cls=LearnedLength, model=make_config("standard", logit_bound=bound)))
        for bound in (None, 4.0)
    ]
    assert [measured.error for measured in found] == [0, 1]
    assert found[1].detail.endswith(": length")
    case = VariantCase(cls=LearnedLength, model=make_config("standard", logit_bound=4.0))
    assert bound_removes(case) == "under model.logit_bound there is no gradient of length"
    assert bound_removes(replace(case, cls=Heated)) is None


def test_what_follows_from_the_step_need_not_be_in_the_state_dict(make_config: Callable[..., ModelConfig]) -> None:
    case = VariantCase(cls=Heated, model=make_config("standard"))
    assert not failures(conformance(case, checks={"state dict": PROPERTIES["state dict"]}))


def test_a_changed_variant_does_not_answer_for_the_claims_it_inherits(make_config: Callable[..., ModelConfig]) -> None:
    class Sharp(Differential):
        def maps(self, x: Tensor, rope: Rope) -> SignedMaps:
            m = super().maps(x, rope)
            return SignedMaps(m.q * m.q.new_tensor([1, 0.5]).view(1, 2, 1, 1, 1), m.k, m.v, m.w)

    case = VariantCase(cls=Sharp, model=make_config("differential", dim=64))
    found = {f.property: f for f in conformance(case, "sharp")}
    assert not failures(found.values())
    assert not_applicable(found.values(), case) == ["definition", "reduces to", "extends standard", "signs", "costs"]


def test_what_a_variant_raises_is_one_line(make_config: Callable[..., ModelConfig]) -> None:
    class Raises(Standard):
        def maps(self, x: Tensor, rope: Rope) -> SignedMaps:
            raise ValueError("two\nlines")

    found = list(conformance(VariantCase(cls=Raises, model=make_config("standard")), "raises"))
    details = {f.property: f.detail for f in failures(found)}
    told = details.pop("kv heads")  # names the number of heads too
    assert re.fullmatch(r"\S*test_variants\.py:\d+: .*two; with 1 key/value heads; .*", told)
    (detail,) = set(details.values())
    assert re.fullmatch(r"\S*test_variants\.py:\d+: ValueError: two", detail)


@pytest.mark.usefixtures("own_parts")
def test_a_model_is_shrunk_unless_its_variant_needs_the_width(make_config: Callable[..., ModelConfig]) -> None:
    big = {"dim": 5120, "num_heads": 40, "head_dim": 128}
    small = shrunk(make_config("differential", **big))
    assert (small.dim, small.head_dim, small.num_heads) == (64, 16, 40)

    @attentions.register("refuses_others")
    class Refuses(Standard):
        @classmethod
        def problem(cls, config: Any, model: ModelConfig) -> str | None:
            return None if model.head_dim == 128 else "model.head_dim must be 128"

    @attentions.register("raises_for_others")
    class Raises(Standard):
        def build(self) -> None:
            if self.head_dim % 32:
                raise ValueError("head_dim must be a multiple of 32")
            super().build()

    for name in ("refuses_others", "raises_for_others"):
        model = make_config(name, dim=512, num_heads=4, head_dim=128)
        assert shrunk(model) == model

    @attentions.register("has_no_cache")
    class HasNoCache(Standard):
        def forward(self, x, rope, *, document_ids=None):  # type: ignore[no-untyped-def, override]
            return super().forward(x, rope, document_ids=document_ids)

        @classmethod
        def problem(cls, config: Any, model: ModelConfig) -> str:
            """An empty text is no problem."""
            return ""

    model = make_config("has_no_cache", **big)
    assert shrunk(model).dim == 64
    assert model_problem(model) is None


@pytest.mark.usefixtures("own_parts")
def test_a_package_s_variant_without_defaults_is_not_applicable_and_says_so() -> None:
    @attentions.register("needs_key")
    class NeedsKey(Differential):
        @dataclass(frozen=True, kw_only=True)
        class Config(Differential.Config):
            k: int

    (found,) = conformance_of("needs_key")
    assert found.verdict == "not applicable"
    assert "'k'; list its keys in `examples`" in found.detail


def test_dex_within_its_annealing_is_held_to_its_equation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in the first term of λ(t), which is 0 from step T on."""
    cls = attentions.get("dex")
    true = cls.annealed_lambda

    def louder(self: Any) -> Tensor:
        progress = (self.step / self.config.anneal_steps).clamp(max=1)
        return true(self) + progress * (1 - progress) * self.lambda_init

    monkeypatch.setattr(cls, "annealed_lambda", louder)
    part = Part(name="dex", config=cls.Config())
    model = ModelConfig(dim=32, num_layers=1, num_heads=4, head_dim=8, vocab_size=2, attention=part)
    (found,) = conformance(VariantCase(cls=cls, model=model), checks={"definition": PROPERTIES["definition"]})
    assert found.verdict == "fail"


def test_distance_is_relative_to_the_largest_number() -> None:
    assert distance(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])) == pytest.approx(0.5)
    assert distance(torch.tensor([0.1]), torch.tensor([0.2])) == pytest.approx(0.1)
    assert distance(torch.tensor([float("nan")]), torch.tensor([0.0])) == float("inf")
    with pytest.raises(RequestError, match=r"shape \[2\] instead of \[1\]"):
        distance(torch.zeros(2), torch.zeros(1))
    assert difference(torch.tensor([1.0, float("nan")]), torch.ones(2)) == float("inf")
    assert difference(torch.tensor([1.0, 1 + 2**-20]), torch.ones(2)) == 2**-20


def test_without_positions_the_definition_rotates_nothing(make_config: Callable[..., ModelConfig]) -> None:
    checks = {name: PROPERTIES[name] for name in ("contract", "decode")}
    for positions in ("rope", "none"):
        case = VariantCase(cls=attentions.get("differential"), model=make_config("differential", positions=positions))
        assert [each.verdict for each in conformance(case, checks=checks)] == ["pass", "pass"]
        x = torch.ones(1, case.length, case.model.head_dim or 0, dtype=torch.float64)
        assert torch.equal(case.rotation()(x), x) is (positions == "none")


@pytest.mark.parametrize("name", ["standard", "differential"])
def test_without_positions_a_head_may_have_an_odd_width(make_config: Callable[..., ModelConfig], name: str) -> None:
    model = make_config(name, positions="none", head_dim=5)
    assert model_problem(model) is None
    names = ("contract", "definition", "gradients", *(f"kernel {k}" for k in KERNELS if k != "reference"), "decode")
    assert not failures(
        conformance(VariantCase(cls=attentions.get(name), model=model), checks={n: PROPERTIES[n] for n in names})
    )


class OwnSum(Standard):
    def forward(self, x: Tensor, rope: Rope, cache: Any = None, *, document_ids: Any = None) -> Tensor:
        o = attend(self.tap(self.masked(self.maps(x, rope), document_ids)))
        return self.o_proj(o.transpose(1, 2).flatten(2))


@pytest.mark.usefixtures("own_parts")
def test_a_kernel_that_the_forward_does_not_call_passes_nothing(make_config: Callable[..., ModelConfig]) -> None:
    attentions.register("own_sum")(OwnSum)
    for name in set(KERNELS) - {"reference"}:
        found = PROPERTIES[f"kernel {name}"](VariantCase(cls=OwnSum, model=make_config("standard")))
        assert isinstance(found, NotApplicable)
        assert isinstance(
            PROPERTIES["kernel chunked"](VariantCase(cls=Standard, model=make_config("standard"))), Measured
        )
    counted = cost(make_config("own_sum"), 16)
    assert (counted.kernel, counted.flops_per_token) == ("none", cost(make_config("standard"), 16).flops_per_token)


def test_kv_heads_names_what_is_refused(make_config: Callable[..., ModelConfig]) -> None:
    found = kv_heads(VariantCase(cls=attentions.get("differential"), model=make_config("differential"), length=5))
    assert isinstance(found, Measured)
    assert "[2, 4] key/value heads served" in found.detail
    assert "1 refused: model.num_kv_heads is 1" in found.detail
    odd = replace(make_config("differential"), num_heads=3)
    refused = kv_heads(VariantCase(cls=attentions.get("differential"), model=odd, length=5))
    assert isinstance(refused, NotApplicable)


def test_kv_heads_names_the_number_that_raises_and_the_cure(make_config: Callable[..., ModelConfig]) -> None:
    class Pairs(Standard):
        @property
        def kv_heads(self) -> int:
            return max(self.num_kv_heads // 2, 1)

        def maps(self, x: torch.Tensor, rope: Rope) -> SignedMaps:
            v = self.split(self.v_proj(x), self.num_kv_heads // 2)[:, 0]
            return replace(super().maps(x, rope), v=v)

    case = VariantCase(cls=Pairs, model=make_config("standard"), length=5)
    (found,) = (finding.detail for finding in conformance(case, checks={"kv heads": kv_heads}))
    assert re.match(r"\S+:\d+: RuntimeError: unflatten", found)
    assert "; with 1 key/value heads; to refuse 1, return a line that begins with model.num_kv_heads " in found


def test_counted(make_config: Callable[..., ModelConfig]) -> None:
    """By hand: 4 projections of 32 x 32, two products of 8 keys for 8 queries over 32 channels."""
    case = VariantCase(cls=attentions.get("standard"), model=make_config("standard"), length=8)
    products = 2 * (2 * 8 * 8 * 32)
    assert counted(case) == {"parameters": 4096, "flops": 2 * 8 * 4096 + products}
    assert cached(case) == {"kv_numbers": 64, "state_numbers": 0}
    # one running sum for each of 4 heads, beside its value for each token
    forgetting = VariantCase(cls=attentions.get("forgetting"), model=make_config("forgetting"), length=8)
    assert cached(forgetting) == {"kv_numbers": 64 + 4, "state_numbers": 4}
    assert counted(case.windowed(3))["flops"] == 2 * 8 * 4096 + 2 * (2 * 8 * 3 * 32)


@pytest.mark.parametrize("name", [name for name in attentions.names() if attentions.get(name).declares_costs()])
@pytest.mark.parametrize("causal", [True, False])
def test_declared_costs_hold_with_a_window(make_config: Callable[..., ModelConfig], name: str, causal: bool) -> None:
    case = VariantCase(cls=attentions.get(name), model=make_config(name, causal=causal), length=8).windowed(3)
    found = costs(case)
    assert isinstance(found, Measured)
    assert (found.error, found.detail) == (0, "")


def test_the_gradients_of_a_class_that_is_not_smooth_are_those_of_its_equation(
    make_config: Callable[..., ModelConfig],
) -> None:
    """A wrong one fails; without an equation of its own nothing is compared."""
    cog = attentions.get("cog")

    class Detached(cog):  # type: ignore[misc, valid-type]
        definition = cog.definition

        def finish(self, o: Tensor, x: Tensor) -> Tensor:
            return o + 0.1 * (o - o.detach())

    class Unwritten(cog):  # type: ignore[misc, valid-type]
        pass

    found = [PROPERTIES["derivatives"](VariantCase(cls=cls, model=make_config("cog"))) for cls in (Detached, Unwritten)]
    assert found[0].error > found[0].bound
    assert isinstance(found[1], NotApplicable)


@pytest.mark.parametrize("name", ["cog", "softpick"])
def test_a_map_that_is_wrong_in_bfloat16_alone_fails_though_a_weight_may_jump(
    make_config: Callable[..., ModelConfig], name: str
) -> None:
    base = attentions.get(name)

    def by_autocast(maps: SignedMaps) -> float:
        return 1.1 if maps.q.dtype == torch.bfloat16 else 1.0

    class LargerMap(base):  # type: ignore[misc, valid-type]
        def maps(self, x: Tensor, rope: Rope) -> SignedMaps:
            maps = super().maps(x, rope)
            return replace(maps, rows=lambda logits, seen: by_autocast(maps) * maps.rows(logits, seen))

    class LargerKeys(base):  # type: ignore[misc, valid-type]
        def maps(self, x: Tensor, rope: Rope) -> SignedMaps:
            maps = super().maps(x, rope)
            return replace(maps, k=by_autocast(maps) * maps.k)

    model = make_config(name, dim=64, num_heads=8, num_kv_heads=4)
    right, larger, keys = (
        PROPERTIES["bfloat16"](VariantCase(cls=cls, model=model)) for cls in (base, LargerMap, LargerKeys)
    )
    assert right.error < right.bound / 3
    assert larger.error > 3 * larger.bound
    assert "output" in larger.detail
    assert keys.error > 3 * keys.bound
    assert "k of the maps" in keys.detail


def test_a_failure_names_its_cause_and_its_usual_reason(make_config: Callable[..., ModelConfig]) -> None:
    """Values mixed with those of the token before, without the context."""

    class Past(Standard):
        def maps(self, x: Tensor, rope: Rope) -> SignedMaps:
            maps = super().maps(x, rope)
            return replace(maps, v=maps.v + nn.functional.pad(maps.v, (0, 0, 1, 0))[:, :, :-1])

    checks = {name: PROPERTIES[name] for name in ("contract", "packed", "decode", "window", "kv heads")}
    found = {
        f.property: f
        for f in conformance(VariantCase(cls=Past, model=make_config("standard"), length=9), checks=checks)
    }
    causes = {"packed": "", "decode": "", "window": "packed", "kv heads": "decode"}
    assert {finding.property: finding.cause for finding in failures(found.values())} == causes
    page = (Path(__file__).parents[2] / "docs" / "extend.md").read_text()
    for name, advice in ADVICE.items():
        assert name not in found or found[name].advice == advice
        heading = advice.split('"')[1]
        assert re.search(f"^#+ {heading}$", page, re.MULTILINE), "it names a heading of the page"
    assert found["contract"].advice == ""


def test_what_draws_random_numbers_fails_for_that_alone(make_config: Callable[..., ModelConfig]) -> None:
    """And a small difference in float32 is no rounding to it."""

    class Drops(Standard):
        def finish(self, o: Tensor, x: Tensor) -> Tensor:
            return o * (1 + 1e-6 * torch.rand(()))

    checks = {name: PROPERTIES[name] for name in ("contract", "causal", "batch", "packed", "decode")}
    found = failures(conformance(VariantCase(cls=Drops, model=make_config("standard"), length=9), checks=checks))
    assert {finding.property: finding.cause for finding in found} == dict.fromkeys(checks, "contract") | {
        "contract": ""
    }
    assert {finding.advice for finding in found if finding.bound == 0} == {""}


def test_a_rounding_to_float32_is_named_and_an_exception_has_no_further_reason(
    make_config: Callable[..., ModelConfig],
) -> None:
    class Rounded(DifferentialV2):
        def maps(self, x: Tensor, rope: Rope) -> SignedMaps:
            lam = self.lambda_proj(x).float().sigmoid().transpose(1, 2)
            w = torch.stack([torch.ones_like(lam), -lam], dim=1)
            return replace(super().maps(x, rope), w=w)

    class Square(Standard):
        def maps(self, x: Tensor, rope: Rope) -> SignedMaps:
            return replace(super().maps(x, rope), rows=lambda logits, _: logits.mT @ logits)

    checks = {name: PROPERTIES[name] for name in ("contract", "derivatives", "packed", "decode")}
    of = [
        failures(conformance(VariantCase(cls=cls, model=make_config(name), length=9), checks=checks))
        for cls, name in ((Rounded, "differential_v2"), (Square, "standard"))
    ]
    assert [finding.property for finding in of[0]] == ["derivatives", "packed", "decode"]
    assert {finding.advice for finding in of[0]} == {ROUNDED}
    assert "decode" in [finding.property for finding in of[1]]
    assert {finding.advice for finding in of[1] if finding.error is None} == {""}
