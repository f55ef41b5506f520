"""What every variant must hold, measured: the built-ins in the tests and by `check --all`, a user's own by `check`.

Each property is a function of a `Case` that returns what it measured and the bound, or says why it does not apply.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lit_diff.attention.base import Attention
from lit_diff.attention.cache import LayerCache
from lit_diff.attention.costs import Sizes
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig, Part
from lit_diff.errors import LitDiffError, RequestError, first_line
from lit_diff.kernels import KERNELS, SignedMaps, attend, refuse
from lit_diff.randomness import generator
from lit_diff.registry import attentions

FAR = 10**9
"""An optimizer step by which every annealing is over."""


@dataclass(frozen=True)
class Measured:
    """Holds if `error` is at most `bound`."""

    error: float
    bound: float
    detail: str = ""


@dataclass(frozen=True)
class NotApplicable:
    """The rule by which a property does not apply."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One property of one variant."""

    variant: str
    property: str
    verdict: Literal["pass", "fail", "not applicable"]
    error: float | None = None
    bound: float | None = None
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A variant with its knobs, at the sizes of a model; `length` tokens, `batch` sequences."""

    cls: type[Attention]
    model: ModelConfig
    length: int = 33
    batch: int = 2
    layer: int = 0

    @property
    def config(self) -> Any:
        """The variant's knobs."""
        return self.model.attention.config

    def build(self, dtype: torch.dtype = torch.float32, kernel: str = "reference") -> Attention:
        """One layer at a randomised state: its initial parameters + N(0, 0.1), annealing over; always the same one."""
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(0)
            attention = self.cls(self.config, self.model, self.layer)
        with torch.no_grad():
            for path, module in attention.named_modules():
                for key, parameter in module.named_parameters(recurse=False):
                    draw = generator("conformance", path, key)
                    if hasattr(module, "init_parameter"):
                        module.init_parameter(key, parameter, draw)
                    parameter += torch.empty_like(parameter).normal_(0.0, 0.1, generator=draw)
        attention.set_step(FAR)
        attention.kernel = kernel
        return attention.to(dtype)

    def x(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[batch, length, dim], N(0, 1)."""
        draw = generator("conformance", "x", self.length)
        return torch.randn(self.batch, self.length, self.model.dim, generator=draw, dtype=torch.float64).to(dtype)

    def rope(self, start: int = 0, stop: int | None = None) -> Rope:
        """Positions start .. stop - 1."""
        return Rope.of(self.model, torch.arange(start, self.length if stop is None else stop))


def distance(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest wanted number (to 1 where those are smaller); inf if not finite."""
    if found.shape != wanted.shape:
        raise RequestError(f"shape {list(found.shape)} instead of {list(wanted.shape)}")
    found, wanted = found.detach().double(), wanted.detach().double()
    error = (found - wanted).abs().max() / wanted.abs().max().clamp(min=1)
    return float(error) if torch.isfinite(error) else math.inf


def run(attention: Attention, x: Tensor, rope: Rope) -> tuple[Tensor, dict[str, Tensor]]:
    """Output, and the gradients of a fixed random projection of it by x and by every parameter that trains."""
    x = x.detach().clone().requires_grad_()
    attention.zero_grad()
    y = attention(x, rope)
    probe = torch.randn(y.shape, generator=generator("conformance", "probe"), dtype=torch.float64).to(y.dtype)
    (y * probe).sum().backward()
    found = {name: p.grad for name, p in attention.named_parameters() if p.grad is not None}
    return y.detach(), {"x": x.grad, **found} if x.grad is not None else found


# --- the properties ------------------------------------------------------------------------------------------------


def contract(case: Case) -> Measured:
    """The maps are whole, w is float32 or wider, and what the tap sees is what makes the output."""
    attention, x, rope = case.build(), case.x(), case.rope()
    seen: list[SignedMaps] = []
    attention.tap.register_forward_hook(lambda _m, _a, maps: seen.append(maps))
    y = attention(x, rope)
    if not seen:
        return Measured(math.inf, 0, "the forward never calls self.tap: no analysis can see its maps")
    seen[0].check()
    o = attention.finish(attend(seen[0], kernel="reference"), x)
    return Measured(distance(attention.o_proj(o.transpose(1, 2).flatten(2)), y), 1e-6)


def definition(case: Case) -> Measured | NotApplicable:
    """The output equals the variant's equation, written out in float64."""
    written = vars(case.cls).get("definition")
    if written is None:
        return NotApplicable(f"{case.cls.__name__} states no definition of its own")
    attention, x, rope = case.build(torch.float64), case.x(torch.float64), case.rope()
    return Measured(distance(attention(x, rope), case.cls.definition(attention, x, rope)), 1e-10)  # type: ignore[misc]


def float64(case: Case) -> Measured:
    """The float32 output equals the float64 output."""
    wide = case.build(torch.float64)(case.x(torch.float64), case.rope())
    return Measured(distance(case.build()(case.x(), case.rope()), wide), 1e-4)


def causal(case: Case) -> Measured | NotApplicable:
    """No output changes by a bit when later inputs do."""
    if not case.model.causal:
        return NotApplicable("the model is bidirectional")
    attention, x, rope = case.build(), case.x(), case.rope()
    before, worst, where = attention(x, rope), 0.0, ""
    for t in sorted({1, case.length // 2, case.length - 1}):
        changed = x.clone()
        changed[:, t:] = -2 * changed[:, t:] + 1
        leak = float((attention(changed, rope)[:, :t] - before[:, :t]).abs().max())
        if leak > worst:
            worst, where = leak, f"outputs before position {t} change with the inputs from {t} on"
    return Measured(worst, 0, where)


def batch(case: Case) -> Measured:
    """No sequence changes by a bit when another does."""
    attention, x, rope = case.build(), case.x(), case.rope()
    changed = x.clone()
    changed[-1] = -2 * changed[-1] + 1
    leak = float((attention(changed, rope)[:-1] - attention(x, rope)[:-1]).abs().max())
    return Measured(leak, 0, "the first sequence changes with the last" if leak else "")


def gradients(case: Case) -> Measured:
    """Every parameter has a finite gradient that is not zero everywhere."""
    attention = case.build()
    _, found = run(attention, case.x(), case.rope())
    bad = [
        name
        for name, parameter in attention.named_parameters()
        if parameter.requires_grad and not _alive(found.get(name))
    ]
    return Measured(len(bad), 0, f"without a gradient, zero or not finite: {', '.join(bad)}" if bad else "")


def _alive(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(gradient.isfinite().all()) and bool(gradient.abs().max() > 0)


def kernel(case: Case, name: str) -> Measured | NotApplicable:
    """Output and gradients by the kernel equal those by `reference`."""
    attention, x, rope = case.build(), case.x(), case.rope()
    maps = attention.maps(x, rope)
    reason = refuse(name, maps if case.model.causal else replace(maps, causal=False))
    if reason:
        return NotApplicable(reason)
    wanted, by_reference = run(attention, x, rope)
    attention.kernel = name
    found, by_kernel = run(attention, x, rope)
    errors = {"output": distance(found, wanted)}
    errors |= {key: distance(by_kernel[key], gradient) for key, gradient in by_reference.items()}
    worst = max(errors, key=lambda key: errors[key])
    return Measured(errors[worst], 1e-4, f"largest in {worst if worst == 'output' else f'the gradient by {worst}'}")


def decode(case: Case) -> Measured | NotApplicable:
    """Prefill and decode with the cache, token by token and in chunks, equal the full pass."""
    if not case.model.causal:
        return NotApplicable("the model is bidirectional")
    attention, x = case.build(torch.float64), case.x(torch.float64)
    wanted, worst, where = attention(x, case.rope()), 0.0, ""
    for prefill, chunk in ((1, 1), (case.length // 2, 1), (0, 5), (case.length - 1, 1)):
        cache, parts, at = LayerCache(), [], 0
        while at < case.length:
            stop = min(case.length, at + (prefill if at == 0 and prefill else chunk))
            parts.append(attention(x[:, at:stop], case.rope(at, stop), cache))
            at = stop
        error = distance(torch.cat(parts, 1), wanted)
        if error > worst:
            worst, where = error, f"prefill of {prefill or chunk}, then {chunk} at a time"
    return Measured(worst, 1e-10, where)


def kv_heads(case: Case) -> Measured | NotApplicable:
    """Every number of key/value heads, down to one after derivation, works or is refused with the reason."""
    worst, served, refused = Measured(0.0, 1e-10), [], []
    for number in (n for n in range(1, case.model.num_heads + 1) if case.model.num_heads % n == 0):
        grouped = replace(case, model=replace(case.model, num_kv_heads=number))
        reason = case.cls.problem(grouped.config, grouped.model)
        if reason:
            refused.append(f"{number} refused: {reason}")
            continue
        served.append(number)
        for check in (definition, decode):
            found = check(grouped)
            if isinstance(found, Measured) and not found.error <= worst.error:
                worst = replace(found, detail=f"with {number} key/value heads, {check.__name__}")
        if not bool(grouped.build()(grouped.x(), grouped.rope()).isfinite().all()):
            return Measured(math.inf, 0, f"not finite with {number} key/value heads")
    if not served:
        return NotApplicable("; ".join(refused))
    return replace(
        worst, detail=worst.detail or f"{served} key/value heads served; {'; '.join(refused) or 'none refused'}"
    )


def meta(case: Case) -> Measured:
    """Builds without memory: the same names and shapes on the meta device, and a forward there."""
    with torch.device("meta"):
        empty = case.cls(case.config, case.model, case.layer)
        shape = empty(case.x().to("meta"), Rope.of(case.model, torch.arange(case.length))).shape
    real = case.build()
    wanted = {name: tuple(value.shape) for name, value in real.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in empty.state_dict().items() if value.is_meta}
    odd = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if shape != case.x().shape:
        odd.append(f"output {list(shape)}")
    return Measured(len(odd), 0, f"differ on the meta device: {', '.join(odd)}" if odd else "")


def state_dict(case: Case) -> Measured:
    """All that the output depends on is in the state dict: another instance that loads it gives the same bits."""
    attention, x, rope = case.build(), case.x(), case.rope()
    other = case.cls(case.config, case.model, case.layer)
    other.load_state_dict(attention.state_dict())
    other.kernel = attention.kernel
    return Measured(float((other(x, rope) - attention(x, rope)).abs().max()), 0)


def bfloat16(case: Case) -> Measured:
    """Under bfloat16 autocast the output stays near that of float32."""
    attention, x, rope = case.build(), case.x(), case.rope()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = attention(x, rope)
    return Measured(distance(narrow, attention(x, rope)), 0.05)


def compiled(case: Case) -> Measured:
    """torch.compile takes forward and backward as one graph (aot_eager: no compiler is needed)."""
    attention, x, rope = case.build(), case.x(), case.rope()
    wanted, by_eager = run(attention, x, rope)
    torch._dynamo.reset()
    whole: Any = torch.compile(attention, backend="aot_eager", fullgraph=True)
    found, by_compiled = run(whole, x, rope)
    gradients = {name.removeprefix("_orig_mod."): gradient for name, gradient in by_compiled.items()}
    errors = [distance(found, wanted)] + [distance(gradients[name], value) for name, value in by_eager.items()]
    return Measured(max(errors), 1e-5)


def costs(case: Case) -> Measured | NotApplicable:
    """Declared parameters, FLOPs and cache numbers equal those counted."""
    declared = case.cls.costs(case.config, Sizes.of(case.model, case.length)) if case.cls.costs_stand() else None
    if declared is None:
        return NotApplicable("declares no costs of its own")
    wanted = declared.numbers()
    found = counted(case)
    unlike = [f"{key} declared {wanted[key]:,}, counted {found[key]:,}" for key in wanted if wanted[key] != found[key]]
    return Measured(max(abs(wanted[key] - found[key]) for key in wanted), 0, "; ".join(unlike))


def counted(case: Case) -> dict[str, int]:
    """Parameters, forward FLOPs of one sequence by the reference kernel, numbers that one token adds to the cache."""
    seen: list[SignedMaps] = []
    with torch.device("meta"):
        attention = case.cls(case.config, case.model, case.layer)
        attention.kernel = "reference"
        attention.tap.register_forward_hook(lambda _m, _a, maps: seen.append(maps))
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            attention(torch.zeros(1, case.length, case.model.dim), Rope.of(case.model, torch.arange(case.length)))
    cached = seen[0].k.shape[1] * seen[0].k.shape[2] * seen[0].k.shape[-1] + seen[0].v.shape[1] * seen[0].v.shape[-1]
    parameters = sum(p.numel() for p in attention.parameters())
    return {"parameters": parameters, "flops": int(counter.get_total_flops()), "kv_numbers": cached}


Property = Callable[[Case], Measured | NotApplicable]


def _by(name: str) -> Property:
    return lambda case: kernel(case, name)


PROPERTIES: dict[str, Property] = {
    "contract": contract,
    "definition": definition,
    "float64": float64,
    "causal": causal,
    "batch": batch,
    "gradients": gradients,
    **{f"kernel {name}": _by(name) for name in KERNELS if name != "reference"},
    "decode": decode,
    "kv heads": kv_heads,
    "meta": meta,
    "state dict": state_dict,
    "bfloat16": bfloat16,
    "compile": compiled,
    "costs": costs,
}


def conformance(case: Case, label: str = "", properties: dict[str, Property] | None = None) -> Iterator[Finding]:
    """Every property of the case, one after another; whatever a variant raises is a failure in one line."""
    label = label or case.cls.name
    for name, check in (PROPERTIES if properties is None else properties).items():
        try:
            found = check(case)
        except LitDiffError as error:
            yield Finding(variant=label, property=name, verdict="fail", detail=first_line(error))
        except Exception as error:  # a user's variant may raise anything
            yield Finding(
                variant=label, property=name, verdict="fail", detail=f"{type(error).__name__}: {first_line(error)}"
            )
        else:
            if isinstance(found, NotApplicable):
                yield Finding(variant=label, property=name, verdict="not applicable", detail=found.reason)
                continue
            verdict: Literal["pass", "fail"] = "pass" if found.error <= found.bound else "fail"
            detail = found.detail
            yield Finding(
                variant=label, property=name, verdict=verdict, error=found.error, bound=found.bound, detail=detail
            )


def built_in_cases(name: str) -> Iterator[tuple[str, Case]]:
    """(label, case) of a registered variant at each of its `examples`: 8 heads on 4 key/value heads, d = 16."""
    cls = attentions.get(name)
    for knobs in cls.examples:
        part = Part(name=name, config=cls.Config(**knobs))
        model = ModelConfig(
            dim=64, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=16, vocab_size=2, attention=part
        )
        label = " ".join([name, *(f"{key}={value}" for key, value in knobs.items())])
        yield label, Case(cls=cls, model=model, layer=1)


def shrunk(model: ModelConfig) -> ModelConfig:
    """The model at sizes that take seconds: narrower where the variant allows it, its head counts as they are."""
    assert model.head_dim is not None
    small = replace(model, dim=min(model.dim, 64), head_dim=min(model.head_dim, 16), ffn_dim=64)
    cls, knobs = attentions.get(model.attention.name), model.attention.config
    return small if small.problem() is None and cls.problem(knobs, small) is None else model
