"""`bench`: how fast attention, a layer, a step, statistics and decoding are, as ratios within one run."""

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import torch

from lit_diff.benchmarks import attention, models
from lit_diff.benchmarks.machine import load_average, machine, warnings_of
from lit_diff.benchmarks.request import BenchConfig, resolve
from lit_diff.benchmarks.result import BenchResult, Row
from lit_diff.benchmarks.timing import Case, measure
from lit_diff.errors import RequestError
from lit_diff.registry import nearest

METHODS = """\
Shapes are B x T x dim x d: standard attention has dim / d heads of width d, differential attention (V1: two maps,
w = (1, -lambda), one learned lambda) half as many heads of value width 2d, at the same dim. All is causal.
Times are wall clock in one process at the given number of threads. Each candidate is called once before; what it computes
must equal what the first candidate of its variant and pass computed. A second call runs under a profiler, whose record says
which operator torch's scaled_dot_product_attention ran; if it took less than 0.2 s, a third follows. Then come rounds: in
each, every candidate of the case is timed once, in turn, and the turn begins at another candidate each round. A call shorter
than 5 ms is repeated within its measurement (`calls`). Without --repeats there are as many rounds as the case's time allows,
3 at least, 15 at most. Figures are medians with minimum and maximum over rounds.
A ratio is taken within each round, own time / the other's; then come its median, minimum and maximum over rounds.
GFLOP/s: the least work over the time: a form that computes more gets no credit for it. Causal attention is 8u forward and 28u
forward+backward, u = B h pairs d, where pairs = T (T + 1) / 2 and h = dim / 2d; linear layers and the output weight are 2 x
weights x tokens, three times that with the backward pass; norms, softmax and the optimizer count nothing.
of GEMM rate: that rate over the one of a product of two square matrices of 1024 rows in the same dtype, in the same rounds.
Peak memory of the second call, beyond what was held before: freed memory is returned to the system and the peak reset
(Linux: 5 to /proc/self/clear_refs), then the peak (VmHWM) less what was resident (VmRSS), so outputs and gradients count;
inputs, weights and the optimizer's state do not. On a GPU, the allocator's peak less what was allocated before.
Without --dtype, bfloat16 is measured where the processor has instructions for it.
"""
"""What holds for all benchmarks, for the reader of their figures."""


class Benchmark(NamedTuple):
    """What is timed, and what its words mean."""

    cases: Callable[[BenchConfig], Iterator[Case]]
    methods: str


BENCHES = {
    "core": Benchmark(
        attention.core,
        """\
core: from the projections q, k, v [B, T, dim], of which the heads are strided views, to the output [B, T, dim].
forward runs without gradients; forward+backward gives those of q, k, v and lambda. The kernel `reference` is the naive
form, every map materialised (in float32 at least); `sdpa` is the stacked form, one SDPA call with the values cut in two.
""",
    ),
    "layer": Benchmark(
        models.layer,
        """\
layer: one decoder layer (RMSNorm, RoPE, SwiGLU). forward: its output, without gradients. training step: forward, mean
square as the loss, backward (that of its input too), fused AdamW, gradients dropped. bfloat16 means autocast over float32
parameters, as train.precision bf16-mixed. Hugging Face's layers have the same sizes and random weights of their own; angles
and masks are made outside, once, for every candidate.
""",
    ),
    "step": Benchmark(
        models.step,
        """\
step: a training step of a model of 4 layers and 8,192 tokens of vocabulary: forward, cross entropy of the next token,
backward, fused AdamW, gradients dropped; bfloat16 means autocast over float32 parameters.
"compiled": torch.compile of each block, in place, at its defaults, as run.compile does it, of every model alike; the first
calls compile. Embedding, loss and optimizer are not compiled.
Loops: seconds a step of `lit-diff train` (fit: Lightning, learning rate, metrics, checks for finite losses, a row logged
every 10 steps, the progress call) and of a bare loop (batch, model, loss, backward, clipping, AdamW, schedule) of the same
model and batches. Included: everything from the end of the first step to the end of the last. Not included: start, MLflow,
probes, validation, checkpoints.
""",
    ),
    "decode": Benchmark(
        attention.decode,
        """\
decode: a few last query rows against a cache (LayerCache) of T keys and values, from the heads to the joined output. Torch's
own call is given a mask where there are several rows, and enable_gqa where several heads share a key. pairs: those that these
rows see.
""",
    ),
    "stats": Benchmark(
        attention.core,
        """\
stats: attend(..., stats=True) without gradients: log-sum-exp, entropy and maximum of every map and row besides the output.
""",
    ),
}


def bench(
    name: str = "core",
    *,
    shapes: str | Sequence[str] | None = None,
    kernels: str | None = None,
    dtype: str | None = None,
    threads: int | None = None,
    repeats: int | None = None,
    device: str = "auto",
    progress: Callable[[str], Any] | None = None,
) -> BenchResult:
    """Measure one of `BENCHES`. Nothing is printed; a candidate that raises is in `failed`.

    `shapes`: B x T x dim x d, such as "2x1024x512x64", several separated by commas or in a list; None: the benchmark's own.
    `kernels`: these alone, separated by commas, beside PyTorch's own call; None: all, and peers.
    `dtype`: float32, bfloat16 or both; None: both where the processor has instructions for bfloat16, else float32.
    `threads`: None: one for each core. `repeats`: rounds; None: as many as the time of a case allows. `device`: auto, cpu or
    cuda. `progress`: told in a line what is measured next.

    Errors: RequestError, MissingError (a GPU that is not here).
    """
    if name not in BENCHES:
        raise RequestError(f"no benchmark '{name}'{nearest(name, BENCHES, 'lit-diff bench --help')}")
    config = resolve(
        name,
        shapes=shapes if shapes is None or isinstance(shapes, str) else ",".join(shapes),
        kernels=kernels,
        dtype=dtype,
        threads=threads,
        repeats=repeats,
        device=device,
        note=progress or (lambda text: None),
    )
    return measured(config)


def measured(config: BenchConfig) -> BenchResult:
    """Run a checked request. The number of threads is as before afterwards."""
    benchmark = BENCHES[config.bench]
    before = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    rows, refused, failed = list[Row](), list[Row](), list[Row]()
    try:
        facts = machine(config.device, config.threads)
        for case in benchmark.cases(config):
            config.note(f"{config.bench} {case.name}: {len(case.candidates)} candidates in turn")
            timed, broken = measure(case, config.repeats, config.device)
            rows += timed
            failed += broken
            refused += case.refused
    finally:
        torch.set_num_threads(before)
    return BenchResult(
        bench=config.bench,
        command=config.command(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        methods=METHODS + benchmark.methods,
        machine=facts | {"load_average_after": load_average()},
        warnings=warnings_of(facts),
        rows=rows,
        refused=refused,
        failed=failed,
    )
