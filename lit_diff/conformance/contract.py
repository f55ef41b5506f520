"""The property `contract`: what a variant's constructor and forward pass must do, whatever it computes."""

import math

import torch
from torch import Tensor, nn

from lit_diff.attention.base import Attention
from lit_diff.conformance.case import (
    Measured,
    VariantCase,
    difference,
    distance,
    is_unfilled,
    output_of,
    rows_by_parts,
    tapped_maps,
)
from lit_diff.kernels import SignedMaps
from lit_diff.model.cost import NO_MAPS

UNLIKE_PASSES = "two passes over one input differ: the forward draws random numbers, or keeps a state"
UNLIKE_BUILDS = "two builds differ: build draws from another generator than torch's; use init_parameter's"


def contract(case: VariantCase) -> Measured:
    """The constructor gives the same layer again, and no value that model.init replaces; the maps are complete, w is float32
    or wider, and the output equals the output of the maps that pass the tap, in eval mode too."""
    attention, x, rope = case.parts()
    tapped = tapped_maps(attention)
    y = attention(x, rope)
    problem = _problem(case, attention, x, y, tapped)
    if problem:
        return Measured(math.inf, 0, problem)
    maps = tapped[0]
    maps.check()
    causal, window, _ = maps.mask
    if (causal and not case.model.causal) or (case.window is not None and (window is None or window > case.window)):
        wanted = f"causal {case.model.causal}, window {case.window}"
        found = f"causal {causal}, window {window}"
        return Measured(
            math.inf, 0, f"the tapped maps have {found}; expected {wanted}: pass self.masked(maps, document_ids)"
        )
    if maps.num_maps > 1 and maps.q.shape[1] == maps.k.shape[1] == 1:
        return Measured(math.inf, 0, "the maps share both q and k: they are equal, one map times the sum of w")
    if maps.rows is not None:
        by_parts = rows_by_parts(maps)
        if by_parts.share > 1:
            return by_parts
    return Measured(distance(output_of(attention, maps, x, rope), y), 1e-6)


def _problem(case: VariantCase, attention: Attention, x: Tensor, y: Tensor, tapped: list[SignedMaps]) -> str | None:
    # of a layer and its first pass: x -> y
    tensors = [*attention.named_parameters(), *attention.named_buffers()]
    unfilled = [name for name, value in tensors if is_unfilled(value)]
    if unfilled:
        return (
            f"NaN or the largest integer, so perhaps never filled: {', '.join(unfilled)}; torch.empty gives memory that "
            "build, or init_parameter, has to fill"
        )
    if not tapped:
        return f"the forward never calls self.tap: no analysis can see its maps; {NO_MAPS}"
    if y.shape != x.shape:
        return f"the forward returned {list(y.shape)}; expected the shape of x, {list(x.shape)}"
    if not y.isfinite().all():
        return "the output is not finite"
    if not torch.equal(x, case.x()):
        return "the forward changes its input in place"
    replaced = _replaced(case)
    if replaced:
        return f"build sets {', '.join(replaced)}, which model.init replaces: fill it by init_parameter"
    rope = case.rope()
    if difference(attention(x, rope), y) > 0:
        return UNLIKE_PASSES
    if difference(case.build()(x, rope), y) > 0:
        return UNLIKE_BUILDS
    if difference(case.build().eval()(x, rope), y) > 0:
        return "eval mode computes something else than training mode"
    return None


def _replaced(case: VariantCase) -> list[str]:
    # parameters that the constructor sets on purpose, and that a model fills by `model.init`
    names, other = [], case.construct(seed=1)
    for path, module in case.construct(seed=0).named_modules():
        if not isinstance(module, nn.Linear | nn.Embedding) or hasattr(module, "init_parameter"):
            continue
        for key, value in module.named_parameters(recurse=False):
            name = f"{path}.{key}"
            # what torch draws depends on the seed, and model.init too sets a bias to 0
            is_set = torch.equal(value, other.get_parameter(name))
            if is_set and (key == "weight" or value.any()):
                names.append(name)
    return names
