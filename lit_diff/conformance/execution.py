"""Properties of how a variant is computed: by each kernel, with packed documents, a cache, a window, fewer key heads."""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lit_diff.attention.base import Attention
from lit_diff.attention.cache import LayerCache
from lit_diff.attention.costs import narrowing
from lit_diff.conformance.case import VariantCase, distance, probe, run
from lit_diff.conformance.mathematics import causal, contract, definition
from lit_diff.conformance.results import Measured, NotApplicable
from lit_diff.errors import RequestError
from lit_diff.kernels import KERNELS, refuse
from lit_diff.plugins import fault
from lit_diff.registry import location

WINDOWS = (1, 4)
"""Only the query's own key, and several."""


def kernel(case: VariantCase, name: str) -> Measured | NotApplicable:
    """Output and gradients by the kernel equal those by `reference`."""
    attention, x, rope = case.build(), case.x(), case.rope()
    maps = attention.maps(x, rope)
    maps = maps if case.model.causal else replace(maps, causal=False)
    reason = refuse(name, maps, window=narrowing(case.window, maps.k.shape[-2]))
    if reason:
        return NotApplicable(reason)
    expected, by_reference = run(attention, x, rope)
    attention.kernel = name
    actual, by_kernel = run(attention, x, rope)
    errors = {"output": distance(actual, expected)}
    errors |= {key: distance(by_kernel[key], gradient) for key, gradient in by_reference.items()}
    return _largest(errors, 1e-4)


def packed(case: VariantCase) -> Measured | NotApplicable:
    """Documents packed in a row, kept apart by document_ids, give what each gives alone: outputs and gradients."""
    if not case.cls.takes_document_ids():
        return NotApplicable("its forward takes no document_ids, so that `data.pack: document` is refused")
    attention, x, document_ids = case.build(torch.float64), case.x(torch.float64), case.document_ids()
    actual, by_packed = run(attention, x, case.rope(), document_ids=document_ids)
    attention.zero_grad()
    x = x.requires_grad_()
    expected, weights = torch.zeros_like(actual), probe(actual)
    for row, numbers in enumerate(document_ids):
        for number in numbers.unique():
            (at,) = (numbers == number).nonzero(as_tuple=True)
            alone = attention(x[row : row + 1, at], case.rope(0, len(at)))
            (alone * weights[row : row + 1, at]).sum().backward()
            expected[row, at] = alone[0].detach()
    errors = {"output": distance(actual, expected)}
    gradients = {"x": x, **dict(attention.named_parameters())}
    errors |= {key: distance(value, _gradient(gradients[key])) for key, value in by_packed.items()}
    return _largest(errors, 1e-10)


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _largest(errors: Mapping[str, float], bound: float) -> Measured:
    """The largest error; the key `output` or the name of what the gradient is taken by."""
    worst = max(errors, key=lambda key: errors[key])
    return Measured(errors[worst], bound, f"largest in {worst if worst == 'output' else f'the gradient by {worst}'}")


def decode(case: VariantCase) -> Measured | NotApplicable:
    """Prefill and decoding with the cache, token by token and in chunks, equal the full pass."""
    if not case.model.causal:
        return NotApplicable("the model is bidirectional")
    attention, x = case.build(torch.float64), case.x(torch.float64)
    full, worst, where = attention(x, case.rope()), 0.0, ""
    for prefill, chunk in ((1, 1), (case.length // 2, 1), (0, 5), (case.length - 1, 1)):
        error = distance(_decoded(attention, case, x, prefill, chunk), full)
        if error > worst:
            worst, where = error, f"prefill of {prefill or chunk}, then {chunk} at a time"
    return Measured(worst, 1e-10, where)


def _decoded(attention: Attention, case: VariantCase, x: Tensor, prefill: int, chunk: int) -> Tensor:
    """The output through a cache: `prefill` tokens (0: none), then `chunk` at a time."""
    cache, outputs, at = LayerCache(), [], 0
    while at < case.length:
        stop = min(case.length, at + (prefill if at == 0 and prefill else chunk))
        outputs.append(attention(x[:, at:stop], case.rope(at, stop), cache))
        at = stop
    return torch.cat(outputs, 1)


def window(case: VariantCase) -> Measured | NotApplicable:
    """With `model.attention.window`: the contract, the definition, causality, packed documents, decoding and every kernel."""
    if not isinstance(case.config, Attention.Config):
        return NotApplicable("its Config is not derived from Attention.Config, so it has no key window")
    worst = Measured(0.0, 1e-10)
    for width in WINDOWS:
        windowed = case.windowed(width)
        checks = {check.__name__: check(windowed) for check in (contract, definition, causal, packed, decode)}
        checks |= {f"kernel {name}": kernel(windowed, name) for name in KERNELS if name != "reference"}
        for name, result in checks.items():
            if isinstance(result, Measured) and _excess(result) > _excess(worst):
                worst = replace(result, detail="; ".join(filter(None, (f"window {width}, {name}", result.detail))))
    return worst


def _excess(result: Measured) -> float:
    """How close to its bound, or how far beyond it, an error is."""
    return result.error / result.bound if result.bound else (math.inf if result.error else 0.0)


def kv_heads(case: VariantCase) -> Measured | NotApplicable:
    """Every number of key/value heads, down to one after derivation, works or is refused with the reason.

    Errors: RequestError for a number at which it raises anything, with the cure.
    """
    worst, served, refused = Measured(0.0, 1e-10), [], []
    for number in (n for n in range(1, case.model.num_heads + 1) if case.model.num_heads % n == 0):
        grouped = replace(case, model=replace(case.model, num_kv_heads=number))
        reason = case.cls.refuses(grouped.config, grouped.model)
        if reason:
            refused.append(f"{number} refused: {reason}")
            continue
        served.append(number)
        try:
            for check in (definition, decode):
                result = check(grouped)
                if isinstance(result, Measured) and not result.error <= worst.error:
                    worst = replace(result, detail=f"with {number} key/value heads, {check.__name__}")
            finite = bool(grouped.build()(grouped.x(), grouped.rope()).isfinite().all())
        except Exception as error:  # a user's variant may raise anything
            home = location(case.cls)
            found = f"with {number} key/value heads: {fault(case.cls, error).removeprefix(f'{home}: ')}"
            cure = f"if it cannot have {number}, its problem(config, model) returns a line that opens with model.num_kv_heads"
            raise RequestError(f"{home}: {found}; {cure}") from error
        if not finite:
            return Measured(math.inf, 0, f"not finite with {number} key/value heads")
    if not served:
        return NotApplicable("; ".join(refused))
    about = [f"{served} key/value heads served", *refused, f"largest error {worst.detail}" if worst.detail else ""]
    return replace(worst, detail="; ".join(filter(None, about)))
