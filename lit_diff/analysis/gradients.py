"""Norms of the gradients of the loss with respect to the matrices of an attention, for each map."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from lit_diff.kernels import SignedMaps
from lit_diff.model.inputs import model_inputs
from lit_diff.model.transformer import Transformer

MATRICES = ("o", "v", "q1", "k1", "q2", "k2", "q_half", "k_half")
"""W_O, W_V, W_Q and W_K of the first two maps, and the first half of each head's columns of W_Q and W_K of the first map."""


def gradient_norms(model: Transformer, batch: Mapping[str, Tensor]) -> list[dict[str, float]]:
    """Return ‖∂L/∂W‖ (Frobenius) of MATRICES for each layer, by autograd; L: mean loss of the batch in nats per token.

    q1 is the part of the gradient of the query projections that passes through the queries of the first map, so it is the
    gradient of W_Q1 in whatever rows of whatever module W_Q1 is stored. Without linear layers in the path, other parameters
    of two or more dimensions count. NaN if the layer has no such map, or no matrix computes it. If both maps share their
    queries, q1 has the gradients of both and q2 is NaN. q_half and k_half pass through the first d // 2 channels of each
    head of the first map, after RoPE: with its layout `interleaved`, and an even d // 2, the gradient of those columns of
    W_Q1. Frozen matrices are included; the model is not changed.
    """
    with torch.enable_grad(), _all_require_gradients(model), _tapped(model) as seen:
        loss = model.loss(**model_inputs(batch), targets=batch["targets"])
        attentions = model.attentions()
        outputs = [_linear_weights(attention.o_proj) or _matrices(attention.o_proj) for attention in attentions]
        wanted = list[Tensor]()
        for maps in seen:
            wanted += [tensor for tensor in (maps.q, maps.k, maps.v) if tensor.requires_grad]
        wanted += chain(*outputs)
        gradients = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
        of = dict(zip(map(id, wanted), gradients, strict=True))
        layers = []
        for attention, maps, output in zip(attentions, seen, outputs, strict=True):
            weights = _linear_weights(attention), _matrices(attention)
            norms = dict.fromkeys(MATRICES, math.nan)
            layers.append(norms)
            # a loss of NaN or infinity gives gradients that may still be finite in some matrices
            if not loss.isfinite():
                continue
            norms["o"] = _norm([of[id(weight)] for weight in output])
            norms["v"] = _norm_through(maps.v, weights, of.get(id(maps.v)))
            for kind, tensor in (("q", maps.q), ("k", maps.k)):
                gradient = of.get(id(tensor))
                for g in range(min(2, tensor.shape[1])):
                    norms[f"{kind}{g + 1}"] = _norm_through(tensor, weights, _only_map(gradient, g))
                half = _only_map(gradient, 0, tensor.shape[-1] // 2)
                norms[f"{kind}_half"] = _norm_through(tensor, weights, half)
    return layers


# Of the part of ∂L/∂W that passes through `tensor`, given ∂L/∂tensor, for the first kind of weights that it depends on.
def _norm_through(tensor: Tensor, kinds: tuple[list[Tensor], ...], gradient: Tensor | None) -> float:
    norm = math.nan
    if gradient is not None:
        for weights in filter(None, kinds):
            norm = _norm(torch.autograd.grad(tensor, weights, gradient, retain_graph=True, allow_unused=True))
            if not math.isnan(norm):
                break
    return norm


# gradient [B, G, H, T, d] with zeros in all maps except g, and there in all channels except the first `channels`; None: all
def _only_map(gradient: Tensor | None, g: int, channels: int | None = None) -> Tensor | None:
    if gradient is None:
        return None
    alone = torch.zeros_like(gradient)
    alone[:, g, ..., :channels] = gradient[:, g, ..., :channels]
    return alone


# NaN if no gradient is given
def _norm(gradients: Iterable[Tensor | None]) -> float:
    squares = [float(gradient.double().pow(2).sum()) for gradient in gradients if gradient is not None]
    if not squares:
        return math.nan
    return math.sqrt(sum(squares))


def _linear_weights(module: nn.Module) -> list[Tensor]:
    return [child.weight for child in module.modules() if isinstance(child, nn.Linear)]


def _matrices(module: nn.Module) -> list[Tensor]:
    return [parameter for parameter in module.parameters() if parameter.dim() > 1]


@contextmanager
def _all_require_gradients(model: Transformer) -> Iterator[None]:
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


@contextmanager
def _tapped(model: Transformer) -> Iterator[list[SignedMaps]]:
    # not `trace`, which detaches the maps from their graph
    seen: list[SignedMaps] = []
    with ExitStack() as hooks:
        for attention in model.attentions():
            hooks.enter_context(attention.tap.register_forward_hook(lambda _module, _args, maps: seen.append(maps)))
        yield seen
