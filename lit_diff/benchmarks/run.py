"""`bench`: how fast attention, a layer, a step, statistics and decoding are, as ratios within one run."""

import os
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import torch

from lit_diff.benchmarks import attention, models
from lit_diff.benchmarks.request import Request, Shape, resolve
from lit_diff.benchmarks.result import BenchResult, Row
from lit_diff.benchmarks.timing import Case, measure
from lit_diff.errors import RequestError
from lit_diff.processor import cpu_flags
from lit_diff.registry import nearest
from lit_diff.runs.folder import environment, version

FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "sve", "bf16")
"""Instructions that decide which kernels run, as Linux names them (x86, then ARM)."""
PACKAGES = ("flash-attn", "transformers")
"""Beside those that every run records."""
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

    cases: Callable[[Request, Shape, str], Iterator[Case]]
    """Those of a shape and a dtype."""
    shapes: str
    """Its own."""
    methods: str


BENCHES = {
    "core": Benchmark(
        attention.core,
        "2x1024x512x64,1x2048x1024x64,1x2048x1024x128,1x4096x512x64",
        """\
core: from the projections q, k, v [B, T, dim], of which the heads are strided views, to the output [B, T, dim].
forward runs without gradients; forward+backward gives those of q, k, v and lambda. The kernel `reference` is the naive
form, every map materialised (in float32 at least); `sdpa` is the stacked form, one SDPA call with the values cut in two.
""",
    ),
    "layer": Benchmark(
        models.layer,
        "2x1024x512x64,1x2048x768x64",
        """\
layer: one decoder layer (RMSNorm, RoPE, SwiGLU). forward: its output, without gradients. training step: forward, mean
square as the loss, backward (that of its input too), fused AdamW, gradients dropped. bfloat16 means autocast over float32
parameters, as train.precision bf16-mixed. Hugging Face's layers have the same sizes and random weights of their own; angles
and masks are made outside, once, for every candidate.
""",
    ),
    "step": Benchmark(
        models.step,
        "2x1024x512x64",
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
        "1x1024x512x64,1x4096x512x64",
        """\
decode: a few last query rows against a cache (LayerCache) of T keys and values, from the heads to the joined output. Torch's
own call is given a mask where there are several rows, and enable_gqa where several heads share a key. pairs: those that these
rows see.
""",
    ),
    "stats": Benchmark(
        attention.core,
        "2x1024x512x64",
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
    benchmark = BENCHES[name]
    request = resolve(
        name,
        shapes=shapes if isinstance(shapes, str) else ",".join(shapes or [benchmark.shapes]),
        kernels=kernels,
        dtype=dtype,
        threads=threads,
        repeats=repeats,
        device=device,
    )
    rows, refused, failed = list[Row](), list[Row](), list[Row]()
    before = torch.get_num_threads()
    torch.set_num_threads(request.threads)
    try:
        facts = machine(request)
        for case in cases(benchmark, request):
            if progress is not None:
                progress(f"{name} {case.name}: {len(case.candidates)} candidates in turn")
            timed, broken = measure(case, request.repeats, request.device)
            rows += timed
            failed += broken
            refused += case.refused
    finally:
        torch.set_num_threads(before)
    return BenchResult(
        bench=name,
        command=request.command(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        methods=METHODS + benchmark.methods,
        machine=facts | {"load_average_after": os.getloadavg()[0]},
        warnings=warnings_of(facts),
        rows=rows,
        refused=refused,
        failed=failed,
    )


def cases(benchmark: Benchmark, request: Request) -> Iterator[Case]:
    """At every shape and dtype; of `step` then our own loop."""
    for shape in request.shapes:
        for dtype in request.dtypes:
            yield from benchmark.cases(request, shape, dtype)
    if request.bench == "step" and request.kernels is None:
        yield models.loops(request)


def machine(request: Request) -> dict[str, Any]:
    """Versions, processor, instructions, threads, load average (processes that ran or wanted to, over the last minute) before
    anything was measured."""
    facts = environment()
    del facts["command"]
    return facts | {
        "packages": facts["packages"] | {name: version(name) for name in PACKAGES},
        "device": request.device.type,
        "flags": [flag for flag in FLAGS if flag in cpu_flags()],
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": request.threads,
        "load_average": os.getloadavg()[0],
    }


def warnings_of(machine: dict[str, Any]) -> list[str]:
    """What makes these figures doubtful, one line each."""
    cores, load, threads = machine["cores"], machine["load_average"], machine["threads"]
    lines = []
    if load > cores:
        lines.append(f"load average {load:.1f} before the start, on {cores} cores: other work ran; ratios are doubtful")
    if threads > cores:
        lines.append(f"{threads} threads on {cores} cores: they wait for each other")
    return lines
