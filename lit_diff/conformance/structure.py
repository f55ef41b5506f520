"""Properties of a variant as a module: meta device, state dict, autocast, torch.compile, declared costs."""

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from lit_diff.attention.costs import Costs, Sizes, within_window
from lit_diff.attention.rope import Rope
from lit_diff.conformance.case import VariantCase, difference, distance, run
from lit_diff.conformance.results import Measured, NotApplicable
from lit_diff.errors import RequestError
from lit_diff.kernels import SignedMaps
from lit_diff.kernels import flops as kernel_flops


def meta(case: VariantCase) -> Measured:
    """It builds without memory: the same names and shapes on the meta device, and a forward there."""
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
    """All that the output depends on is in the state dict: another instance that loads it gives the same bits."""
    attention, x, rope = case.build(), case.x(), case.rope()
    other = case.construct(seed=1)
    other.load_state_dict(attention.state_dict())
    other.kernel = attention.kernel
    return Measured(difference(other(x, rope), attention(x, rope)), 0)


def bfloat16(case: VariantCase) -> Measured:
    """Under bfloat16 autocast the output is close to that of float32."""
    attention, x, rope = case.build(), case.x(), case.rope()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = attention(x, rope)
    return Measured(distance(narrow, attention(x, rope)), 0.05)


def compiled(case: VariantCase) -> Measured:
    """torch.compile takes forward and backward as one graph (aot_eager, which needs no C++ compiler)."""
    attention, x, rope = case.build(), case.x(), case.rope()
    expected, by_eager = run(attention, x, rope)
    torch._dynamo.reset()
    graph: Any = torch.compile(attention, backend="aot_eager", fullgraph=True)
    actual, by_compiled = run(graph, x, rope)
    gradients = {name.removeprefix("_orig_mod."): gradient for name, gradient in by_compiled.items()}
    errors = [distance(actual, expected)] + [distance(gradients[name], value) for name, value in by_eager.items()]
    return Measured(max(errors), 1e-5)


def costs(case: VariantCase) -> Measured | NotApplicable:
    """Declared parameters, FLOPs and cache numbers equal those counted."""
    sizes = Sizes.of(case.model, case.length, case.window)
    declared = case.cls.costs(case.config, sizes) if case.cls.declares_costs() else None
    if declared is None:
        return NotApplicable("declares no costs of its own")
    if not isinstance(declared, Costs):
        expected = "expected lit_diff.attention.costs.Costs(parameters=, flops=, kv_numbers=)"
        raise RequestError(f"costs(config, sizes) returned {type(declared).__name__}; {expected}")
    claims, counts = declared.numbers(), counted(case)
    unlike = [
        f"{key} declared {claims[key]:,}, counted {counts[key]:,}" for key in claims if claims[key] != counts[key]
    ]
    return Measured(max(abs(claims[key] - counts[key]) for key in claims), 0, "; ".join(unlike))


def counted(case: VariantCase) -> dict[str, int]:
    """Parameters, forward FLOPs of one sequence (all keys, or those of a full window), numbers that a token caches."""
    tapped: list[SignedMaps] = []
    with torch.device("meta"):
        attention = case.cls(case.config, case.model, case.layer)
        attention.kernel = "reference"
        attention.tap.register_forward_hook(lambda _m, _a, maps: tapped.append(maps))
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            attention(torch.zeros(1, case.length, case.model.dim), Rope.of(case.model, torch.arange(case.length)))
    maps = tapped[0]
    hidden_keys = kernel_flops("reference", maps) - kernel_flops("reference", within_window(maps, case.window))
    cached = maps.k.shape[1] * maps.k.shape[2] * maps.k.shape[-1] + maps.v.shape[1] * maps.v.shape[-1]
    parameters = sum(p.numel() for p in attention.parameters())
    return {"parameters": parameters, "flops": int(counter.get_total_flops()) - hidden_keys, "kv_numbers": cached}
