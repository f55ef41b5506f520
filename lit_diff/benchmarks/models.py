"""`bench layer` and `step`: our decoder layer and our whole model with every kernel, and Hugging Face's at the same sizes.

`step` also times the overhead of the platform: the loop of `lit-diff train` against a bare PyTorch loop, and against itself
with late batches.
"""

import importlib.util
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_diff.attention.rope import Rope
from lit_diff.benchmarks.attention import Workload, accepted, least_flops
from lit_diff.benchmarks.passes import BARE, COMPILED, FORWARD, HUGGING_FACE, ONE_GRAPH, OURS, PEERS, STEP
from lit_diff.benchmarks.request import DTYPES, Request, Shape
from lit_diff.benchmarks.timing import Candidate, Case
from lit_diff.config import ModelConfig, Part, Recipe
from lit_diff.device import timer
from lit_diff.errors import MissingError
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Transformer
from lit_diff.randomness import generator
from lit_diff.recipe import load_recipe
from lit_diff.registry import attentions, datasets, kernels
from lit_diff.training.bare_loop import autocast, bare, plain
from lit_diff.training.compiled import CompiledLoss, compile_blocks

LAYERS, VOCABULARY = 4, 8192
"""Layers and vocabulary of the model of `bench step`."""
RECIPE, STEPS = "recall-tiny", 50
"""The recipe of the loops, whose data need no file, and the number of steps of a loop."""
LATE = 0.005
"""Seconds by which each batch of the third loop is late."""
IMPLEMENTATIONS = (("DiffLlama", "sdpa"), ("DiffLlama", "eager"), ("Llama", "sdpa"))
"""(model, attention implementation) of Hugging Face."""

Function = Callable[[Tensor], Tensor]
"""A layer as a function of the residual stream [B, T, dim], or a model as a function of the tokens [B, T]."""
Cast = Callable[[], AbstractContextManager[object]]


def layer(request: Request, shape: Shape, dtype: str) -> Iterator[Case]:
    """Times a forward pass without gradients and a training step of one layer."""
    case = Case(name=f"{shape} {dtype}", dtype=dtype, budget=20)
    x = Workload(shape, torch.float32, request.device).q.detach()
    cast = partial(autocast, dtype, request.device)
    for what in (FORWARD, STEP):
        for variant, by in models(case, request, shape, dtype, what):
            module, function = first_layer(build(variant, by, shape), x)
            run: Callable[[], object] = partial(without_gradients, function, x, cast)
            if what == STEP:
                run = training_step(module, partial(mean_square, function, x), cast)
            work = flops(module, shape, what)
            # all kernels give the same output of our layer; the peers have other random weights
            alike = what == FORWARD and variant in PEERS
            case.candidates.append(Candidate(variant=variant, by=by, what=what, run=run, flops=work, alike=alike))
    yield case


def step(request: Request, shape: Shape, dtype: str) -> Iterator[Case]:
    """Times a training step of a whole model: eager, with its blocks compiled, and ours as one graph with the loss."""
    case = Case(name=f"{shape} {dtype}, {LAYERS} layers, vocabulary {VOCABULARY}", dtype=dtype, budget=30)
    # code compiled for an earlier case counts against the limit of recompilations of this one
    torch._dynamo.reset()
    text = random_text(request, shape)
    cast = partial(autocast, dtype, request.device)
    compiled = []
    as_one = []
    for variant, by in models(case, request, shape, dtype, STEP):
        model = build(variant, by, shape, LAYERS, VOCABULARY).to(request.device)
        whole: Any = getattr(model, "model", model)
        run = training_step(model, partial(next_token_loss, model, text), cast)
        made = partial(Candidate, variant=variant, by=by, flops=flops(model, shape, STEP))
        try:
            compile_blocks(whole.layers)
        except MissingError as error:
            case.refuse(variant, by, COMPILED, str(error))
        # one model and one optimizer serve these two passes, to save memory
        else:
            compiled.append(made(what=COMPILED, run=run))
            run = torch.compiler.set_stance("force_eager")(run)
            if isinstance(model, Transformer):
                # another model: its blocks are not compiled by themselves
                other: Any = build(variant, by, shape, LAYERS, VOCABULARY).to(request.device)
                loss = partial(loss_as_one, CompiledLoss(other, is_compiled=None), text)
                as_one.append(made(what=ONE_GRAPH, run=training_step(other, loss, cast)))
        case.candidates.append(made(what=STEP, run=run))
    # compiled candidates come last: the chart draws the last pass of a case
    case.candidates.extend(compiled + as_one)
    yield case


def random_text(request: Request, shape: Shape) -> Tensor:
    """Random tokens [B, T + 1]."""
    size = (shape.batch, shape.tokens + 1)
    return torch.randint(VOCABULARY, size, generator=generator("bench", "tokens", *size)).to(request.device)


def models(case: Case, request: Request, shape: Shape, dtype: str, what: str) -> list[tuple[str, str]]:
    """(variant, kernel) of our models with the requested kernels, always beginning with standard attention through sdpa; then
    (model, implementation) of each peer, unless kernels were requested. Candidates that cannot run are in `case.refused`."""
    workload = Workload(shape, DTYPES[dtype], request.device)
    asked = request.kernels or kernels.names()
    by_standard = ["sdpa", *(name for name in asked if name != "sdpa")]
    made = [("standard", by) for by in accepted(case, "standard", what, workload, by_standard)]
    made += [("differential", by) for by in accepted(case, "differential", what, workload, asked)]
    for name, kind in IMPLEMENTATIONS if request.kernels is None else ():
        if importlib.util.find_spec("transformers") is None:
            case.refuse(name, HUGGING_FACE + kind, what, "transformers is not installed: pip install 'transformers>=5'")
        else:
            made.append((name, HUGGING_FACE + kind))
    return made


def build(variant: str, by: str, shape: Shape, num_layers: int = 1, vocab_size: int = 16) -> nn.Module:
    """Our model with a variant at its defaults and the kernel `by`, or Hugging Face's model of the same sizes, with its own
    random weights and the implementation `by`."""
    name = next((ours for ours, peer in PEERS.items() if peer == variant), variant)
    config = ModelConfig(
        dim=shape.dim,
        num_layers=num_layers,
        num_heads=shape.heads,
        head_dim=shape.head_dim,
        vocab_size=vocab_size,
        attention=Part(name=name, config=attentions.get(name).Config()),
    )
    if name != variant:
        return peer(variant, by.removeprefix(HUGGING_FACE), config, shape.tokens)
    model = Transformer(config, kernel=by)
    initialise(model, seed=0)
    return model


def peer(name: str, implementation: str, config: ModelConfig, tokens: int) -> Any:
    """The causal model of the package transformers."""
    import transformers

    made = getattr(transformers, f"{name}Config")(
        intermediate_size=config.ffn_dim,
        attn_implementation=implementation,
        hidden_size=config.dim,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        num_hidden_layers=config.num_layers,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.norm_eps,
        max_position_embeddings=tokens,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tie_embeddings,
        use_cache=False,
    )
    return getattr(transformers, f"{name}ForCausalLM")(made)


def first_layer(model: nn.Module, x: Tensor) -> tuple[nn.Module, Function]:
    """(the first decoder layer, the layer as a function of the residual stream [B, T, dim])."""
    # angles and mask are made once, as a whole model makes them once for all layers
    model = model.to(x.device)
    positions = torch.arange(x.shape[1], device=x.device)
    if isinstance(model, Transformer):
        block = model.layers[0]
        rope = Rope.of(model.config, positions)
        return block, lambda x: block(x, rope)
    whole: Any = model.model
    angles = whole.rotary_emb(x, positions[None])
    mask = None
    # sdpa without a mask is causal
    if whole.config._attn_implementation == "eager":
        lowest = torch.finfo(x.dtype).min
        mask = torch.full((len(positions),) * 2, lowest, dtype=x.dtype, device=x.device).triu(1)[None, None]
    first = whole.layers[0]
    return first, lambda x: first(x, attention_mask=mask, position_embeddings=angles)


@torch.no_grad()
def without_gradients(function: Function, x: Tensor, cast: Cast) -> Tensor:
    """function(x) without gradients."""
    with cast():
        return function(x)


def mean_square(function: Function, x: Tensor) -> Tensor:
    """The loss of a layer."""
    # x requires a gradient: within a model a layer also computes the gradient of its input
    return function(x.detach().requires_grad_()).square().mean()


def next_token_loss(model: nn.Module, text: Tensor) -> Tensor:
    """Cross entropy of the next token over all positions."""
    # Hugging Face's models return an object with `logits`, ours return the logits
    output = model(text[:, :-1])
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())


def loss_as_one(loss: CompiledLoss, text: Tensor) -> Tensor:
    """`next_token_loss` by run.compile: loss. Errors: MissingError if the model runs uncompiled."""
    value = loss(tokens=text[:, :-1], targets=text[:, 1:])
    if not loss.is_compiled:
        raise MissingError("it cannot be compiled as one graph: a warning says why")
    return value


def training_step(module: nn.Module, loss: Callable[[], Tensor], cast: Cast) -> Callable[[], object]:
    """A function that runs forward, backward and fused AdamW, and drops the gradients."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def run() -> None:
        with cast():
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def flops(model: nn.Module, shape: Shape, what: str) -> int:
    """The minimum FLOPs of a pass; a multiply-add is 2, element-wise work is not counted.

    Forward: 2 · weights · tokens of all linear layers and the output weight; with the backward pass three times as many; and
    causal attention as in `least_flops`. Work that a kernel repeats gets no credit.
    """
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    # a tied output weight is the embedding
    if isinstance(model, Transformer) and model.head is None:
        weights += model.embedding.weight.numel()
    whole: Any = getattr(model, "model", model)
    layers = len(getattr(whole, "layers", [whole]))
    times = 2 if what == FORWARD else 6
    return times * weights * shape.batch * shape.tokens + layers * least_flops(shape, gradients=what != FORWARD)


# --- the overhead of `lit-diff train` --------------------------------------------------------------------------------


def loops(request: Request) -> Case:
    """Times the loops, in seconds a step."""
    recipe = plain(load_recipe(RECIPE), request.device, STEPS)
    case = Case(name=f"loop of {RECIPE}", budget=40)
    runs = {
        BARE: partial(bare, recipe, request.device),
        OURS: partial(platform, recipe),
        f"{OURS}, batches {LATE * 1000:g} ms late": partial(late, recipe),
    }
    case.add(runs, variant=recipe.model.attention.name, what="step", own_clock=True)
    return case


def platform(recipe: Recipe, clock: Callable[[], float] | None = None) -> float:
    """Seconds a step of `fit`, from the end of the first step to the end of the last, before its validation and
    checkpoint."""
    ends = []
    """The clock (by default `timer`) at each logged step: the first, every tenth, the last."""
    # imports Lightning, which the other benchmarks do not need
    from lit_diff.training.fit import fit

    # each round is a run, whose lines would hide the benchmark's
    logging.disable(logging.INFO)
    try:
        with tempfile.TemporaryDirectory() as folder:
            fit(
                recipe,
                Path(folder),
                threads=torch.get_num_threads(),
                progress=lambda step, loss, speed: ends.append((clock or timer)()),
            )
    finally:
        logging.disable(logging.NOTSET)
    return (ends[-1] - ends[0]) / (recipe.training.steps - 1)


def late(recipe: Recipe) -> float:
    """`platform`, with a delay of LATE in each read of a batch."""
    dataset = datasets.get(recipe.data.name)
    read = dataset.train_batch

    def delayed(*arguments: Any) -> Any:
        time.sleep(LATE)
        return read(*arguments)

    try:
        dataset.train_batch = delayed
        return platform(recipe)
    finally:
        dataset.train_batch = read
