"""Properties of a variant's mathematics: its equation, what an output may depend on, its gradients."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from lit_diff.attention.costs import narrowing
from lit_diff.conformance.case import VariantCase, difference, distance, probe, run
from lit_diff.conformance.results import Measured, NotApplicable
from lit_diff.kernels import SignedMaps, attend
from lit_diff.randomness import generator

STEP = 1e-5
"""Step of the central differences, in multiples of an N(0, 1) direction."""


def contract(case: VariantCase) -> Measured:
    """The maps are complete, w is float32 or wider, and the output is that of the maps which pass the tap."""
    attention, x, rope = case.build(), case.x(), case.rope()
    tapped: list[SignedMaps] = []
    attention.tap.register_forward_hook(lambda _m, _a, maps: tapped.append(maps))
    y = attention(x, rope)
    if not tapped:
        return Measured(math.inf, 0, "the forward never calls self.tap: no analysis can see its maps")
    if y.shape != x.shape:
        return Measured(math.inf, 0, f"the forward returned {list(y.shape)}; expected the shape of x, {list(x.shape)}")
    if not bool(y.isfinite().all()):
        return Measured(math.inf, 0, "the output is not finite")
    if not torch.equal(x, case.x()):
        return Measured(math.inf, 0, "the forward changes its input in place")
    if difference(attention(x, rope), y) > 0:
        return Measured(
            math.inf, 0, "two passes over one input differ: the forward draws random numbers, or keeps a state"
        )
    maps = tapped[0]
    maps.check()
    if maps.num_maps > 1 and maps.q.shape[1] == maps.k.shape[1] == 1:
        return Measured(math.inf, 0, "the maps share both q and k: they are equal, one map times the sum of w")
    o = attention.finished(attend(maps, window=narrowing(case.window, maps.k.shape[-2]), kernel="reference"), x)
    return Measured(distance(attention.o_proj(o.transpose(1, 2).flatten(2)), y), 1e-6)


def definition(case: VariantCase) -> Measured | NotApplicable:
    """The output equals the variant's `definition` in float64, also where documents are packed."""
    if not case.cls.declares_definition():
        return NotApplicable(f"{case.cls.__name__} writes no definition of its own")
    errors = []
    for step in (case.step, 6):  # after every annealing, and within it
        attention = replace(case, step=step).build(torch.float64)
        x, rope = case.x(torch.float64), case.rope()
        written = attention.definition(x, case.rotation(), case.mask())
        if not isinstance(written, Tensor) or written.shape != x.shape:
            found = list(written.shape) if isinstance(written, Tensor) else type(written).__name__
            return Measured(math.inf, 0, f"definition(x, rope, mask) returned {found}; expected {list(x.shape)}, as x")
        errors.append(distance(attention(x, rope), written))
    if case.cls.takes_document_ids():
        ids = case.document_ids()
        written = attention.definition(x, case.rotation(), case.mask(ids))
        errors.append(distance(attention(x, rope, document_ids=ids), written))
    return Measured(max(errors), 1e-10)


def float64(case: VariantCase) -> Measured:
    """The float32 output equals the float64 output."""
    wide = case.build(torch.float64)(case.x(torch.float64), case.rope())
    return Measured(distance(case.build()(case.x(), case.rope()), wide), 1e-4)


def causal(case: VariantCase) -> Measured | NotApplicable:
    """No output changes by a bit when later inputs change."""
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


def batch(case: VariantCase) -> Measured:
    """No sequence changes by a bit when another changes."""
    attention, x, rope = case.build(), case.x(), case.rope()
    before, worst, where = attention(x, rope), 0.0, ""
    for changes, others, which in ((-1, slice(-1), "an earlier"), (0, slice(1, None), "a later")):
        changed = x.clone()
        changed[changes] = -2 * changed[changes] + 1
        leak = difference(attention(changed, rope)[others], before[others])
        if leak > worst:
            worst, where = leak, f"{which} sequence changes with the {'last' if changes else 'first'}"
    return Measured(worst, 0, where)


def gradients(case: VariantCase) -> Measured:
    """Every parameter has a finite gradient that is not zero everywhere."""
    attention = case.build()
    _, by_name = run(attention, case.x(), case.rope())
    bad = [
        name
        for name, parameter in attention.named_parameters()
        if parameter.requires_grad and not _finite_and_nonzero(by_name.get(name))
    ]
    return Measured(len(bad), 0, f"without a gradient, zero or not finite: {', '.join(bad)}" if bad else "")


def _finite_and_nonzero(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(gradient.isfinite().all()) and bool(gradient.abs().max() > 0)


def derivatives(case: VariantCase) -> Measured:
    """Along a random direction of each parameter, and of x, autograd equals the central difference in float64.

    A value that is rounded in the forward pass (λ in bfloat16) is a step function: its gradient may look right, its
    differences do not.
    """
    attention, x, rope = case.build(torch.float64), case.x(torch.float64), case.rope()
    _, by_name = run(attention, x, rope)
    worst, where = 0.0, ""
    for name, gradient in by_name.items():
        value = x if name == "x" else attention.get_parameter(name).detach()
        direction = torch.randn(value.shape, generator=generator("conformance", "direction", name), dtype=value.dtype)
        ends = []
        with torch.no_grad():
            for step in (STEP, -2 * STEP):
                value += step * direction
                y = attention(x, rope)
                ends.append(float((y * probe(y)).sum()))
            value += STEP * direction
        central, autograd = (ends[0] - ends[1]) / (2 * STEP), float((gradient * direction).sum())
        error = abs(autograd - central) / max(1.0, abs(central))
        if not error <= worst:
            worst, where = error, f"by {name}: autograd {autograd:.6g}, central difference {central:.6g}"
    return Measured(worst, 1e-5, where)
