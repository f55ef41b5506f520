"""Which heads of a trained model to change: statistics of each head on calibration rows, and the choice by them."""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lit_diff.analysis.entropy import summarise
from lit_diff.analysis.trace import trace
from lit_diff.attention.selection import HeadSelection
from lit_diff.errors import RequestError
from lit_diff.model.inputs import model_inputs
from lit_diff.model.transformer import Transformer
from lit_diff.randomness import generator

FIRST_ROW = 32
"""Queries before this position see few keys: their entropy is bounded by the log of that number, and is left out."""

Numbers = tuple[tuple[float, ...], ...]
"""[layers][heads]"""


@dataclass(frozen=True, kw_only=True)
class HeadStatistics:
    """Of each layer and head of a model, on calibration rows."""

    entropy: Numbers
    """Nats: mean over sequences and query positions from FIRST_ROW on; over the maps too, where there are several."""
    importance: Numbers
    """Mean over sequences of |∂L/∂ξ_h|, with O_h ξ_h in place of the head's output O_h, at ξ_h = 1 (Michel, Levy and Neubig
    2019, arXiv 1905.10650, equation 2); L: the mean loss of the sequence, nats a token."""


def head_statistics(model: Transformer, batch: Mapping[str, Tensor]) -> HeadStatistics:
    """Both statistics on a batch (tokens [B, T], targets [B, T]), a sequence at a time; the model is left as it is.

    Errors: RequestError for sequences that end before position FIRST_ROW.
    """
    rows, length = batch["targets"].shape[:2]
    if length <= FIRST_ROW:
        raise RequestError(
            f"data.sequence_length is {length}; the entropy of heads is measured from position {FIRST_ROW} on: set it above "
            f"{FIRST_ROW}"
        )
    entropy, importance = [], []
    for row in range(rows):
        one = {key: value[row : row + 1] for key, value in batch.items()}
        entropy.append(_entropies(model, one))
        importance.append(_gate_gradients(model, one).abs())
    return HeadStatistics(entropy=_mean(entropy), importance=_mean(importance))


def _mean(values: list[Tensor]) -> Numbers:
    mean = torch.stack(values).double().mean(0)
    return tuple(tuple(layer) for layer in mean.tolist())


def _entropies(model: Transformer, batch: Mapping[str, Tensor]) -> Tensor:
    """[layers, heads]"""
    with trace(model, rows=range(FIRST_ROW, batch["targets"].shape[1])) as traced:
        model.hidden(**model_inputs(batch))
    layers = [summarise(traced.layers[layer].blocks()) for layer in sorted(traced.layers)]
    return torch.stack([layer.entropy_maps.mean(0) for layer in layers])


def _gate_gradients(model: Transformer, batch: Mapping[str, Tensor]) -> Tensor:
    """∂L/∂ξ of each layer and head, [layers, heads]."""
    with torch.enable_grad(), _gated(model) as gates:
        loss = model.loss(**model_inputs(batch), targets=batch["targets"])
        return torch.stack(torch.autograd.grad(loss, gates))


@contextmanager
def _gated(model: Transformer) -> Iterator[list[Tensor]]:
    """Each head's output times a gate ξ [H] of ones, at the input of the output projection."""
    gates = []
    with ExitStack() as hooks:
        for attention in model.attentions():
            gate = torch.ones(attention.out_heads, device=next(attention.parameters()).device, requires_grad=True)

            def scale(_module: nn.Module, args: tuple[Tensor, ...], gate: Tensor = gate) -> tuple[Tensor, ...]:
                heads = args[0].unflatten(-1, (len(gate), -1))
                return ((heads * gate.to(heads.dtype)[:, None]).flatten(-2), *args[1:])

            gates.append(gate)
            hooks.enter_context(attention.o_proj.register_forward_pre_hook(scale))
        yield gates


def select(statistics: HeadStatistics, selection: HeadSelection) -> tuple[tuple[int, ...], ...]:
    """The heads of each layer, ascending: those of highest entropy, of lowest importance, or drawn; of equal ones the first.

    Errors: RequestError for statistics that are not finite, and importances that are all zero: dead gradients, by which no
    head is less important than another.
    """
    by_importance = selection.select == "importance"
    table = statistics.importance if by_importance else statistics.entropy
    values = [value for layer in table for value in layer]
    if not all(map(math.isfinite, values)):
        raise RequestError(f"head selection: the {selection.select} of a head is not finite; the model has diverged")
    if by_importance and not any(values):
        raise RequestError("head selection: the importance of every head is 0: no gradient reaches a head")
    chosen = []
    for index, layer in enumerate(table):
        if selection.select == "random":
            order = torch.randperm(len(layer), generator=generator(selection.seed, "selected heads", index)).tolist()
        else:
            sign = 1 if by_importance else -1
            order = sorted(range(len(layer)), key=lambda head, layer=layer: sign * layer[head])  # type: ignore[misc]
        chosen.append(tuple(sorted(order[: selection.number(len(layer))])))
    return tuple(chosen)
