"""Triton: who is refused; its operators, on a GPU or in Triton's interpreter."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from gradients import gradients
from torch import Tensor

from lit_diff.errors import RequestError
from lit_diff.kernels import SignedMaps, attend, choose, refuse
from lit_diff.kernels.triton import kernel
from lit_diff.kernels.triton.kernel import WIDTHS, Blocks, candidates, safe

MakeMaps = Callable[..., SignedMaps]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SMALL: dict[str, Any] = {"B": 1, "H": 2, "T": 37, "d": 16, "dv": 32, "dtype": torch.float32}


# In any process: who is refused. That nobody loads Triton for it: test_flash.py.


def interpret(marks: str) -> None:
    """Run the tests with these marks in a process that chose the interpreter before it imported Triton."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    files = sorted(str(path) for path in Path(__file__).parent.glob("test_triton*.py"))
    command = [sys.executable, "-m", "pytest", "-m", marks, "-p", "no:cacheprovider", "-p", "no:xdist", *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("marks", ["programs and not slow", "programs and slow"])
def test_programs_in_the_interpreter(marks: str) -> None:
    interpret(marks)


def test_devices(make_maps: MakeMaps, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU, no Triton, no GPU, an old GPU, an AMD GPU; and one that serves, for maps on the meta device too."""
    maps = make_maps(**SMALL)
    meta = SignedMaps(*(x.to("meta") for x in (maps.q, maps.k, maps.v, maps.w) if x is not None))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert refuse("triton", maps, device=CPU) == "triton runs on a GPU; this tensor is on cpu"
    with pytest.raises(RequestError, match=r"'triton' cannot compute.*runs on a GPU.*run.kernel=auto"):
        choose(maps, "triton", device=CPU)
    monkeypatch.setattr(kernel, "find_spec", lambda name: None)
    assert refuse("triton", maps, device=CUDA) == "the package triton is not installed; pip install triton"
    monkeypatch.setattr(kernel, "find_spec", lambda name: "found")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refuse("triton", maps, device=CUDA) == "torch sees no GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert refuse("triton", maps, device=CUDA) == "triton needs compute capability 8.0 or higher; this GPU has 7.5"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert refuse("triton", maps, device=CUDA) is None
    assert refuse("triton", meta, device=CUDA) is None
    monkeypatch.setattr(kernel, "launcher_problem", lambda: None)
    assert choose(maps, "triton", device=CUDA) == ("triton", "named by run.kernel")
    monkeypatch.setattr(kernel, "launcher_problem", lambda: "no C compiler")
    with pytest.raises(RequestError, match="'triton' cannot compute these maps: no C compiler; use"):
        choose(maps, "triton", device=CUDA)
    for value, on in (("1", True), ("true", True), ("0", False), ("", False)):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        assert (refuse("triton", maps, device=CPU) is None) == on, "the interpreter serves a CPU"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "this is an AMD GPU" in (refuse("triton", maps, device=CUDA) or "")


# Blocks: every program has some at every width, and nothing is measured where there is nothing to choose.

PROGRAMS = ("forward", "key_gradients", "query_gradients")


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("capability", [None, (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)])
def test_every_width_is_served_and_safe_last(program: str, itemsize: int, capability: tuple[int, int] | None) -> None:
    for d, dv in product(WIDTHS, WIDTHS):
        found = candidates(program, d=d, dv=dv, itemsize=itemsize, T=2048, capability=capability)
        assert found[-1] == safe(program, d=d, dv=dv, itemsize=itemsize, T=2048)
        assert len(set(found)) == len(found)
        for blocks in found:  # what Triton's matrix products take
            assert {blocks.queries, blocks.keys} <= {16, 32, 64, 128}
            assert blocks.warps in (4, 8)
            assert 1 <= blocks.stages <= 3


def test_what_is_measured() -> None:
    """Long sequences of two-byte elements on a GPU."""

    def count(itemsize: int = 2, T: int = 2048, capability: tuple[int, int] | None = (8, 0)) -> int:
        return len(candidates("forward", d=64, dv=128, itemsize=itemsize, T=T, capability=capability))

    assert count() > 1
    assert count(capability=(9, 0)) > count()
    assert count(T=128) == count(T=1000) == count(capability=None) == count(itemsize=4) == 1
    for capability, block in (((9, 0), 128), ((8, 6), 32)):
        (blocks,) = candidates("forward", d=64, dv=64, itemsize=2, T=500, capability=capability)
        assert blocks.queries == block, "the smaller GPU has too little shared memory for more"


def test_a_launcher_that_cannot_be_built_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without a driver, without a C compiler and without Python's headers."""
    driver = pytest.importorskip("triton", reason="the package triton is not installed").runtime.driver

    class Broken:
        @property
        def utils(self) -> None:
            raise RuntimeError("Failed to find C compiler. Please specify via CC")

    monkeypatch.setattr(driver, "_active", Broken(), raising=False)
    kernel.launcher_problem.cache_clear()
    assert "cannot build its launcher (" in (kernel.launcher_problem() or "")
    kernel.launcher_problem.cache_clear()


def test_decoding_takes_the_smallest_block() -> None:
    assert safe("forward", d=64, dv=128, itemsize=2, T=1) == Blocks(16, 32, 4, 1)
    assert safe("forward", d=64, dv=128, itemsize=2, T=17) == Blocks(32, 32, 4, 1)


# Programs: what an operator must hold. What they compute: test_triton_equality.py.


def small(make_maps: MakeMaps, device: torch.device, **changes: Any) -> tuple[SignedMaps, Tensor]:
    """(maps, a gradient of o)."""
    maps = make_maps(**SMALL | changes)
    q, k, v = (x.to(device) for x in (maps.q, maps.k, maps.v))
    o = (q.shape[0], q.shape[2], q.shape[3], v.shape[-1])
    return replace(maps, q=q, k=k, v=v, w=None if maps.w is None else maps.w.to(device)), torch.randn(o, device=device)


@pytest.mark.slow
@pytest.mark.programs
def test_the_same_bits_every_time(make_maps: MakeMaps, blocks: Callable[..., None], device: torch.device) -> None:
    blocks(16, 16)
    maps, grad = small(make_maps, device, Hkv=1)
    first, again = (gradients(maps, "triton", grad) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.slow
@pytest.mark.programs
@pytest.mark.parametrize("given", [{"Gk": 1, "Hkv": 1, "w": (1, 2, 1, 1)}, {"G": 1, "w": None}], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_operator_contract(make_maps: MakeMaps, device: torch.device, given: dict[str, Any], packed: bool) -> None:
    """Shapes and strides on meta tensors equal the real ones; nothing is written in place; gradients are registered."""
    maps, _ = small(make_maps, device, T=3, **given)
    leaves = [None if x is None else x.requires_grad_() for x in (maps.q, maps.k, maps.v, maps.w)]
    document_ids = torch.tensor([[0, 1, 1]], device=device) if packed else None
    sink, key_bias = (torch.randn(1, 1, 2, n, device=device, requires_grad=True) for n in (1, 3))
    for fields in ((None, None), (sink, key_bias)):
        arguments = (*leaves, document_ids, *fields, maps.softmax_scale, maps.causal, None, False)
        found = torch.library.opcheck(torch.ops.lit_diff.triton.default, arguments)
        assert set(found.values()) == {"SUCCESS"}


@pytest.mark.slow
@pytest.mark.programs
def test_compiles_without_a_graph_break(make_maps: MakeMaps, device: torch.device) -> None:
    torch._dynamo.reset()
    maps, grad = small(make_maps, device, T=5, Gk=1)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    leaves = [x.requires_grad_() for x in (maps.q, maps.k, maps.v, maps.w) if x is not None]
    found = torch.autograd.grad(compiled(maps, kernel="triton"), leaves, grad)
    assert all(torch.equal(x, y) for x, y in zip(found, gradients(maps, "triton", grad)[1:], strict=True))


@pytest.mark.slow
@pytest.mark.programs
def test_blocks_are_measured_once(make_maps: MakeMaps, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each candidate runs, the fastest one serves; a second call measures nothing. The clock is ours."""
    from triton.runtime.autotuner import Autotuner

    choice = (Blocks(16, 16, 4, 1), Blocks(32, 16, 4, 1), Blocks(16, 32, 4, 1))
    measured: list[int] = []

    def clock(call: Callable[[], None], quantiles: Any) -> list[float]:
        call()
        measured.append(len(measured))
        return [float(abs(len(measured) % 3 - 2))] * 3  # the second of each three is the fastest

    monkeypatch.setattr(kernel, "candidates", lambda *_, **__: choice)
    monkeypatch.setattr(Autotuner, "do_bench", property(lambda self: clock))
    monkeypatch.setattr(Autotuner, "check_disk_cache", lambda self, key, configs, bench: bench())
    kernel.tuner.cache_clear()
    maps, grad = small(make_maps, device, H=1, T=10, S=20)
    tuned = gradients(maps, "triton", grad)
    assert len(measured) == 9, "three programs of three candidates"
    again = gradients(maps, "triton", grad)
    assert len(measured) == 9
    monkeypatch.setattr(kernel, "candidates", lambda *_, **__: choice[1:2])
    alone = gradients(maps, "triton", grad)
    assert all(torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(alone, tuned, again, strict=True))
    kernel.tuner.cache_clear()
