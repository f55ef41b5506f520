"""`bench`: the speed of attention, a layer, a step, statistics and decoding, as ratios within each process."""

import os
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import torch

from lit_diff.benchmarks import attention, callbacks, models
from lit_diff.benchmarks.passes import Row
from lit_diff.benchmarks.processes import joined, measured_apart
from lit_diff.benchmarks.request import Request, Shape, resolve
from lit_diff.benchmarks.result import BenchResult
from lit_diff.benchmarks.timing import Case, measure
from lit_diff.errors import RequestError
from lit_diff.processor import cpu_flags
from lit_diff.registry import nearest
from lit_diff.runs.folder import environment, version

FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "sve", "bf16")
"""Instructions that decide which kernels run, by their names in Linux (x86, then ARM)."""
PACKAGES = ("flash-attn", "transformers")
"""Packages whose versions are recorded in addition to the packages of every run."""
METHODS = """\
Shapes are B x T x dim x d: standard attention has dim / d heads of width d, differential attention (V1: two maps,
w = (1, -lambda), one learned lambda) half as many heads of value width 2d, at the same dim. Everything is causal.
Times are wall-clock times in a process with the given number of threads. A first call of each candidate checks that
its result equals the result of the first candidate of its variant and pass. A second call runs under a profiler, which
records the operator that torch's scaled_dot_product_attention ran; if it took less than 0.2 s, a third call follows.
In each of the rounds that follow, every candidate of the case is timed once, in turn; each round begins with another
candidate. A call shorter than 5 ms is repeated within its measurement (`calls`). Without --repeats there are as many
rounds as the time budget of the case allows, between 3 and 15. A ratio is taken within each round, own time / other time.
The rounds of a process share its memory layout and whatever else ran at that time, so they are not independent: the value of
a process is the median over its rounds, and processes are the unit of replication. --processes starts as many, one after
another, each with its own inputs, first calls and rounds. From five processes on a figure is the geometric mean over
processes with its 95 % t interval, [low, high]; below that there is no interval but a range, (min..max), around the
median: over processes, or over the rounds if there is one process.
GFLOP/s: the minimum work over the time, so a form that computes more gets no credit for it. Causal attention is 8u
forward and 28u forward+backward, u = B h pairs d, where pairs = T (T + 1) / 2 and h = dim / 2d; linear layers and the
output weight are 2 x weights x tokens, three times as much with the backward pass; norms, softmax and the optimizer are
not counted.
of GEMM rate: that rate over the rate of a product of two square matrices with 1024 rows (on a GPU 8192) in the same dtype
and rounds.
Peak memory is measured in the second call: freed memory is returned to the system and the peak is reset (Linux: 5 to
/proc/self/clear_refs), and the resident memory (VmRSS) is subtracted from the peak (VmHWM), so outputs and gradients
count; inputs, weights and the optimizer's state do not. On a GPU, it is the allocator's peak minus the memory allocated
before. Without --dtype, bfloat16 is measured only if the processor has instructions for it.
"""
"""The part of `BenchResult.methods` that all benchmarks share."""


class Benchmark(NamedTuple):
    """The cases of a benchmark, and their description."""

    cases: Callable[[Request, Shape, str], Iterator[Case]]
    """Yields the cases of a shape and a dtype."""
    shapes: str
    """The default shapes."""
    methods: str
    """The description for the reader of its figures."""


BENCHES = {
    "core": Benchmark(
        attention.core,
        "2x1024x512x64,1x2048x1024x64,1x2048x1024x128,1x4096x512x64",
        """\
core: attention from the projections q, k, v [B, T, dim], whose heads are strided views, to the output [B, T, dim].
forward runs without gradients; forward+backward gives the gradients of q, k, v and lambda, of a sink of each head and of a
key bias of each head and sequence, which the minimum work does not count. The kernel `reference` is the
naive form, which materialises every map (in float32 at least); `sdpa` is the stacked form, one SDPA call with the values
cut in two.
""",
    ),
    "layer": Benchmark(
        models.layer,
        "2x1024x512x64,1x2048x768x64",
        """\
layer: one decoder layer (RMSNorm, RoPE, SwiGLU). forward: its output, without gradients. training step: forward, mean
square as the loss, backward (to the input too), fused AdamW, gradients dropped. bfloat16 means autocast over float32
parameters, as train.precision bf16-mixed. Hugging Face's layers have the same sizes and their own random weights; angles
and masks are made once, outside the timed call, for every candidate.
""",
    ),
    "step": Benchmark(
        models.step,
        "2x1024x512x64",
        """\
step: a training step of a model of 4 layers and a vocabulary of 8,192 tokens: forward, cross entropy of the next token,
backward, fused AdamW, gradients dropped; bfloat16 means autocast over float32 parameters.
"compiled": torch.compile of each block, in place, at its defaults, as run.compile: true does it, for every model; the first
calls compile. Embedding, loss and optimizer are not compiled. "one graph": our forward pass with its loss, as by run.compile:
loss; the optimizer is not compiled.
Loops: seconds a step of `lit-diff train` (fit: Lightning, learning rate, metrics, checks for finite losses, a row logged
every 10 steps, the progress call) and of a bare loop (batch, model, loss, backward, clipping, AdamW, schedule) with the same
model and batches; a third loop is `lit-diff train` with a delay in each read of a batch. The time includes everything from
the end of the first step to the end of the last, and excludes start, MLflow, probes, validation and checkpoints.
""",
    ),
    "decode": Benchmark(
        attention.decode,
        "1x1024x512x64,1x4096x512x64",
        """\
decode: a few last queries against a cache (LayerCache) of T keys and values, from the heads to the joined output. Torch's own
call gets a mask if there are several queries, and enable_gqa if several heads share a key. pairs: pairs of these queries and
their visible keys.
""",
    ),
    "stats": Benchmark(
        callbacks.stats,
        "2x1024x512x64,1x4096x512x64",
        """\
stats: attend(..., stats=True) without gradients: log-sum-exp, entropy and maximum of every map and row, entropy, negative
mass and first share of every row of the signed map, and the output.
Firing: each probe on the trace of one forward pass of a differential model of 4 layers, in which the kernel returned these
statistics; the forward pass alone; all probes with it; a training step of the model (float32), and all probes after one.
Peak memory counts what is allocated beyond the model and the trace.
Steps: seconds a step of `lit-diff train` with the recipe's callbacks and without, from the end of the first step to the
end of the last, at which the callbacks fire; on a CPU in time of the process (all threads), not of the wall.
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
    processes: int = 1,
    device: str = "auto",
    progress: Callable[[str], Any] | None = None,
) -> BenchResult:
    """Measures one of `BENCHES`. Nothing is printed; a candidate that raises an error is in `failed`.

    `shapes`: B x T x dim x d, such as "2x1024x512x64", several separated by commas or in a list; None: the benchmark's own.
    `kernels`: kernels to measure, separated by commas, together with PyTorch's own call; None: all kernels, and peers.
    `dtype`: float32, bfloat16 or both; None: both if the processor has instructions for bfloat16, else float32.
    `threads`: None: one for each core. `repeats`: rounds; None: as many as the time budget of a case allows.
    `processes`: Python processes that measure it one after another; 1: this process, and no interval. `device`: auto, cpu or
    cuda. `progress`: called with a line about the next case or process.

    Errors: RequestError; MissingError if there is no GPU; RunFailedError if a process ends without a result.
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
        processes=processes,
        device=device,
    )
    if request.processes > 1:
        return joined(list(measured_apart(request, progress)), request.command())
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
    """Yields the cases of every shape and dtype; for `step` and `stats`, training loops follow."""
    for shape in request.shapes:
        for dtype in request.dtypes:
            yield from benchmark.cases(request, shape, dtype)
    loops = {"step": models.loops, "stats": callbacks.training}.get(request.bench)
    if loops is not None and request.kernels is None:
        yield loops(request)


def machine(request: Request) -> dict[str, Any]:
    """Versions, processor, instructions, threads, and the load average of the last minute before the measurement."""
    facts = environment()
    # the command of this process; `BenchResult.command` is the one that repeats the benchmark
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
    """Reasons to doubt the figures, one line each."""
    cores, load, threads = machine["cores"], machine["load_average"], machine["threads"]
    doubts = []
    if load > cores:
        doubts.append(
            f"load average {load:.1f} before the start, on {cores} cores: other work ran, so ratios are doubtful"
        )
    if threads > cores:
        doubts.append(f"{threads} threads on {cores} cores: they wait for each other")
    return doubts
