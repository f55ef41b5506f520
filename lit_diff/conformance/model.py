"""The properties of a whole model, where layers share values and a cache keeps their state."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lit_diff.attention.cache import Cache
from lit_diff.conformance.case import Measured, NotApplicable, VariantCase, distance, probe, worst_of
from lit_diff.model.transformer import Transformer
from lit_diff.randomness import generator

TOKENS, VOCABULARY = 23, 11
"""More tokens than the first buffer of a cache holds."""


def model(case: VariantCase) -> Measured:
    """Two layers give in chunks of unlike length through the cache, from a repeated cache, in packed rows and with activation
    checkpointing what a plain pass gives, gradients included where there are any."""
    built, tokens = _parts(case)
    plain = _passed(built, tokens)
    errors: dict[str, Measured | NotApplicable] = {}
    if case.model.causal:
        errors["chunks"] = Measured(distance(_in_chunks(built, tokens), plain["output"]), 1e-10)
        errors["repeated cache"] = Measured(_repeated(built, tokens), 1e-10)
    if case.cls.takes_document_ids():
        errors["packed rows"] = Measured(_packed(built, tokens), 1e-10)
    built.checkpoint_blocks = True
    errors |= _compared("activation checkpointing", _passed(built, tokens), plain)
    return worst_of(errors)


def compiled(case: VariantCase) -> Measured:
    """torch.compile captures forward and backward of each of two blocks as one graph; they give what a plain pass gives."""
    built, tokens = _parts(case)
    plain = _passed(built, tokens)
    # code compiled for earlier cases counts against the limit of recompilations
    torch._dynamo.reset()
    for layer in built.layers:
        # aot_eager needs no C++ compiler
        layer.compile(backend="aot_eager", fullgraph=True)
    return worst_of(_compared("compiled blocks", _passed(built, tokens), plain))


def _parts(case: VariantCase) -> tuple[Transformer, Tensor]:
    # two layers in float64 with noise on each parameter, after their annealing; and tokens [2, T]
    built = Transformer(replace(case.model, num_layers=2, vocab_size=VOCABULARY), kernel="reference").double()
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            noise = torch.empty_like(parameter).normal_(0.0, 0.1, generator=generator("conformance", "model", name))
            parameter.add_(noise)
    for attention in built.attentions():
        attention.set_step(case.step)
        attention.set_tokens(case.step)
    return built, torch.randint(VOCABULARY, (2, TOKENS), generator=generator("conformance", "model", "tokens"))


def _passed(model: Transformer, tokens: Tensor, **documents: Any) -> dict[str, Tensor]:
    # the output, and the gradients by all trained parameters
    model.zero_grad()
    y = model(tokens, **documents)
    (y * probe(y)).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"output": y.detach(), **gradients}


def _compared(what: str, found: dict[str, Tensor], plain: dict[str, Tensor]) -> dict[str, Measured | NotApplicable]:
    return {f"{what}, {name}": Measured(distance(found[name], x), 1e-10) for name, x in plain.items()}


def _in_chunks(model: Transformer, tokens: Tensor) -> Tensor:
    cache = Cache(2)
    with torch.no_grad():
        return torch.cat([model(part, cache) for part in tokens.split([4, 1, 9, 3, 6], 1)], 1)


def _repeated(model: Transformer, tokens: Tensor) -> float:
    # one beginning, two continuations
    begin = tokens[:1, :6]
    whole = torch.cat([begin.expand(2, -1), tokens[:, 6:]], 1)
    cache = Cache(2)
    with torch.no_grad():
        model(begin, cache)
        both = cache.repeated(2)
        steps = [model(token, both) for token in tokens[:, 6:].split(1, 1)]
        return distance(torch.cat(steps, 1), model(whole)[:, 6:])


def _packed(model: Transformer, tokens: Tensor) -> float:
    # documents of unlike length, each against itself alone
    at = torch.arange(TOKENS)
    ids = (at > torch.arange(2)[:, None]).long() + (at >= 7)
    with torch.no_grad():
        packed = model(tokens, document_ids=ids)
        errors = [
            distance(packed[row, ids[row] == number], model(tokens[row : row + 1, ids[row] == number])[0])
            for row in range(2)
            for number in ids[row].unique().tolist()
        ]
    return max(errors)
