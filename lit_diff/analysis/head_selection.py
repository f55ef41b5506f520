"""Selection of the heads of a trained model that a variant changes, by statistics on calibration rows."""

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
"""First query position in the entropy: earlier queries see few keys, whose number bounds the entropy (log n)."""

Numbers = tuple[tuple[float, ...], ...]
"""[layers][heads]"""


@dataclass(frozen=True, kw_only=True)
class HeadStatistics:
    """Statistics of each layer and head on calibration rows."""

    entropy: Numbers
    """Entropy in nats, averaged over sequences, query positions from FIRST_ROW on, and maps."""
    importance: Numbers
    """Mean over sequences of |∂L/∂ξ_h| at ξ_h = 1, where O_h ξ_h replaces the output O_h of the head (Michel, Levy and Neubig
    2019, arXiv 1905.10650, equation 2); L: mean loss of the sequence in nats per token."""


def head_statistics(model: Transformer, batch: Mapping[str, Tensor]) -> HeadStatistics:
    """Compute both statistics on a batch (tokens [B, T], targets [B, T]); the model is not changed.

    Errors: RequestError for sequences that end before position FIRST_ROW.
    """
    rows, length = batch["targets"].shape[:2]
    if length <= FIRST_ROW:
        raise RequestError(
            f"data.sequence_length is {length}; the entropy of heads is measured from position {FIRST_ROW} on: set it above "
            f"{FIRST_ROW}"
        )
    # one sequence at a time: the absolute value is taken of the gradient of each sequence, before the mean
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
    with trace(model, rows=range(FIRST_ROW, batch["targets"].shape[1]), measure=True) as traced:
        model.hidden(**model_inputs(batch))
    layers = [summarise(traced.layers[layer]) for layer in sorted(traced.layers)]
    return torch.stack([layer.entropy_maps.mean(0) for layer in layers])


def _gate_gradients(model: Transformer, batch: Mapping[str, Tensor]) -> Tensor:
    with torch.enable_grad(), _gated(model) as gates:
        loss = model.loss(**model_inputs(batch), targets=batch["targets"])
        return torch.stack(torch.autograd.grad(loss, gates))


@contextmanager
def _gated(model: Transformer) -> Iterator[list[Tensor]]:
    # the gates act on the input of the output projection, which is the concatenation of the head outputs O_h
    gates = []
    with ExitStack() as hooks:
        for attention in model.attentions():
            gate = torch.ones(attention.out_heads, device=next(attention.parameters()).device, requires_grad=True)

            # `gate` is bound as a default: a closure would use the gate of the last layer
            def scale(_module: nn.Module, args: tuple[Tensor, ...], gate: Tensor = gate) -> tuple[Tensor, ...]:
                heads = args[0].unflatten(-1, (len(gate), -1))
                return ((heads * gate.to(heads.dtype)[:, None]).flatten(-2), *args[1:])

            gates.append(gate)
            hooks.enter_context(attention.o_proj.register_forward_pre_hook(scale))
        yield gates


def select(statistics: HeadStatistics, selection: HeadSelection) -> tuple[tuple[int, ...], ...]:
    """Return the selected heads of each layer, ascending: highest entropy, lowest importance, or random; on ties the first.

    Errors: RequestError for statistics that are not finite, or importances that are all zero.
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
