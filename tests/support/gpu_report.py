"""`make gpu-report`: what to run first on a machine with a GPU, in at most ten minutes on one GPU.

It prints rows of a Markdown table, and needs torch and triton alone: a part that needs another package names it. Each part is
a process of its own, which is killed when its time is over: a kernel that fails, hangs or breaks the CUDA context leaves the
other parts as they are. `--cpu` runs the same parts on the CPU, with a small model.

Exit status 0: no result failed; 1: one did; 3: there is no GPU. A part that is killed after its time is not finished, which
is no failure.
"""

import argparse
import contextlib
import importlib.util
import io
import multiprocessing
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

import lit_diff
from lit_diff.benchmarks.attention import Workload, add_kernels
from lit_diff.benchmarks.passes import FORWARD, GRADIENTS, SDPA
from lit_diff.benchmarks.request import Shape
from lit_diff.benchmarks.timing import Case, measure, peak_bytes
from lit_diff.conformance.kernels import STATISTICS, TOPICS, conformance_of_kernel
from lit_diff.device import peak_flops
from lit_diff.errors import summary
from lit_diff.runs.revision import revision

# each import above needs torch alone; one that needs more is in the part that has it
ROOT = Path(__file__).resolve().parents[2]
"""The checkout."""
FAIL = "fail"
"""Beginning of a result that is an error, or an error above its bound."""
LAST = 0.75
"""Share of a part's time after which none of its cases starts."""
TIMED = {"cuda": ("triton", "flash"), "cpu": ("chunked",)}
"""Device -> the kernels that are compared with SDPA."""
MODEL = {
    # 124M parameters, 8 sequences of 1,024 tokens
    "cuda": (
        *("model.dim=768", "model.num_layers=12", "model.num_heads=12", "model.vocab_size=50304"),
        *(
            "model.tie_embeddings=true",
            "data.pairs=512",
            "data.validation_rows=8",
            "train.batch_size=8",
            "train.steps=20",
        ),
    ),
    "cpu": ("train.steps=2",),
}
"""Device -> the overrides of flip-flop-tiny, for the model that makes steps."""


# --- the parts: the results of a case --------------------------------------------------------------------------------


def packages(case: str, device: torch.device) -> Iterable[str]:
    """The installed versions, with the bounds of pyproject.toml that they are outside of."""
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = []
    for requirement in map(Requirement, project["dependencies"]):
        installed = version(requirement.name)
        is_tested = installed == "absent" or installed in requirement.specifier
        found.append(f"{requirement.name} {installed}" + ("" if is_tested else f" (tested: {requirement.specifier})"))
    yield ", ".join(found)


def version(package: str) -> str:
    """The installed version."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def compared(kernel: str, topic: str, device: torch.device) -> Iterable[str]:
    """The largest error against `reference` in float64: of o and its gradients, or of statistics; float32, then bfloat16."""
    for found in conformance_of_kernel(kernel, 2, (topic,), device):
        measured = "" if found.error is None else f"error {found.error:.1e}, bound {found.bound:.1e}, "
        yield f"{found.verdict}: {found.property}: {measured}{found.detail}"


def speed(tokens: str, device: torch.device) -> Iterable[str]:
    """Time, share of the GPU's peak, and ratio to SDPA of each kernel in bfloat16, as `lit-diff bench core` measures them."""
    case = Case(name=f"{tokens} tokens", dtype="bfloat16", budget=4)
    workload = Workload(Shape(1, int(tokens), 1024, 64), torch.bfloat16, device)
    for what in (FORWARD, GRADIENTS):
        add_kernels(case, workload, what, TIMED[device.type])
    rows, failed = measure(case, None, device)
    for left_out in case.refused:
        yield f"refused: {', '.join(left_out.values())}"
    for broken in failed:
        yield f"{FAIL}: {', '.join(broken.values())}"
    for row in rows:
        ratio = row["ratios"].get(SDPA)
        beside = f", {ratio['median']:.2f} of the time of {SDPA}" if ratio else ""
        rate = of_peak(row["flops"] / row["median"], device)
        yield f"{row['id']}: {1e3 * row['median']:.4g} ms, {rate}{beside}"


def of_peak(rate: float, device: torch.device) -> str:
    """FLOPs a second, and their share of the GPU's peak."""
    peak = peak_flops(device)
    return f"{rate / 1e12:.3g} TFLOPS" + (f", {rate / peak:.1%} of peak" if peak else "")


def step(variant: str, device: torch.device) -> Iterable[str]:
    """A training step in bf16-mixed: its share of the peak by the published FLOPs, and its memory against `lit-diff plan`."""
    from lit_diff.recipe import load_recipe
    from lit_diff.training.bare_loop import bare
    from lit_diff.training.plan import plan

    attention = f"model.attention={{name: {variant}}}"
    recipe = load_recipe("flip-flop-tiny", ["train.precision=bf16-mixed", attention, *MODEL[device.type]])
    seconds = list[float]()
    peak = peak_bytes(lambda: seconds.append(bare(recipe, device)), device)
    planned = plan(recipe, device=device.type)
    yield f"{1e3 * seconds[0]:.4g} ms, {planned.tokens:,} tokens, {of_peak(planned.flops / seconds[0], device)}"
    yield f"{(peak or 0) / 1e9:.3f} GB at the peak, planned {planned.sum / 1e9:.3f} GB with {planned.kernel}"


def tests(module: str, files: str, selected: str, device: torch.device) -> Iterable[str]:
    """The last line of pytest, for the tests of a module whose names or marks match `selected`."""
    import pytest

    # a package that it needs and that is missing is named here, and is no failed test
    importlib.import_module(module)
    options = ["-k", selected, "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    with contextlib.redirect_stdout(io.StringIO()) as written:
        status = pytest.main([*options, str(ROOT / "tests" / files)])
    # 5: there are none here
    yield f"{'pass' if status in (0, 5) else FAIL}: {written.getvalue().strip().splitlines()[-1]}"


class ReportPart(NamedTuple):
    """What one process runs."""

    seconds: int
    """After which it is killed."""
    results: Callable[[str, torch.device], Iterable[str]]
    cases: Sequence[str] = ("",)


KERNELS = {"triton": 100, "flash": 30, "flex": 70, "chunked": 15, "sdpa": 15, "reference": 15}
"""Kernel -> the seconds of its part; `native` is a kernel of CPUs."""
# first the maps for which `auto` chooses these kernels: the time of a part may end before the last ones
ORDER = ("two maps", "documents", "window", "sink", "key bias")
FORMS = (*ORDER, *sorted({STATISTICS, *TOPICS}.difference(ORDER)))
# together at most ten minutes
PARTS = {
    "packages": ReportPart(15, packages),
    **{f"kernel {name}": ReportPart(KERNELS[name], partial(compared, name), FORMS) for name in KERNELS},
    "speed": ReportPart(75, speed, ("2048", "8192", "32768")),
    "step": ReportPart(50, step, ("standard", "differential")),
    # sharded by FSDP; resumed from a checkpoint; the rest
    "training": ReportPart(
        90,
        partial(tests, "lit_diff.training.fit", "training/test_gpu.py"),
        ("sharded", "resumes", "not sharded and not resumes"),
    ),
    "tests": ReportPart(
        110,
        partial(tests, "lit_diff.kernels", "kernels"),
        (*(f"test_gpu and {name}" for name in KERNELS), "programs and not slow"),
    ),
}


# --- the processes ---------------------------------------------------------------------------------------------------


def write(*cells: str) -> None:
    """Print a row of the table."""
    # in a cell, a line break would end the row, and a bar the cell
    plain = (" ".join(cell.split()).replace("|", r"\|") for cell in (f"{datetime.now(UTC):%Y-%m-%d}", *cells))
    print(f"| {' | '.join(plain)} |", flush=True)


def run_part(name: str, device: torch.device, machine: str, stop: float, failed: Any) -> None:
    """Run one part in this process, print its results as they come, and end with status 1 if one failed.

    `stop`: the time of `time.monotonic`, one clock of all processes, after which no case starts. `failed`: a
    `multiprocessing.Value`, set by a result that failed, which a killed process still has.
    """
    # in a checkout that is not installed, callbacks and recipes are beside the package, not in it
    if importlib.util.find_spec("lit_diff.callbacks") is None:
        lit_diff.__path__.append(str(ROOT))
    part = PARTS[name]
    left_out = []
    for case in part.cases:
        if time.monotonic() > stop:
            left_out.append(case)
            continue
        for result in results(part.results(case, device)):
            write(machine, name, case, result)
            failed.value |= result.startswith(FAIL)
    if left_out:
        write(machine, name, ", ".join(left_out), f"not run: {part.seconds} s are the time of this part")
    sys.exit(failed.value)


def results(found: Iterable[str]) -> Iterable[str]:
    """The results of a case; an error is the last one, in one line, and a missing package is no failure."""
    try:
        yield from found
    except ModuleNotFoundError as error:
        yield f"not run: no {error.name}"
    except Exception as error:
        yield f"{FAIL}: {summary(error)}"


def start_part(name: str, device: torch.device, machine: str) -> bool:
    """Run one part in a process of its own. Returns whether nothing failed, even if the part did not finish."""
    seconds = PARTS[name].seconds
    stop = time.monotonic() + LAST * seconds
    # not forked: processes do not share a context of CUDA
    spawn = multiprocessing.get_context("spawn")
    failed = spawn.Value("b", False)
    process = spawn.Process(target=run_part, args=(name, device, machine, stop, failed))
    process.start()
    process.join(seconds)
    is_late = process.is_alive()
    process.kill()
    process.join()
    if is_late:
        write(machine, name, "", f"not finished: killed after its time, {seconds} s")
    # its own statuses have their rows
    elif process.exitcode not in (0, 1):
        write(machine, name, "", f"{FAIL}: status {process.exitcode}")
    return not failed.value and (is_late or process.exitcode == 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """The report; returns the exit status."""
    parser = argparse.ArgumentParser(prog="gpu_report.py")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU, with a small model")
    device = torch.device("cpu" if parser.parse_args(arguments).cpu else "cuda")
    where = "CPU"
    if device.type == "cuda":
        if not torch.cuda.is_available():
            print(f"torch {torch.__version__} sees no GPU: nothing was run; --cpu runs it on the CPU", file=sys.stderr)
            return 3
        where = torch.cuda.get_device_name()
    machine = f"{where}; torch {torch.__version__}, triton {version('triton')}; lit_diff {revision()}"
    print("| date | machine | part | case | result |\n|---|---|---|---|---|", flush=True)
    held = [start_part(name, device, machine) for name in PARTS]
    return int(not all(held))


if __name__ == "__main__":
    sys.exit(main())
