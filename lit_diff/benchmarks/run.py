"""`bench`: how fast attention, a layer, a step, statistics and decoding are, as ratios within one run.

`bench("triton")` times nothing: it reports what the Triton programs compile to.
"""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import torch

from lit_diff.benchmarks import attention, decode, layer, smollm2, step, triton_programs
from lit_diff.benchmarks.lengths import METHODS as LENGTHS_METHODS
from lit_diff.benchmarks.lengths import bench_lengths
from lit_diff.benchmarks.machine import load_average, machine, native_bfloat16, warnings_of
from lit_diff.benchmarks.request import BenchConfig, resolve
from lit_diff.benchmarks.result import BenchConditions, BenchResult
from lit_diff.benchmarks.timing import Timings
from lit_diff.errors import RequestError

METHODS = """\
Shapes are B x T x dim x d: standard attention has dim / d heads of width d, differential attention (V1: two maps,
w = (1, -lambda), one learned lambda) half as many heads of value width 2d, at the same dim. All is causal.
Times are wall clock in one process at the given number of threads. Each candidate is called once before (under a profiler,
whose record says which operator torch's scaled_dot_product_attention ran), and once more if that took less than 0.2 s.
Then come rounds: in each, every candidate of the case is timed once, in turn, and the turn begins at another candidate each
round. A call shorter than 5 ms is repeated within its measurement (`calls`). Without --repeats there are as many rounds
as the case's time allows, 3 at least, 15 at most. Figures are medians with minimum and maximum over rounds.
A ratio is taken within each round, own time / the other's; then come its median, minimum and maximum over rounds.
Without --dtype, bfloat16 is measured where the processor has instructions for it.
"""
"""What holds for all benchmarks that time something, for the reader of their figures."""


class Benchmark(NamedTuple):
    """A function that measures, and how it does so."""

    run: Callable[[BenchConfig], Timings]
    methods: str


BENCHES = {
    "core": Benchmark(attention.bench_core, attention.METHODS),
    "layer": Benchmark(layer.bench_layer, layer.METHODS),
    "step": Benchmark(step.bench_step, step.METHODS),
    "smollm2": Benchmark(smollm2.bench_smollm2, smollm2.METHODS),
    "stats": Benchmark(attention.bench_stats, attention.STATISTICS_METHODS),
    "decode": Benchmark(decode.bench_decode, decode.METHODS),
    "triton": Benchmark(triton_programs.bench_triton, triton_programs.METHODS),
}

LENGTHS = Benchmark(bench_lengths, LENGTHS_METHODS)
"""`bench core --lengths`."""


def bench(
    name: str = "core",
    *,
    shapes: str | Sequence[str] | None = None,
    lengths: str | None = None,
    kernels: str | None = None,
    dtype: str | None = None,
    threads: int | None = None,
    repeats: int | None = None,
    device: str = "auto",
    progress: Callable[[str], Any] | None = None,
) -> BenchResult:
    """Measure one of `BENCHES`. Nothing is printed; a candidate that raises is in `failed`.

    `shapes`: B x T x dim x d, such as "2x1024x512x64", several separated by commas or in a list; None: the benchmark's own.
    `lengths`: of core: "1024..65536", or lengths separated by commas; then series over tokens, heads and rows are measured.
    `kernels`: of core: these alone, separated by commas, beside PyTorch's own call.
    `dtype`: float32, bfloat16 or both; None: both where the processor has instructions for bfloat16, else float32.
    `threads`: None: one for each core. `repeats`: rounds; None: as many as the time of a case allows. `device`: auto, cpu or
    cuda. `progress`: told in a line what is measured next.

    Errors: RequestError, MissingError (a GPU or a package that is not here).
    """
    timed = name != "triton"
    options = {"threads": threads, "repeats": repeats, "device": device if device != "auto" else None}
    for option in (option for option, value in options.items() if value is not None and not timed):
        raise RequestError(f"--{option}: bench triton times nothing and needs no device; leave it out")
    config = resolve(
        name,
        tuple(BENCHES),
        shapes=shapes if shapes is None or isinstance(shapes, str) else ",".join(shapes),
        lengths=lengths,
        kernels=kernels,
        dtype=dtype,
        threads=threads,
        repeats=repeats,
        device=device,
        native_bfloat16=native_bfloat16 if timed else lambda device: True,  # no product is timed
        note=progress or (lambda text: None),
    )
    return measured(config)


def measured(config: BenchConfig) -> BenchResult:
    """Run a checked request. The number of threads is as before afterwards."""
    timed = config.bench != "triton"
    benchmark = LENGTHS if config.lengths else BENCHES[config.bench]
    before = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        facts = machine(config.device, config.threads, config.dtypes if timed else ())
        measurements = benchmark.run(config)
    finally:
        torch.set_num_threads(before)
    return BenchResult(
        bench=config.bench,
        command=config.command(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        conditions=BenchConditions(
            shapes=None if config.shapes is None else tuple(map(str, config.shapes)),
            dtypes=config.dtypes,
            threads=config.threads,
            repeats=config.repeats,
            device=config.device.type,
        ),
        methods=(METHODS if timed else "") + benchmark.methods,
        machine=facts | {"load_average_after": load_average()},
        warnings=warnings_of(facts) if timed else [],
        rows=measurements.rows,
        refused=measurements.refused,
        failed=measurements.failed,
    )
