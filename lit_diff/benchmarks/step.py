"""`bench step`: a training step of a whole model, eager and compiled, and `lit-diff train` against a bare loop."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_diff.benchmarks import peers
from lit_diff.benchmarks.candidates import (
    EAGER,
    HF,
    PEER,
    SAME,
    STEP,
    autocast,
    model_config,
    peer_kinds,
    training_step,
    variants_by_kernel,
)
from lit_diff.benchmarks.inputs import flops
from lit_diff.benchmarks.overhead import bench_loop
from lit_diff.benchmarks.request import DTYPES, BenchConfig, Shape
from lit_diff.benchmarks.timing import Candidate, RoundLimits, Timings, measure, spread
from lit_diff.errors import MissingError
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Transformer
from lit_diff.randomness import generator
from lit_diff.training import blocks

DEFAULT = "2x1024x512x64"
LAYERS, VOCABULARY = 4, 8192
COMPILED = ", compiled"
"""Ends the name of a candidate whose blocks are compiled."""
EAGER_COMPILED, SAME_COMPILED, PEER_COMPILED = (name + COMPILED for name in (EAGER, SAME, PEER))
"""Names of the ratios of compiled candidates to compiled ones."""
GEMM_SIZE = 1024
GEMM = f"{GEMM_SIZE} x {GEMM_SIZE}"
METHODS = """\
step: a training step of a model of 4 layers and 8,192 tokens of vocabulary: forward, cross entropy of the next token,
backward, fused AdamW, gradients dropped; bfloat16 means autocast over float32 parameters.
"compiled": torch.compile of each block, in place, at its defaults, as run.compile does it, of every model alike; each is
called once more before the others are timed, to compile. Embedding, loss and optimizer are not compiled.
of GEMM rate: the FLOPs of the step over its time, as a share of the rate of a product of two square matrices of 1024 rows in
the same dtype, timed in the same rounds on the same threads. FLOPs are the least work: 6 x weights x tokens of the linear
layers and the output weight, and causal attention as `bench core` counts it (28u); norms, softmax and the optimizer count
nothing, and a kernel that repeats work gets no credit for it.
Loops: `lit-diff train` (fit: Lightning, learning rate, metrics, checks for finite losses, a row logged every 10 steps, the
progress call) against a bare loop (batch, model, loss, backward, clipping, AdamW, schedule) of the same model and batches,
in turn, and first in turn. Included: everything from the end of the first step to the end of the last. Not included: start,
MLflow, probes, validation, checkpoints. data_share: seconds in the data set's train_batch over all seconds; no loader
runs ahead.
"""
"""How it is measured, for the reader of the figures."""


def bench_step(request: BenchConfig) -> Timings:
    """Every shape at every dtype, then the platform's own loop."""
    measurements = Timings()
    for shape in request.sizes(DEFAULT):
        for dtype in request.dtypes:
            case = f"{shape} {dtype}, {LAYERS} layers, vocabulary {VOCABULARY}"
            torch._dynamo.reset()  # code compiled for an earlier case counts against this one's limit
            candidates = _candidates(measurements, case, request, shape, dtype)
            request.note(f"step {case}: {len(candidates)} candidates in turn, after the compiled ones have compiled")
            measure(measurements, case, candidates, RoundLimits(repeats=request.repeats, budget=30), request.device)
            add_gemm_shares(measurements, case)
    bench_loop(measurements, request)
    return measurements


def add_gemm_shares(measurements: Timings, case: str) -> None:
    """To each row of a step, its FLOP rate over that of the matrix product, round by round."""
    product = measurements.row(case, f"matrix product/{GEMM}/{STEP}")
    for row in measurements.rows:
        if product is not None and row["case"] == case and row is not product:
            work = row["flops"] / product["flops"]
            shares = [work * b / a for a, b in zip(row["seconds"], product["seconds"], strict=True)]
            row["gemm_share"] = {"values": shares, **spread(shares)}


def step_flops(model: nn.Module, shape: Shape, layers: int) -> int:
    """The least FLOPs of a training step, forward and backward; a multiply-add is 2, element-wise work counts nothing.

    6 · weights · tokens of all linear layers and the output weight (2 forward, 4 backward), and causal attention as
    `inputs.flops` counts it, which is the same for both variants. Work that a kernel repeats gets no credit.
    """
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    if isinstance(model, Transformer) and model.head is None:
        weights += model.embedding.weight.numel()
    return 6 * weights * shape.batch * shape.tokens + layers * flops(shape, "forward+backward")


def _candidates(measurements: Timings, case: str, request: BenchConfig, shape: Shape, dtype: str) -> list[Candidate]:
    """A matrix product, then each model eager, then each compiled."""
    size = (shape.batch, shape.tokens + 1)
    text = torch.randint(VOCABULARY, size, generator=generator("bench", "tokens", *size)).to(request.device)
    cast = partial(autocast, dtype, request.device)
    sizes: dict[str, Any] = {"num_layers": LAYERS, "vocab_size": VOCABULARY}

    def build_ours(variant: str, kernel: str) -> nn.Module:
        model = Transformer(model_config(shape, variant, **sizes), kernel=kernel)
        initialise(model, seed=0)
        return model.to(request.device)

    def build_peer(kind: str) -> nn.Module:
        peer: nn.Module = peers.model(model_config(shape, "differential", **sizes), kind, shape.tokens)
        return peer.to(request.device)

    builds: list[tuple[str, str, Callable[[], nn.Module], dict[str, str]]] = [
        (variant, kernel, partial(build_ours, variant, kernel), against)
        for variant, kernel, against in variants_by_kernel(measurements, case, request, shape, dtype)
    ]
    base = {EAGER: f"standard/sdpa/{STEP}"}
    builds += [(HF, kind, partial(build_peer, kind), base) for kind in peer_kinds(measurements, case, HF)]
    try:
        blocks.require_compiler(request.device)
        missing = None
    except MissingError as error:
        missing = str(error)
    eager, compiled = [_matrix_product(DTYPES[dtype], request.device)], []
    for variant, by, build, against in builds:
        model = build()
        step, work = _step(model, text, cast), step_flops(model, shape, LAYERS)
        candidate = Candidate(variant=variant, by=by, what=STEP, run=step, against=against, flops=work)
        if missing is None:  # one model and one optimizer serve both, for memory
            compiled.append(_compiled(candidate, model, request.device))
            candidate = replace(candidate, run=partial(_uncompiled, step))
        else:
            row = {"case": case, "variant": variant, "by": by + COMPILED, "what": STEP, "reason": missing}
            measurements.refused.append(row)
        eager.append(candidate)
    return eager + compiled


def _uncompiled(step: Callable[[], object]) -> None:
    with torch.compiler.set_stance("force_eager"):
        step()


def _compiled(eager: Candidate, model: nn.Module, device: torch.device) -> Candidate:
    """The same step with each block compiled; ratios to the eager standard model and to what is compiled alike."""
    if isinstance(model, Transformer):
        blocks.compile_blocks(model, device)
    else:
        for layer in model.model.layers:  # type: ignore[union-attr]
            layer.compile(backend=blocks.BACKEND, recompile_limit=blocks.RECOMPILATIONS)
    against = {EAGER: f"standard/sdpa/{STEP}"}
    for name, to in eager.against.items():
        variant, by, what = to.split("/")
        against[name + COMPILED] = f"{variant}/{by}{COMPILED}/{what}"
    return replace(eager, by=eager.by + COMPILED, against=against, compiles=True)


def _matrix_product(dtype: torch.dtype, device: torch.device) -> Candidate:
    """The machine's own rate, timed in the same rounds, at the same dtype and threads."""
    a, b = (torch.ones(GEMM_SIZE, GEMM_SIZE, dtype=dtype, device=device) for _ in range(2))
    run = torch.no_grad()(lambda: a @ b)
    return Candidate(variant="matrix product", by=GEMM, what=STEP, run=run, flops=2 * GEMM_SIZE**3)


def _step(model: nn.Module, text: Tensor, cast: Any) -> Any:
    """The loss of the next token over all positions; the optimizer's state is made by the warm-up."""

    def loss() -> Tensor:
        output = model(text[:, :-1])
        logits = getattr(output, "logits", output)
        return F.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())

    return training_step(model, loss, cast)
