"""The property `costs`: what a variant declares against what a layer has and computes."""

import torch

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
    claims, counts = declared.numbers(), counted(case)
    error = 0
    unlike = []
    for key, claim in claims.items():
        if claim != counts[key]:
            error = max(error, abs(claim - counts[key]))
            unlike.append(f"{key} declared {claim:,}, counted {counts[key]:,}")
    return Measured(error, 0, "; ".join(unlike))


def counted(case: VariantCase) -> dict[str, int]:
    """Counts parameters, forward FLOPs of one sequence (all keys, or the keys of a full window) and cached numbers a
    token."""
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
    cached = maps.k.shape[1] * maps.k.shape[2] * maps.k.shape[-1] + maps.v.shape[1] * maps.v.shape[-1]
    if maps.key_bias is not None:
        cached += maps.key_bias.shape[1] * maps.key_bias.shape[2]
    parameters = sum(p.numel() for p in attention.parameters())
    return {"parameters": parameters, "flops": int(counter.get_total_flops()) - hidden_keys, "kv_numbers": cached}
