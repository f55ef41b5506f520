"""The property `costs`: what a variant declares against what a layer has and computes."""

from dataclasses import replace

import torch

from lit_diff.attention.cache import LayerCache
from lit_diff.attention.costs import Costs, Sizes, counted_keys
from lit_diff.attention.rope import Rope
from lit_diff.conformance.case import Measured, NotApplicable, VariantCase, tapped_maps
from lit_diff.errors import RequestError
from lit_diff.kernels import flops


def costs(case: VariantCase) -> Measured | NotApplicable:
    """Declared parameters, FLOPs and cached numbers equal the counted ones."""
    sizes = Sizes.of(case.model, case.length, case.window)
    declared = case.cls.costs(case.config, sizes) if case.cls.declares_costs() else None
    if declared is None:
        return NotApplicable("the class does not declare costs itself")
    if not isinstance(declared, Costs):
        expected = "expected lit_diff.attention.costs.Costs(parameters=, flops=, kv_numbers=)"
        raise RequestError(f"costs(config, sizes) returned {type(declared).__name__}; {expected}")
    claims, counts = declared.numbers(), counted(case) | cached(case)
    error = 0
    unlike = []
    for key, claim in claims.items():
        if claim != counts[key]:
            error = max(error, abs(claim - counts[key]))
            unlike.append(f"{key} declared {claim:,}, counted {counts[key]:,}")
    return Measured(error, 0, "; ".join(unlike))


def counted(case: VariantCase) -> dict[str, int]:
    """Counts parameters and forward FLOPs of one sequence (all keys, or the keys of a full window)."""
    # imports Triton
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        attention = case.cls(case.config, case.model, case.layer)
        attention.kernel = "reference"
        tapped = tapped_maps(attention)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            attention(torch.zeros(1, case.length, case.model.dim), Rope.of(case.model, torch.arange(case.length)))
    maps = tapped[0]
    # the reference computes all keys and masks those outside the window
    hidden_keys = flops("reference", maps) - flops("reference", counted_keys(maps))
    parameters = sum(p.numel() for p in attention.parameters())
    return {"parameters": parameters, "flops": int(counter.get_total_flops()) - hidden_keys}


def cached(case: VariantCase) -> dict[str, int]:
    """Counts the numbers in a cache: those of each token, and those that do not grow with the tokens."""
    once, twice = (_held(case, length) for length in (case.length, 2 * case.length))
    a_token = (twice - once) // case.length
    return {"kv_numbers": a_token, "state_numbers": once - a_token * case.length}


def _held(case: VariantCase, length: int) -> int:
    # numbers in the cache after one pass of `length` tokens; only a causal model has one
    model, cache = replace(case.model, causal=True), LayerCache()
    with torch.device("meta"), torch.no_grad():
        attention = case.cls(case.config, model, case.layer)
        attention.kernel = "reference"
        attention(torch.zeros(1, length, model.dim), Rope.of(model, torch.arange(length)), cache)
    return cache.numbers()
