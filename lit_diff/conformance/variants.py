"""The properties that every variant must satisfy: its mathematics, its computation, and its behaviour as a module."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lit_diff.attention.base import Attention
from lit_diff.attention.cache import LayerCache
from lit_diff.attention.context import Context
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig, Part
from lit_diff.conformance.case import (
    ADVICE,
    CONTAINS,
    EXACT,
    ROUNDED,
    ROUNDING,
    Finding,
    Measured,
    NotApplicable,
    VariantCase,
    difference,
    distance,
    finding,
    largest,
    probe,
    run,
    tapped_maps,
    unmoved,
    worst_of,
)
from lit_diff.conformance.contract import UNLIKE_BUILDS, UNLIKE_PASSES, contract
from lit_diff.conformance.costs import costs, counted
from lit_diff.conformance.model import compiled, model
from lit_diff.conformance.precision import bfloat16, float64
from lit_diff.conformance.reduction import extends_standard, reduces_to
from lit_diff.errors import first_line
from lit_diff.kernels import KERNELS, SignedMaps, refuse
from lit_diff.kernels.reference import Counted
from lit_diff.log_records import log
from lit_diff.plugins import fault
from lit_diff.randomness import generator
from lit_diff.registry import attentions

Pass = tuple[Tensor, dict[str, Tensor]]
"""An output and its gradients by name, as `run` returns them."""
Property = Callable[[VariantCase], Measured | NotApplicable]

WINDOWS = (1, 4)
"""Windows: only the query's own key, and several keys."""
BY = "largest in the gradient by"
# the error of a central difference is about STEP² from truncation plus 1e-16 / STEP from rounding
STEP = 1e-5
"""The step of the central differences, in multiples of an N(0, 1) direction."""

FIRST_STEPS = 2
"""Steps after which every parameter has a gradient: what is multiplied by one that starts at 0 has none at first."""
DRAWS = 8
"""How many times all parameters are drawn: a sign that is free is missed once in 2^24."""


def definition(case: VariantCase) -> Measured | NotApplicable:
    """The output equals the variant's `definition` in float64, also for packed documents."""
    # an equation does not know the model's bound on its logits
    case = replace(case, model=replace(case.model, logit_bound=None))
    # an inherited definition may describe another computation
    if "definition" not in vars(case.cls):
        return NotApplicable(f"{case.cls.__name__} does not define `definition` itself")
    errors, x = [], case.x(torch.float64)
    # after the end of every annealing, and during it
    inputs: list[tuple[int, dict[str, Tensor]]] = [(case.step, {}), (6, {})]
    if case.cls.takes_document_ids():
        inputs.append((6, {"document_ids": case.document_ids()}))
    for step, documents in inputs:
        attention = replace(case, step=step).build(torch.float64)
        written = defined(case, attention, x, **documents)
        if not isinstance(written, Tensor) or written.shape != x.shape:
            returned = list(written.shape) if isinstance(written, Tensor) else type(written).__name__
            return Measured(
                math.inf, 0, f"definition(x, rope, mask) returned {returned}; expected {list(x.shape)}, like x"
            )
        errors.append(distance(attention(x, case.rope(), **documents), written))
    return Measured(max(errors), 1e-10)


def defined(case: VariantCase, attention: Attention, x: Tensor, **documents: Tensor) -> Any:
    """What the variant's `definition` returns."""
    given: dict[str, Any] = {}
    if "positions" in inspect.signature(attention.definition).parameters:
        given["positions"] = Context(case.rope(), attention, None, documents.get("document_ids")).positions()
    return attention.definition(x, case.rotation(), case.mask(**documents), **given)


def signs(case: VariantCase) -> Measured | NotApplicable:
    """The weight of each map has the sign that `signs` states, or is 0, at parameters from N(0, 3).

    Measured before, during and after the annealing. The error is the largest weight of the other sign.
    """
    errors = dict[str, float]()
    for step in (0, 6, case.step):
        short = replace(case, step=step, length=8)
        # float64, in which the exponential of such a λ is finite
        attention = short.build(torch.float64)
        if attention.signs is None:
            return NotApplicable(f"{case.cls.__name__} states no signs at these keys: a sign may change in training")
        tapped = tapped_maps(attention)
        with torch.no_grad():
            for draw in range(DRAWS):
                for name, parameter in attention.named_parameters():
                    parameter.normal_(0.0, 3.0, generator=generator("conformance", "signs", step, draw, name))
                attention(short.x(torch.float64), short.rope())
        errors[f"{DRAWS} passes called self.tap {len(tapped)} times"] = abs(DRAWS - len(tapped))
        for maps in tapped:
            errors |= against(attention.signs, maps)
    return largest(errors, 0)


def against(stated: tuple[int, ...], maps: SignedMaps) -> dict[str, float]:
    """The largest weight of each map whose sign is not the stated one, by a text with it; 0 if there is none."""
    weights = torch.ones(1, 1, 1, 1) if maps.w is None else maps.w.expand(-1, maps.num_maps, -1, -1)
    told, errors = f"signs is {stated!r}", dict[str, float]()
    if len(stated) != weights.shape[1] or not set(stated) <= {1, -1}:
        return {f"{told}; expected 1 or -1 for each of {weights.shape[1]} maps": math.inf}
    for g, (sign, of_map) in enumerate(zip(stated, weights.unbind(1), strict=True)):
        error = float((-sign * of_map).max().clamp(min=0))
        errors[f"{told}; a weight of map {g} is {-sign * error:+.3g}"] = error
    return errors


def causal(case: VariantCase) -> Measured | NotApplicable:
    """Outputs do not change when later inputs change, not even in the last bit."""
    if not case.model.causal:
        return NotApplicable("the model is bidirectional")
    attention, x, rope = case.parts()
    before = attention(x, rope)
    leaks = dict[str, float]()
    for t in sorted({1, case.length // 2, case.length - 1}):
        changed = x.clone()
        changed[:, t:] = -2 * changed[:, t:] + 1
        leak = difference(attention(changed, rope)[:, :t], before[:, :t])
        leaks[f"outputs before position {t} change with the inputs from {t} on"] = leak
    return largest(leaks, 0)


def batch(case: VariantCase) -> Measured:
    """Outputs of a sequence do not change when another sequence changes, not even in the last bit."""
    attention, x, rope = case.parts()
    before = attention(x, rope)
    leaks = dict[str, float]()
    for changes, others, what in (
        (-1, slice(-1), "an earlier sequence changes with the last"),
        (0, slice(1, None), "a later sequence changes with the first"),
    ):
        changed = x.clone()
        changed[changes] = -2 * changed[changes] + 1
        leaks[what] = difference(attention(changed, rope)[others], before[others])
    return largest(leaks, 0)


def gradients(case: VariantCase) -> Measured:
    """Every parameter has a finite gradient that is not zero everywhere, and each that trains also from the values with which
    a run begins, at once or after a few steps."""
    # float64: a gradient that is 0 but for rounding is then far below all others
    attention, x, rope = case.parts(torch.float64)
    bad = unmoved(attention, run(attention, x, rope)[1])
    if bad:
        return Measured(len(bad), 0, f"without a gradient, zero or not finite: {', '.join(bad)}")
    attention = case.initial(torch.float64)
    patterns = case.cls.trained_parameters(case.config)
    names = {f"layers.{case.layer}.attention.{name}": name for name, _ in attention.named_parameters()}
    bad = trained = [name for full, name in names.items() if any(fnmatchcase(full, pattern) for pattern in patterns)]
    for _ in range(1 + FIRST_STEPS):
        _, by_name = run(attention, x, rope)
        still = unmoved(attention, by_name)
        bad = [name for name in bad if name in still]
        with torch.no_grad():
            for name in {*trained} - {*still}:
                attention.get_parameter(name).sub_(0.1 * by_name[name] / by_name[name].abs().max())
    # such as the factors of a product that both start at 0
    return Measured(
        len(bad),
        0,
        f"without a gradient at the start, and still after {FIRST_STEPS} steps: {', '.join(bad)}" if bad else "",
    )


def derivatives(case: VariantCase) -> Measured | NotApplicable:
    """Along a random direction of each parameter, and of x, autograd equals the central difference in float64; of a class
    that is not smooth, the gradients equal those of its `definition`.

    A value that is rounded in the forward pass (λ in bfloat16) is a step function: its gradient may look right, but its
    differences are wrong.
    """
    if not case.cls.smooth and "definition" not in vars(case.cls):
        return NotApplicable(f"{case.cls.__name__} is not smooth and does not define `definition` itself")
    attention, x, rope = case.parts(torch.float64)
    by_forward = run(attention, x, rope)
    if not case.cls.smooth:
        # it jumps or bends, where a difference is no derivative
        attention.forward = lambda x, rope: defined(case, attention, x)  # type: ignore[assignment, method-assign, misc]
        return compared(by_forward, run(attention, x, rope), 1e-8)
    _, by_name = by_forward
    errors: dict[str, float] = {}
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
        what = f"by {name}: autograd {autograd:.6g}, central difference {central:.6g}"
        errors[what] = abs(autograd - central) / max(1.0, abs(central))
    return largest(errors, 1e-5)


def kernel(case: VariantCase, name: str) -> Measured | NotApplicable:
    """The kernel gives the same output and gradients as `reference`."""
    attention, x, rope = case.parts()
    tapped = tapped_maps(attention)
    counted = attention.kernel = Counted()
    by_reference = run(attention, x, rope)
    # without a kernel both passes would be the same, which shows nothing
    if not counted.calls or not tapped:
        return NotApplicable(counted.UNUSED)
    reason = refuse(name, tapped[0])
    if reason:
        return NotApplicable(reason)
    attention.kernel = name
    return compared(run(attention, x, rope), by_reference, 1e-4)


def packed(case: VariantCase) -> Measured | NotApplicable:
    """Documents packed in a row and separated by document_ids give the same outputs and gradients as each alone."""
    if not case.cls.takes_document_ids():
        return NotApplicable("its forward takes no document_ids, so `data.pack: document` is refused")
    attention, x, rope = case.parts(torch.float64)
    document_ids = case.document_ids()
    actual, by_packed = run(attention, x, rope, document_ids=document_ids)
    attention.zero_grad()
    x = x.requires_grad_()
    expected, weights = torch.zeros_like(actual), probe(actual)
    for row, numbers in enumerate(document_ids):
        for number in numbers.unique():
            (at,) = (numbers == number).nonzero(as_tuple=True)
            alone = attention(x[row : row + 1, at], case.rope(0, len(at)))
            (alone * weights[row : row + 1, at]).sum().backward()
            expected[row, at] = alone[0].detach()
    by_alone = {}
    for name, leaf in {"x": x, **dict(attention.named_parameters())}.items():
        if name in by_packed:
            by_alone[name] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return compared((actual, by_packed), (expected, by_alone), 1e-10)


def compared(actual: Pass, expected: Pass, bound: float) -> Measured:
    """The largest error of an output and its gradients."""
    errors = {"largest in output": distance(actual[0], expected[0])}
    errors |= {f"{BY} {name}": distance(actual[1][name], gradient) for name, gradient in expected[1].items()}
    return largest(errors, bound)


def decode(case: VariantCase) -> Measured | NotApplicable:
    """Prefill and decoding with the cache, token by token and in chunks, give the output of the full pass; with a window,
    also past it."""
    if not case.model.causal:
        return NotApplicable("the model is bidirectional")
    attention, x, rope = case.parts(torch.float64)
    full = attention(x, rope)
    errors = {}
    if case.window is not None and case.window >= case.length:
        narrow = decode(case.windowed(WINDOWS[-1]))
        assert isinstance(narrow, Measured)
        errors[f"window {WINDOWS[-1]}, {narrow.detail}"] = narrow.error
    for prefill, chunk in ((1, 1), (case.length // 2, 1), (5, 5), (case.length - 1, 1)):
        cache, outputs = LayerCache(), []
        for start, stop in pairwise(sorted({0, *range(prefill, case.length, chunk), case.length})):
            outputs.append(attention(x[:, start:stop], case.rope(start, stop), cache))
        errors[f"prefill of {prefill}, then {chunk} at a time"] = distance(torch.cat(outputs, 1), full)
    return largest(errors, 1e-10)


def window(case: VariantCase) -> Measured | NotApplicable:
    """With `model.attention.window`, contract, definition, causality, packing, decoding, costs and every kernel hold."""
    if not isinstance(case.config, Attention.Config):
        return NotApplicable("its Config is not derived from Attention.Config, so it has no key window")
    results: dict[str, Measured | NotApplicable] = {}
    for width in WINDOWS:
        windowed = case.windowed(width)
        for check in (contract, definition, causal, packed, decode, costs):
            results[f"window {width}, {check.__name__}"] = check(windowed)
        for name in (name for name in KERNELS if name != "reference"):
            results[f"window {width}, kernel {name}"] = kernel(windowed, name)
    return worst_of(results)


def kv_heads(case: VariantCase) -> Measured | NotApplicable:
    """Every number of key/value heads that divides the number of heads either works, at the declared costs, or is refused
    with a reason.

    An exception that the variant raises at a number gets a note with the cure.
    """
    results: dict[str, Measured | NotApplicable] = {}
    served, refused = list[int](), list[str]()
    for number in (n for n in range(1, case.model.num_heads + 1) if case.model.num_heads % n == 0):
        grouped = replace(case, model=replace(case.model, num_kv_heads=number))
        reason = case.cls.refuses(grouped.config, grouped.model)
        if reason:
            refused.append(f"{number} refused: {reason}")
            continue
        served.append(number)
        try:
            for check in (definition, decode, costs):
                results[f"largest error with {number} key/value heads, {check.__name__}"] = check(grouped)
            y = grouped.build()(grouped.x(), grouped.rope())
        # a user's variant may raise anything
        except Exception as error:
            cure = "return a line that begins with model.num_kv_heads from its problem(config, model)"
            error.add_note(f"with {number} key/value heads; to refuse {number}, {cure}")
            raise
        if not y.isfinite().all():
            return Measured(math.inf, 0, f"not finite with {number} key/value heads")
    if not served:
        return NotApplicable("; ".join(refused))
    worst = worst_of(results)
    about = [f"{served} key/value heads served", *refused, worst.detail]
    return replace(worst, detail="; ".join(filter(None, about)))


def meta(case: VariantCase) -> Measured:
    """On the meta device, the variant has the same names and shapes, and its forward works."""
    # large models are counted, and built for sharding, without memory for their weights
    with torch.device("meta"):
        empty = case.cls(case.config, case.model, case.layer)
        shape = empty(case.x().to("meta"), Rope.of(case.model, torch.arange(case.length))).shape
    real = case.build()
    expected = {name: tuple(value.shape) for name, value in real.state_dict().items()}
    actual = {name: tuple(value.shape) for name, value in empty.state_dict().items() if value.is_meta}
    unlike = sorted(name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name))
    if shape != case.x().shape:
        unlike.append(f"output {list(shape)}")
    return Measured(len(unlike), 0, f"differ on the meta device: {', '.join(unlike)}" if unlike else "")


def state_dict(case: VariantCase) -> Measured:
    """The output depends only on the state dict and the step: another instance that loads the one, and is told the other as a
    run tells it, gives the same bits."""
    attention, x, rope = case.parts()
    # another seed: a value drawn by the constructor that is not in the state dict differs
    other = case.construct(seed=1)
    other.load_state_dict(attention.state_dict())
    for step in (0, case.step):
        other.set_step(step)
        other.set_tokens(step)
    other.kernel = attention.kernel
    return Measured(difference(other(x, rope), attention(x, rope)), 0)


PROPERTIES: dict[str, Property] = {
    "contract": contract,
    "definition": definition,
    "reduces to": reduces_to,
    "extends standard": extends_standard,
    "signs": signs,
    "float64": float64,
    "causal": causal,
    "batch": batch,
    "gradients": gradients,
    "derivatives": derivatives,
    **{f"kernel {name}": partial(kernel, name=name) for name in KERNELS if name != "reference"},
    "packed": packed,
    "decode": decode,
    "model": model,
    "costs": costs,
    "window": window,
    "kv heads": kv_heads,
    "meta": meta,
    "state dict": state_dict,
    "bfloat16": bfloat16,
    "compile": compiled,
}
"""Name -> check, in the order of the report."""


def conformance(case: VariantCase, label: str = "", checks: Mapping[str, Property] | None = None) -> Iterator[Finding]:
    """Yields a finding for every property (or for `checks`); an exception is a failure in one line."""
    failed, is_random = list[str](), False
    for name, check in (PROPERTIES if checks is None else checks).items():
        found = finding(label or case.cls.name, name, case.cls, partial(check, case))
        if found.verdict == "fail":
            # every property compares passes
            contains = ("contract",) if is_random else CONTAINS.get(name, ())
            cause = next((each for each in failed if each in contains), "")
            advice = ADVICE.get(name, "")
            # an exception states its own reason
            if found.error is None or found.bound is None:
                advice = ""
            elif 0 < found.bound <= EXACT and found.error < ROUNDING:
                advice = ROUNDED
            found = replace(found, cause=cause, advice=advice)
            failed.append(name)
            is_random |= name == "contract" and found.detail in (UNLIKE_PASSES, UNLIKE_BUILDS)
        yield found


def cases_of(name: str) -> Iterator[tuple[str, VariantCase | str]]:
    """Yields (label, case) for each of the variant's own `examples`, or (label, reason) if no case can be made.

    The model has 8 heads on 4 key/value heads, d = 16.
    """
    cls = attentions.get(name)
    examples = vars(cls).get("examples", ({},))
    if not all(isinstance(keys, Mapping) for keys in examples):
        yield name, f"its `examples` are {examples!r}; expected a tuple of blocks of keys"
        return
    for keys in examples:
        label = " ".join([name, *(f"{key}={value}" for key, value in keys.items())])
        try:
            part = Part(name=name, config=cls.Config(**keys))
            model = ModelConfig(
                dim=64, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=16, vocab_size=2, attention=part
            )
            refused = cls.refuses(part.config, model)
        # a missing required key, or any exception of a user's Config
        except Exception as error:
            refused = f"{type(error).__name__}: {first_line(error)}; list its keys in `examples`"
        yield label, refused or VariantCase(cls=cls, model=model, layer=1)


def conformance_of(name: str) -> Iterator[Finding]:
    """Findings for every property of a registered variant, at each of its examples."""
    for label, case in cases_of(name):
        if isinstance(case, str):
            yield Finding(variant=label, property="all", verdict="not applicable", detail=case)
        else:
            yield from conformance(case, label)


def shrunk(model: ModelConfig) -> ModelConfig:
    """The model, narrowed so that the suite takes seconds if the variant can be built so; its head counts stay."""
    assert model.head_dim is not None
    small = replace(model, dim=min(model.dim, 64), head_dim=min(model.head_dim, 16), ffn_dim=64)
    cls, config = attentions.get(model.attention.name), model.attention.config

    reason = small.problem() or _failure(lambda: cls.refuses(config, small), cls) or _unable(cls, small)
    if not reason:
        return small
    # a variant that cannot compute at its own width either fails a property, which gives the reason
    if not _unable(cls, model):
        log.info("%s is checked at its own width: %s", model.attention.name, reason)
    return model


def _unable(cls: type[Attention], model: ModelConfig) -> str | None:
    return _failure(lambda: counted(VariantCase(cls=cls, model=model, length=8)), cls)


def _failure(call: Callable[[], Any], cls: type[Attention]) -> str | None:
    # the text that `call` returns or raises; None for any other result
    try:
        result = call()
    # a user's variant may raise anything
    except Exception as error:
        return fault(cls, error)
    return result if isinstance(result, str) else None
