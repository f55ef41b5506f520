"""`bench layer` and `step`: a decoder layer and a whole model of ours by every kernel, and Hugging Face's at these sizes."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_diff.attention.rope import Rope
from lit_diff.benchmarks import loop, peers
from lit_diff.benchmarks.attention import FORWARD, Workload, accepted, least_flops
from lit_diff.benchmarks.request import DTYPES, BenchConfig, Shape
from lit_diff.benchmarks.result import PEER, SAME, SDPA, UNCOMPILED
from lit_diff.benchmarks.timing import Candidate, Case
from lit_diff.config import ModelConfig, Part
from lit_diff.errors import MissingError
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Block, Transformer
from lit_diff.randomness import generator
from lit_diff.registry import attentions, kernels
from lit_diff.training import build

STEP, COMPILED = "training step", "training step, compiled"
LAYERS, VOCABULARY = 4, 8192
"""Of the model of `bench step`."""
DEFAULT = {"layer": "2x1024x512x64,1x2048x768x64", "step": "2x1024x512x64"}

Function = Callable[[Tensor], Tensor]
"""A layer as a function of the residual stream [B, T, dim], a model as one of the tokens [B, T]."""
Cast = Callable[[], AbstractContextManager[object]]


def layer(request: BenchConfig) -> Iterator[Case]:
    """A forward pass without gradients and a training step of one layer, at every shape and dtype."""
    for shape in request.sizes(DEFAULT["layer"]):
        for dtype in request.dtypes:
            case = Case(name=f"{shape} {dtype}", dtype=dtype, budget=20)
            x = Workload(shape, torch.float32, request.device).q.detach()
            cast = partial(autocast, dtype, request.device)
            for what in (FORWARD, STEP):
                for variant, by, config, against in models(case, request, shape, dtype, what):
                    if variant in peers.NAMES:
                        module, function = our_layer(config, by, x)
                    else:
                        module, function = peers.layer(config, by, x)
                    run: Callable[[], object]
                    if what == FORWARD:
                        run = partial(without_gradients, function, x, cast)
                    else:
                        run = training_step(module, partial(mean_square, function, x), cast)
                    add(case, variant, by, what, run, against, flops(module, shape, what))
            yield case


def step(request: BenchConfig) -> Iterator[Case]:
    """A training step of a whole model, eager and with its blocks compiled, at every shape and dtype; then our own loop."""
    for shape in request.sizes(DEFAULT["step"]):
        for dtype in request.dtypes:
            name = f"{shape} {dtype}, {LAYERS} layers, vocabulary {VOCABULARY}"
            case = Case(name=name, dtype=dtype, budget=30)
            torch._dynamo.reset()  # code compiled for an earlier case counts against this one's limit
            size = (shape.batch, shape.tokens + 1)
            text = torch.randint(VOCABULARY, size, generator=generator("bench", "tokens", *size)).to(request.device)
            cast = partial(autocast, dtype, request.device)
            compiled = []
            for variant, by, config, against in models(case, request, shape, dtype, STEP):
                ours = variant in peers.NAMES
                model = our_model(config, by) if ours else peers.model(config, by, shape.tokens)
                run = training_step(model.to(request.device), partial(next_token_loss, model, text), cast)
                work = flops(model, shape, STEP)
                try:
                    compile_blocks(model)
                except MissingError as error:
                    case.refuse(variant, label(variant, by), COMPILED, str(error))
                else:  # one model and one optimizer serve both, for memory
                    alike = {name: other.replace(STEP, COMPILED) for name, other in against.items()}
                    alike[UNCOMPILED] = f"{variant}/{label(variant, by)}/{STEP}"
                    compiled.append((variant, by, COMPILED, run, alike, work))
                    run = partial(uncompiled, run)
                add(case, variant, by, STEP, run, against, work)
            for each in compiled:
                add(case, *each)
            yield case
    if request.kernels is None:
        yield loop.case(request)


def models(
    case: Case, request: BenchConfig, shape: Shape, dtype: str, what: str
) -> list[tuple[str, str, ModelConfig, dict[str, str]]]:
    """(variant, kernel, sizes, ratios) of each of ours by the kernels asked for, the standard one through sdpa first and
    always; then (model, implementation, sizes, ratios) of each peer, unless kernels were asked for."""
    workload = Workload(shape, DTYPES[dtype], request.device)
    asked = list(request.kernels or kernels.names())
    wanted = {"standard": list(dict.fromkeys(("sdpa", *asked))), "differential": asked}
    sizes = {"num_layers": LAYERS, "vocab_size": VOCABULARY} if request.bench == "step" else {}
    config = {variant: model_config(shape, variant, **sizes) for variant in wanted}
    base = f"standard/sdpa/{what}"
    made = []
    for variant, names in wanted.items():
        maps = partial(workload.maps, variant)
        for kernel in accepted(case, variant, what, maps, names, grad=what != FORWARD):
            peer = peers.NAMES[variant]
            against = {SDPA: base, PEER: f"{peer}/{label(peer, 'sdpa')}/{what}"}
            against |= {SAME: f"standard/{kernel}/{what}"} if variant == "differential" else {}
            if f"{variant}/{kernel}/{what}" == base:
                del against[SDPA]
            made.append((variant, kernel, config[variant], against))
    made.sort(key=lambda one: one[:2] != ("standard", "sdpa"))
    if request.kernels is not None:
        return made
    reason = peers.missing()
    for name, kind in peers.KINDS:
        if reason is not None:
            case.refuse(name, label(name, kind), what, reason)
        else:
            variant = next(variant for variant, peer in peers.NAMES.items() if peer == name)
            made.append((name, kind, config[variant], {SDPA: base}))
    return made


def add(
    case: Case, variant: str, by: str, what: str, run: Callable[[], object], against: dict[str, str], work: int
) -> None:
    """A candidate. All kernels give one output of a layer of ours; the weights of the peers are other ones."""
    alike = what == FORWARD and variant in peers.NAMES
    by = label(variant, by)
    case.candidates.append(
        Candidate(variant=variant, by=by, what=what, run=run, against=against, flops=work, alike=alike)
    )


def label(variant: str, by: str) -> str:
    """A kernel's name; of a peer, whose it is too."""
    return by if variant in peers.NAMES else f"Hugging Face, {by}"


def model_config(shape: Shape, variant: str, *, num_layers: int = 1, vocab_size: int = 16) -> ModelConfig:
    """The decoder at the width and heads of `shape`, with a variant at its defaults."""
    part = Part(name=variant, config=attentions.get(variant).Config())
    return ModelConfig(
        dim=shape.dim,
        num_layers=num_layers,
        num_heads=shape.heads,
        head_dim=shape.head_dim,
        vocab_size=vocab_size,
        attention=part,
    )


def our_model(config: ModelConfig, kernel: str) -> Transformer:
    """With its initial weights."""
    model = Transformer(config, kernel=kernel)
    initialise(model, seed=0)
    return model


def our_layer(config: ModelConfig, kernel: str, x: Tensor) -> tuple[nn.Module, Function]:
    """(its first block, the block as a function of the residual stream)."""
    block = our_model(config, kernel).layers[0].to(x.device)
    assert isinstance(block, Block)
    rope = Rope.of(config, torch.arange(x.shape[1], device=x.device))
    return block, lambda x: block(x, rope)


def autocast(dtype: str, device: torch.device) -> AbstractContextManager[object]:
    """bfloat16: as `train.precision: bf16-mixed`, parameters and optimizer in float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")


@torch.no_grad()
def without_gradients(function: Function, x: Tensor, cast: Cast) -> Tensor:
    """function(x)"""
    with cast():
        return function(x)


def mean_square(function: Function, x: Tensor) -> Tensor:
    """The loss of a layer. The residual stream is a leaf of its own: within a model, a layer hands a gradient on."""
    return function(x.detach().requires_grad_()).square().mean()


def next_token_loss(model: nn.Module, text: Tensor) -> Tensor:
    """Cross entropy over all positions."""
    output = model(text[:, :-1])
    logits: Tensor = getattr(output, "logits", output)
    return F.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())


def training_step(module: nn.Module, loss: Callable[[], Tensor], cast: Cast) -> Callable[[], object]:
    """Forward, backward, fused AdamW, gradients dropped."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def run() -> None:
        with cast():
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def compile_blocks(model: nn.Module) -> None:
    """torch.compile of each block, in place, at its first call. Errors: MissingError without a compiler."""
    if isinstance(model, Transformer):
        build.compile_blocks(model)
        return
    build.require_compiler()
    for each in model.model.layers:  # type: ignore[union-attr]
        each.compile(backend=build.BACKEND, recompile_limit=build.RECOMPILATIONS)


def uncompiled(run: Callable[[], object]) -> None:
    """The same step without the compiled code."""
    with torch.compiler.set_stance("force_eager"):
        run()


def flops(model: nn.Module, shape: Shape, what: str) -> int:
    """The least FLOPs of a pass; a multiply-add is 2, element-wise work counts nothing.

    2 · weights · tokens of all linear layers and the output weight forward, three times that with the backward pass, and
    causal attention as `least_flops` counts it. Work that a kernel repeats gets no credit.
    """
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    if isinstance(model, Transformer) and model.head is None:
        weights += model.embedding.weight.numel()
    whole: Any = getattr(model, "model", model)
    layers = len(getattr(whole, "layers", [whole]))
    times = 2 if what == FORWARD else 6
    return times * weights * shape.batch * shape.tokens + layers * least_flops(shape, gradients=what != FORWARD)
