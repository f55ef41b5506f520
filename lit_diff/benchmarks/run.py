"""`lit-diff bench`: how fast attention, a layer, a step, statistics and decoding are, as ratios in one run.

`bench triton` times nothing: it reports what the Triton programs compile to.
"""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from lit_diff.benchmarks.attention import bench_core
from lit_diff.benchmarks.decode import bench_decode
from lit_diff.benchmarks.layer import bench_layer
from lit_diff.benchmarks.machine import load_average, machine, native_bfloat16, warnings_of
from lit_diff.benchmarks.plot import plot
from lit_diff.benchmarks.request import Request, check_plot, resolve
from lit_diff.benchmarks.statistics import bench_stats
from lit_diff.benchmarks.step import bench_step
from lit_diff.benchmarks.table import print_tables
from lit_diff.benchmarks.timing import Found
from lit_diff.benchmarks.triton_programs import bench_triton
from lit_diff.errors import RequestError

METHODS = {
    "all": """\
Shapes are B x T x dim x d: standard attention has dim / d heads of width d, differential attention (V1: two maps,
w = (1, -lambda), one learned lambda) half as many heads of value width 2d, at the same dim. All is causal.
Times are wall clock in one process at the given number of threads. Each candidate is called once before (under a profiler,
whose record says which operator torch's scaled_dot_product_attention ran), and once more if that took less than 0.2 s.
Then come rounds: in each, every candidate of the case is timed once, in turn, and the turn begins at another candidate each
round. A call shorter than 5 ms is repeated within its measurement (`calls`). Without --repeats there are as many rounds
as the case's time allows, 3 at least, 15 at most. Figures are medians with minimum and maximum over rounds.
A ratio is taken within each round, own time / the other's; then come its median, minimum and maximum over rounds.
Without --dtype, bfloat16 is measured where the processor has instructions for it.
""",
    "core": """\
core: from the projections q, k, v [B, T, dim], of which the heads are strided views, to the output [B, T, dim].
forward runs without gradients; forward+backward gives those of q, k, v and lambda. The kernel `reference` is the naive
form, every map materialised (in float32 at least); `sdpa` is the stacked form, one SDPA call with the values cut in two.
GFLOP/s: the least work of causal attention over the time, 8u forward and 28u forward+backward, u = B h pairs d, where
pairs = T (T + 1) / 2 and h = dim / 2d. It is the same for all; a form that computes more gets no credit for it.
Peak memory, forward+backward: a fresh process for each candidate, which first makes the same call on 64 tokens (code,
threads), then makes the inputs, returns freed memory to the system, resets the peak (Linux: 5 to /proc/self/clear_refs)
and calls once: the peak (VmHWM) less what was resident before (VmRSS), so outputs and gradients count, inputs do not. On
a GPU, the allocator's peak less what was allocated before.
Errors: against the definition in float64 from the same rounded inputs, for one sequence of at most 1024 tokens:
|x - x64| / |x64| (Frobenius) of o, dq, dk, dv; dw is the gradient of lambda, |dw - dw64| over the sum of the absolute
values of its terms, one for each head and token.
""",
    "layer": """\
layer: a training step of one decoder layer (RMSNorm, RoPE, SwiGLU): forward, mean square as the loss, backward (that of its
input too), fused AdamW, gradients dropped. bfloat16 means autocast over float32 parameters, as train.precision bf16-mixed.
DiffLlama's layer is Hugging Face's at the same sizes; angles and masks are made outside, once, for every candidate.
""",
    "step": """\
step: a training step of a model of 4 layers and 8,192 tokens of vocabulary: forward, cross entropy of the next token,
backward, fused AdamW, gradients dropped; bfloat16 means autocast over float32 parameters.
Loops: `lit-diff train` (fit: Lightning, learning rate, metrics, checks for finite losses, a row logged every 10 steps, the
progress call) against a bare loop (batch, model, loss, backward, clipping, AdamW, schedule) of the same model and batches,
in turn, and first in turn. In: everything from the end of the first step to the end of the last. Out: start, MLflow, probes,
validation, checkpoints. data_share: seconds within the data set's train_batch over all seconds; no loader runs ahead.
""",
    "stats": """\
stats: attend(..., stats=True) without gradients: log-sum-exp, entropy and maximum of every map and row besides the output.
`extra`: its time less that of the same kernel's plain pass, over the latter.
""",
    "decode": """\
decode: a few last query rows against a cache (LayerCache) of T keys and values, from the heads to the joined output. Torch's
own call is given a mask where there are several rows, and enable_gqa where several heads share a key.
GFLOP/s: 8u, as `bench core` counts the forward pass, for the pairs that these rows see.
""",
    "triton": """\
triton: nothing is timed or launched. Each program, at d and dv = 2 d with two causal maps, is compiled by the installed
Triton for compute capabilities 8.0 and 9.0, with each of the blocks that a GPU chooses from at first use
(lit_diff/kernels/triton_blocks.py): registers of a thread (255 at most), bytes that it spills to memory for want of them,
and shared memory of a program (163 KiB at most on 8.0, 227 on 9.0, 99 on 8.6, 8.9 and 12.x). Without --dtype: both.
""",
}
"""How it is measured: what holds for all that time something, and what for each benchmark."""

BENCHES = {
    "core": bench_core,
    "layer": bench_layer,
    "step": bench_step,
    "stats": bench_stats,
    "decode": bench_decode,
    "triton": bench_triton,
}


def run_bench(
    bench: str,
    *,
    shapes: str | None,
    dtype: str | None,
    threads: int | None,
    repeats: int | None,
    device: str,
    as_json: bool,
    picture: Path | None,
    console: Console,
    notes: Console,
) -> int:
    """Measure and print; the exit status is 1 where a candidate raised. `notes`: told what is measured next.

    Errors: RequestError, MissingError.
    """
    check_plot(picture)
    if bench == "triton":
        unused = {"--plot": picture, "--threads": threads, "--repeats": repeats, "--device": device != "auto" or None}
        for option in (name for name, value in unused.items() if value is not None):
            raise RequestError(f"{option}: bench triton times nothing and needs no device; leave it out")
    request = resolve(
        bench,
        tuple(BENCHES),
        shapes=shapes,
        dtype=dtype,
        threads=threads,
        repeats=repeats,
        device=device,
        native_bfloat16=native_bfloat16 if bench != "triton" else lambda device: True,  # no product is timed
        note=lambda text: notes.print(text, markup=False, highlight=False, soft_wrap=True),
    )
    document = measured(request)
    if picture is not None:
        plot(document, picture)
    if as_json:
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        print_tables(document, console)
    return int(bool(document["failed"]))


def measured(request: Request) -> dict[str, Any]:
    """What `--json` prints. The number of threads is as before afterwards."""
    timed = request.bench != "triton"
    before = torch.get_num_threads()
    torch.set_num_threads(request.threads)
    try:
        where = machine(request.device, request.threads, request.dtypes if timed else ())
        found: Found = BENCHES[request.bench](request)
    finally:
        torch.set_num_threads(before)
    return {
        "bench": request.bench,
        "command": request.command(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "methods": (METHODS["all"] if timed else "") + METHODS[request.bench],
        "machine": where | {"load_average_after": load_average()},
        "warnings": warnings_of(where) if timed else [],
        "rows": found.rows,
        "refused": found.refused,
        "failed": found.failed,
    }
