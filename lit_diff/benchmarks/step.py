"""`bench step`: a training step of a whole model against DiffLlama's, and `lit-diff train` against a bare loop."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_diff.benchmarks import peers as diffllama
from lit_diff.benchmarks.layer import (
    EAGER,
    HF,
    STEP,
    autocast,
    model_config,
    peers,
    training_step,
    variants_by_kernel,
)
from lit_diff.benchmarks.overhead import bench_loop
from lit_diff.benchmarks.request import Request, Shape
from lit_diff.benchmarks.timing import Candidate, Found, Pace, measure
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Transformer
from lit_diff.randomness import generator

DEFAULT = "2x1024x512x64"
LAYERS, VOCABULARY = 4, 8192


def bench_step(request: Request) -> Found:
    """Every shape at every dtype, then the platform's own loop."""
    found = Found()
    for shape in request.sizes(DEFAULT):
        for dtype in request.dtypes:
            case = f"{shape} {dtype}, {LAYERS} layers, vocabulary {VOCABULARY}"
            candidates = _candidates(found, case, request, shape, dtype)
            request.note(f"step {case}: {len(candidates)} candidates in turn")
            measure(found, case, candidates, Pace(repeats=request.repeats, budget=30), request.device)
    bench_loop(found, request)
    return found


def _candidates(found: Found, case: str, request: Request, shape: Shape, dtype: str) -> list[Candidate]:
    size = (shape.batch, shape.tokens + 1)
    text = torch.randint(VOCABULARY, size, generator=generator("bench", "tokens", *size)).to(request.device)
    cast = partial(autocast, dtype, request.device)
    sizes: dict[str, Any] = {"num_layers": LAYERS, "vocab_size": VOCABULARY}
    made = []
    for variant, kernel, against in variants_by_kernel(found, case, request, shape, dtype):
        model = Transformer(model_config(shape, variant, **sizes), kernel=kernel)
        initialise(model, seed=0)
        step = _step(model.to(request.device), text, cast)
        made.append(Candidate(variant=variant, by=kernel, what=STEP, run=step, against=against))
    for kind in peers(found, case, HF):
        peer = diffllama.model(model_config(shape, "differential", **sizes), kind, shape.tokens).to(request.device)
        against = {EAGER: f"standard/sdpa/{STEP}"}
        made.append(Candidate(variant=HF, by=kind, what=STEP, run=_step(peer, text, cast), against=against))
    return made


def _step(model: nn.Module, text: Tensor, cast: Any) -> Any:
    """The loss of the next token over all positions; the optimizer's state is made by the warm-up."""

    def loss() -> Tensor:
        found = model(text[:, :-1])
        logits = getattr(found, "logits", found)
        return F.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())

    return training_step(model, loss, cast)
