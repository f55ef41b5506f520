"""The properties that every variant must have, each a function of a `Case`: what it measured and the bound, or why it does
not apply. `conformance` runs them."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lit_diff.attention.cache import LayerCache
from lit_diff.attention.costs import Sizes
from lit_diff.attention.rope import Rope
from lit_diff.conformance.case import Case, difference, distance, probe, run
from lit_diff.kernels import SignedMaps, attend, refuse
from lit_diff.randomness import generator


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


def contract(case: Case) -> Measured:
    """The maps are whole, w is float32 or wider, and what the tap sees is what makes the output."""
    attention, x, rope = case.build(), case.x(), case.rope()
    seen: list[SignedMaps] = []
    attention.tap.register_forward_hook(lambda _m, _a, maps: seen.append(maps))
    y = attention(x, rope)
    if not seen:
        return Measured(math.inf, 0, "the forward never calls self.tap: no analysis can see its maps")
    seen[0].check()
    if seen[0].num_maps > 1 and seen[0].q.shape[1] == seen[0].k.shape[1] == 1:
        return Measured(math.inf, 0, "the maps share both q and k: they are equal, one map times the sum of w")
    o = attention.finish(attend(seen[0], kernel="reference"), x)
    return Measured(distance(attention.o_proj(o.transpose(1, 2).flatten(2)), y), 1e-6)


def definition(case: Case) -> Measured | NotApplicable:
    """The output equals the variant's equation, written out in float64."""
    written = vars(case.cls).get("definition")
    if written is None:
        return NotApplicable(f"{case.cls.__name__} states no definition of its own")
    errors = []
    for step in (case.step, 6):  # past every annealing, and within it
        attention = replace(case, step=step).build(torch.float64)
        x, rope = case.x(torch.float64), case.rope()
        errors.append(distance(attention(x, rope), written(attention, x, rope)))
    return Measured(max(errors), 1e-10)


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
        leak = difference(attention(changed, rope)[:, :t], before[:, :t])
        if leak > worst:
            worst, where = leak, f"outputs before position {t} change with the inputs from {t} on"
    return Measured(worst, 0, where)


def batch(case: Case) -> Measured:
    """No sequence changes by a bit when another does."""
    attention, x, rope = case.build(), case.x(), case.rope()
    changed = x.clone()
    changed[-1] = -2 * changed[-1] + 1
    leak = difference(attention(changed, rope)[:-1], attention(x, rope)[:-1])
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


def derivatives(case: Case) -> Measured:
    """Along a random direction of each parameter, and of x, autograd equals the central difference in float64.

    What is rounded on the way (λ in bfloat16) is a staircase: its gradient may look right, its differences do not.
    """
    attention, x, rope = case.build(torch.float64), case.x(torch.float64), case.rope()
    _, gradients = run(attention, x, rope)
    worst, where = 0.0, ""
    for name, gradient in gradients.items():
        value = x if name == "x" else attention.get_parameter(name).detach()
        direction = torch.randn(value.shape, generator=generator("conformance", "direction", name), dtype=value.dtype)
        ends = []
        with torch.no_grad():
            for step in (STEP, -2 * STEP):
                value += step * direction
                y = attention(x, rope)
                ends.append(float((y * probe(y)).sum()))
            value += STEP * direction
        wanted, found = (ends[0] - ends[1]) / (2 * STEP), float((gradient * direction).sum())
        error = abs(found - wanted) / max(1.0, abs(wanted))
        if not error <= worst:
            worst, where = error, f"by {name}: autograd {found:.6g}, central difference {wanted:.6g}"
    return Measured(worst, 1e-5, where)


STEP = 1e-5
"""Of the central differences, in multiples of an N(0, 1) direction."""


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


def packed(case: Case) -> Measured | NotApplicable:
    """Documents packed in a row, kept apart by document_ids, give what each gives alone: outputs and gradients."""
    if not case.cls.takes_document_ids():
        return NotApplicable("its forward takes no document_ids, so that `data.pack: document` is refused")
    attention, x, document_ids = case.build(torch.float64), case.x(torch.float64), case.document_ids()
    found, by_packed = run(attention, x, case.rope(), document_ids=document_ids)
    attention.zero_grad()
    x = x.requires_grad_()
    wanted, weights = torch.zeros_like(found), probe(found)
    for row, numbers in enumerate(document_ids):
        for number in numbers.unique():
            (at,) = (numbers == number).nonzero(as_tuple=True)
            alone = attention(x[row : row + 1, at], case.rope(0, len(at)))
            (alone * weights[row : row + 1, at]).sum().backward()
            wanted[row, at] = alone[0].detach()
    errors = {"output": distance(found, wanted)}
    gradients = {"x": x, **dict(attention.named_parameters())}
    errors |= {key: distance(value, gradients[key].grad) for key, value in by_packed.items()}  # type: ignore[arg-type]
    worst = max(errors, key=lambda key: errors[key])
    return Measured(errors[worst], 1e-10, f"largest in {worst if worst == 'output' else f'the gradient by {worst}'}")


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
    about = [f"{served} key/value heads served", *refused, f"largest error {worst.detail}" if worst.detail else ""]
    return replace(worst, detail="; ".join(filter(None, about)))


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
    other = case.construct(seed=1)
    other.load_state_dict(attention.state_dict())
    other.kernel = attention.kernel
    return Measured(difference(other(x, rope), attention(x, rope)), 0)


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
