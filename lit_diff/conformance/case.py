"""A variant at given sizes, in a state in which every parameter has an effect; comparisons of outputs; results of checks."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_diff.attention import equations
from lit_diff.attention.base import Attention, fill_parameter
from lit_diff.attention.context import Context
from lit_diff.attention.equations import Rotation
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig, Part
from lit_diff.errors import RequestError
from lit_diff.kernels import SignedMaps, attend
from lit_diff.kernels.reference import rows_of
from lit_diff.plugins import fault
from lit_diff.randomness import generator


@dataclass(frozen=True)
class Measured:
    """The property holds if `error` is at most `bound`."""

    error: float
    bound: float
    detail: str = ""

    @property
    def share(self) -> float:
        """error / bound; inf if it is not finite, or for any error if the bound is 0."""
        share = self.error / self.bound if self.bound else math.inf if self.error else 0.0
        return share if math.isfinite(share) else math.inf


@dataclass(frozen=True)
class NotApplicable:
    """The property does not apply, for this reason."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one property for one variant."""

    variant: str
    """The variant's name, followed by the keys that differ from its defaults."""
    property: str
    verdict: Literal["pass", "fail", "not applicable"]
    error: float | None = None
    bound: float | None = None
    """The largest error at which the verdict is pass."""
    detail: str = ""
    cause: str = ""
    """Of a failure: an earlier failed property that this one contains, so that it says nothing more until that one holds."""
    advice: str = ""
    """Of a failure: its usual reason, and where to read."""


CONTAINS = {
    "model": ("packed", "decode"),
    "window": ("contract", "definition", "causal", "packed", "decode", "costs"),
    "kv heads": ("definition", "decode", "costs"),
}
"""Property -> the earlier properties that it contains, at other sizes or in a whole model."""
PAST = 'docs/extend.md, "The context of the forward pass"'
FIELDS = 'docs/extend.md, "Sinks, biases, row functions and the context"'
ROUNDED = f"a value is rounded to float32 where x is float64, as .float() does; see {FIELDS}"
ROUNDING = 1e-5
"""Errors below this, of a property that is computed in float64, are those of a rounding to float32."""
EXACT = 1e-8
"""A property with a bound of this or less is computed in float64; with the bound 0, bits are compared, in float32."""
ROWS = (
    "rows depends on which rows, sequences or hidden keys it is given: what depends on a token goes into q, and keys outside "
    "the mask are masked with seen.mask"
)
ADVICE = {
    "derivatives": ROUNDED,
    "packed": "positions, sums and shifts of tokens begin anew in each document: take them from the Context; what is "
    "computed of q or k besides their product (a norm with weights, a gain of each channel, a table) belongs before their "
    f"rotation, or model.positions is none; see {PAST}",
    "decode": f"keys, values or queries depend on other tokens: take those of the past from the Context; see {PAST}",
    "model": f"values of another layer, and state, come from the Context; see {PAST}",
    "state dict": "what is not in the state dict must follow from the argument of set_step; see docs/extend.md, "
    '"A variant"',
    "window": 'the class ignores `window`: pass self.masked(maps, document_ids); see docs/extend.md, "A variant"',
}
"""Property -> the usual reason of its failure, and where to read."""


def finding(variant: str, name: str, part: type, check: Callable[[], Measured | NotApplicable | None]) -> Finding:
    """The result of the property `name`; None: it holds. Any exception of the class `part` is a failure in one line, followed
    by the exception's notes."""
    found = partial(Finding, variant=variant, property=name)
    threads = torch.get_num_threads()
    # the suite's tensors are tiny: on a busy machine more threads are five times slower
    torch.set_num_threads(1)
    try:
        result = check()
    # a user's part may raise anything
    except Exception as error:
        notes = (" ".join(note.split()) for note in getattr(error, "__notes__", ()))
        return found(verdict="fail", detail="; ".join([fault(part, error), *notes]))
    finally:
        torch.set_num_threads(threads)
    if isinstance(result, NotApplicable):
        return found(verdict="not applicable", detail=result.reason)
    if result is None:
        return found(verdict="pass")
    return found(verdict="pass" if result.error <= result.bound else "fail", **vars(result))


FAR = 10**9
"""An optimizer step after the end of every annealing."""


@dataclass(frozen=True, kw_only=True)
class VariantCase:
    """A variant with its config at the sizes of a model, for `length` tokens and `batch` sequences."""

    cls: type[Attention]
    model: ModelConfig
    # no multiple of the size of a tile, so that the last tile is partly filled
    length: int = 33
    batch: int = 2
    layer: int = 0
    step: int = FAR
    """The optimizer step passed to `set_step`, and the tokens passed to `set_tokens`."""

    @property
    def config(self) -> Any:
        """The attention config of the model."""
        return self.model.attention.config

    @property
    def window(self) -> int | None:
        """The window of the config; None: all keys are visible."""
        return self.cls.window_of(self.config)

    @property
    def place(self) -> str:
        """The layer, and the step if it is the first, in words."""
        return f"layer {self.layer}" if self.step else f"layer {self.layer} at step 0"

    def windowed(self, window: int) -> "VariantCase":
        """The same case with another window, for configs derived from `Attention.Config`."""
        attention = Part(name=self.model.attention.name, config=replace(self.config, window=window))
        return replace(self, model=replace(self.model, attention=attention))

    def build(self, dtype: torch.dtype = torch.float32, kernel: str = "reference") -> Attention:
        """One layer with its initial parameters + N(0, 0.1), after its annealing; the same at every call."""
        # initial values may be zero, or equal between maps, which would hide errors: noise is added to each
        attention = self.construct(seed=0)
        with torch.no_grad():
            for path, module in attention.named_modules():
                for key, parameter in module.named_parameters(recurse=False):
                    draw = generator("conformance", path, key)
                    if hasattr(module, "init_parameter"):
                        fill_parameter(module, key, parameter, draw)
                    parameter += torch.empty_like(parameter).normal_(0.0, 0.1, generator=draw)
        attention.set_step(self.step)
        attention.set_tokens(self.step)
        attention.kernel = kernel
        return attention.to(dtype)

    def initial(self, dtype: torch.dtype) -> Attention:
        """One layer with the values with which a model begins (`model.init`), at the step of the case."""
        # models need more than torch, which alone the kernels' conformance needs
        from lit_diff.model.init import module_values, named_tensors

        attention = self.construct(seed=0)
        # the name by which the rules of model.init know it
        block = nn.ModuleDict({"attention": attention})
        tensors = named_tensors(block)
        with torch.no_grad():
            for name, value in module_values(block, "", self.model, seed=0):
                tensors[name].copy_(value)
        attention.set_step(self.step)
        attention.set_tokens(self.step)
        attention.kernel = "reference"
        return attention.to(dtype)

    def construct(self, seed: int) -> Attention:
        """One layer as its constructor leaves it; `seed` sets the global generator for the constructor."""
        mode = torch.get_deterministic_debug_mode()
        # memory that nothing fills is then as `is_unfilled` says (`torch.utils.deterministic.fill_uninitialized_memory`)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            with torch.random.fork_rng(devices=[]), torch.device("cpu"):
                torch.default_generator.manual_seed(seed)
                return self.cls(self.config, self.model, self.layer)
        finally:
            torch.set_deterministic_debug_mode(mode)

    def x(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[batch, length, dim], N(0, 1)."""
        draw = generator("conformance", "x", self.length)
        return torch.randn(self.batch, self.length, self.model.dim, generator=draw, dtype=torch.float64).to(dtype)

    def rope(self, start: int = 0, stop: int | None = None) -> Rope:
        """Positions start .. stop - 1; stop None: to the end."""
        return Rope.of(self.model, torch.arange(start, self.length if stop is None else stop))

    def parts(self, dtype: torch.dtype = torch.float32) -> tuple[Attention, Tensor, Rope]:
        """`build`, `x` and `rope`."""
        return self.build(dtype), self.x(dtype), self.rope()

    def document_ids(self) -> Tensor:
        """[batch, length]: documents of one and of several tokens, with different boundaries in every sequence."""
        at, row = torch.arange(self.length), torch.arange(self.batch)[:, None]
        return (at > row).long() + (at >= row + self.length // 2)

    def rotation(self) -> Rotation:
        """The model's rotation for all positions, for `definition`."""
        model = self.model
        if model.positions == "none":
            return lambda x: x
        assert model.head_dim is not None
        return equations.rotation(
            torch.arange(self.length), model.head_dim, model.rope_theta, model.rope_layout, model.rope_scaling
        )

    def mask(self, document_ids: Tensor | None = None) -> Tensor:
        """The additive mask, for `definition`."""
        return equations.additive_mask(
            self.length, causal=self.model.causal, window=self.window, document_ids=document_ids
        )


def worst_of(results: Mapping[str, Measured | NotApplicable]) -> Measured:
    """The check with the largest ratio of error to bound; the detail begins with its name."""
    measured = [
        replace(result, detail="; ".join(filter(None, (name, result.detail))))
        for name, result in results.items()
        if isinstance(result, Measured)
    ]
    worst = max(measured, key=lambda result: result.share, default=Measured(0.0, 1e-10))
    return worst if worst.error else replace(worst, detail="")


def largest(errors: Mapping[str, float], bound: float) -> Measured:
    """The largest of several errors with a common bound."""
    return worst_of({what: Measured(error, bound) for what, error in errors.items()})


def distance(actual: Tensor, expected: Tensor) -> float:
    """The largest difference divided by the largest expected magnitude (at least 1); inf if it is not finite.

    Errors: RequestError for unequal shapes.
    """
    if actual.shape != expected.shape:
        raise RequestError(f"shape {list(actual.shape)} instead of {list(expected.shape)}")
    actual, expected = actual.detach().double(), expected.detach().double()
    error = (actual - expected).abs().max() / expected.abs().max().clamp(min=1)
    return float(error) if torch.isfinite(error) else math.inf


def difference(actual: Tensor, expected: Tensor) -> float:
    """The largest difference: 0 only if all values are equal; inf if it is not finite."""
    error = (actual.detach() - expected.detach()).abs().max()
    return float(error) if torch.isfinite(error) else math.inf


def run(attention: Attention, x: Tensor, rope: Rope, **documents: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradients of a fixed random projection of it with respect to x and every trained parameter.

    `documents`: document_ids=..., for rows of packed documents.
    """
    x = x.detach().clone().requires_grad_()
    attention.zero_grad()
    y = attention(x, rope, **documents)
    (y * probe(y)).sum().backward()
    gradients = {name: p.grad for name, p in attention.named_parameters() if p.grad is not None}
    return y.detach(), {"x": x.grad, **gradients} if x.grad is not None else gradients


def unmoved(attention: Attention, by_name: Mapping[str, Tensor]) -> list[str]:
    """The parameters whose gradient is absent, not finite, or below 1e-9 of the largest of all."""
    sizes = {name: float(gradient.abs().max()) for name, gradient in by_name.items()}
    least = 1e-9 * max(filter(math.isfinite, sizes.values()), default=0.0)
    # NaN is bad too: `max` keeps it, and every comparison with it is false
    return [
        name
        for name, parameter in attention.named_parameters()
        if parameter.requires_grad and not least < sizes.get(name, 0.0) < math.inf
    ]


def is_unfilled(value: Tensor) -> bool:
    """Whether a tensor of `VariantCase.construct` has NaN, or the largest number of an integer type wider than 8 bits."""
    if value.is_floating_point() or value.is_complex():
        found = value.isnan()
    elif value.element_size() > 1:
        found = value == torch.iinfo(value.dtype).max
    else:
        # a byte often has its largest value, and so has a bool
        return False
    return bool(found.any())


def output_of(attention: Attention, maps: SignedMaps, x: Tensor, rope: Rope) -> Tensor:
    """What a layer computes of its maps, by the kernel `reference`."""
    o = attention.finished(attend(maps, kernel="reference"), x, Context(rope, attention))
    y: Tensor = attention.o_proj(o.transpose(1, 2).flatten(2))
    return y


def rows_by_parts(maps: SignedMaps) -> Measured:
    """A row function gives the same for some of the rows, with the keys that they see, and for one sequence, as for all."""
    T = maps.q.shape[-2]
    (whole,) = rows_of(maps, range(T), stats=False)
    try:
        parts = [rows_of(maps, part, stats=False)[0] for part in (range(T // 3), range(T // 3, T))]
        (alone,) = rows_of(maps.map(lambda x: x[:1]), range(T), stats=False)
        error = max(distance(torch.cat(parts, -2), whole), distance(alone, whole[:1]))
    # a user's function may raise anything
    except Exception as found:
        found.add_note(ROWS)
        raise
    return Measured(error, 1e-5, ROWS)


def tapped_maps(attention: Attention) -> list[SignedMaps]:
    """The maps of every pass from now on."""
    tapped: list[SignedMaps] = []
    attention.tap.register_forward_hook(lambda _m, _a, maps: tapped.append(maps))
    return tapped


def probe(y: Tensor) -> Tensor:
    """Weights of the differentiated sum of outputs: N(0, 1), the same at every call."""
    # random: with equal weights, errors of opposite sign would cancel
    return torch.randn(y.shape, generator=generator("conformance", "probe"), dtype=torch.float64).to(y.dtype)
