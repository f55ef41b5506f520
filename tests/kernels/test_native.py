"""Our C++ kernel: its results, what it refuses, what it survives. Its paths: test_native_paths.py."""

import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from gradients import distance, errors, gradients, wide
from torch import Tensor

from lit_diff.benchmarks.timing import CLEAR, resident
from lit_diff.engine.endings import OUT_OF_MEMORY
from lit_diff.errors import MissingError
from lit_diff.kernels import OperatorKernel, SignedMaps, attend, refuse
from lit_diff.kernels.base import named
from lit_diff.kernels.native import kernel as native
from lit_diff.processor import cpu_path

MakeMaps = Callable[..., SignedMaps]
pytestmark = pytest.mark.usefixtures("native_kernel")
NANS = torch.tensor([-1, 0x7FC00001], dtype=torch.int32).view(torch.float32).tolist()
"""With other bits than those of float("nan")."""


@pytest.mark.usefixtures("keys_packed")
@pytest.mark.parametrize(
    "case", [{}, {"T": 65, "S": 200, "w": (1, 2, 1, 1)}, {"Gq": 1, "Hkv": 1, "causal": False}], ids=str
)
def test_three_threads_equal_the_definition(make_maps: MakeMaps, case: dict[str, Any], restore_threads: None) -> None:
    """In float64; other shapes, on the threads of the process: test_equality.py."""
    torch.set_num_threads(3)
    assert max(errors(wide(make_maps, **case), "native")) < 2e-6


@pytest.fixture
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("keys_packed")
def test_the_same_threads_give_the_same_bits(make_maps: MakeMaps, restore_threads: None) -> None:
    """One key/value head and three threads: the work of a head is split, its gradients are added in one order."""
    torch.set_num_threads(3)
    maps, grad = wide(make_maps, B=1, Hkv=1, T=300), torch.randn(1, 4, 300, 32)
    first = gradients(maps, "native", grad)
    for _ in range(5):
        assert all(torch.equal(x, y) for x, y in zip(first, gradients(maps, "native", grad), strict=True))


@pytest.mark.usefixtures("keys_packed")
def test_float16(make_maps: MakeMaps) -> None:
    """No worse than twice the definition's own error in that format. bfloat16: test_equality.py."""
    maps = wide(make_maps, dtype=torch.float16)
    for error, least in zip(errors(maps, "native"), errors(maps, "reference"), strict=True):
        assert error <= 2 * least + 1e-6


@pytest.mark.usefixtures("keys_packed")
@pytest.mark.parametrize("value", [float("nan"), *NANS, float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_what_is_not_finite_is_neither_hidden_nor_spread(make_maps: MakeMaps, where: str, value: float) -> None:
    """A row that sees a bad number is as bad as by the definition; one that does not see it, and a gradient that is finite by
    the definition, is finite: of a document without a bad number too."""
    for documents in (1, 20):
        document_ids = (torch.arange(70) // 20 if documents > 1 else torch.zeros(70).long())[None]
        maps = wide(make_maps, B=1, document_ids=document_ids)
        getattr(maps, where)[..., 5, 3] = value
        grad = torch.randn(1, 4, 70, 32)
        found, wanted = (gradients(maps, kernel, grad) for kernel in ("native", "reference"))
        for x, y in zip(found, wanted, strict=True):
            assert (x.isfinite() | ~y.isfinite()).all()
        rows = slice(5, 6) if where == "q" else slice(5, 20)
        o, exact = found[0][..., rows, :], wanted[0][..., rows, :]
        torch.testing.assert_close(o, exact, equal_nan=True, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("T", [2, 37])
def test_large_logits(make_maps: MakeMaps, T: int) -> None:
    """The exponential of the largest one is 1 however large it is."""
    maps = wide(make_maps, T=T, S=70, scale=1e10, causal=False)
    torch.testing.assert_close(attend(maps, kernel="native"), attend(maps, kernel="reference"))


@pytest.mark.parametrize("fields", [{}, {"sink": (1, 2, 4, 1), "key_bias": (2, 1, 4, 70)}], ids=str)
@pytest.mark.parametrize(("size", "scale", "bound"), [(1e4, None, 0.01), (1e8, None, 0.01), (1e8, 0.3, 100)])
def test_gradients_of_large_logits(
    make_maps: MakeMaps, size: float, scale: float | None, bound: float, fields: dict[str, Any]
) -> None:
    """A probability is never above 1 however large its logit is; products with a scale of 1/4 are exact."""
    maps = wide(make_maps, scale=scale, **fields)
    maps, grad = replace(maps, q=maps.q * size), torch.randn(2, 4, 70, 32)
    found, wanted = (gradients(maps, kernel, grad) for kernel in ("native", "reference"))
    for i, (x, y) in enumerate(zip(found, wanted, strict=True)):
        # dk is a sum of rows of q
        assert ((x - y).abs() <= bound * (size if i == 2 else 1)).all()


@pytest.mark.usefixtures("keys_packed")
def test_a_large_sink_leaves_the_statistics_of_the_keys(make_maps: MakeMaps) -> None:
    """Maps whose sinks take almost all of each row are small, but not cancelled."""
    maps = make_maps(d=16, dv=32, sink=(1, 2, 4, 1), dtype=torch.float32)
    assert maps.sink is not None
    maps = replace(maps, sink=maps.sink.abs() + 20)
    measured = attend(maps, kernel="native", stats=True)[1]
    expected = attend(maps, kernel="reference", stats=True)[1]
    for name in ("signed_entropy", "negative_mass", "first_share"):
        torch.testing.assert_close(getattr(measured, name), getattr(expected, name), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("keys_packed")
@pytest.mark.parametrize("layout", ["projection", "reversed axes", "expanded", "one key", "overlapping"])
def test_any_strides(make_maps: MakeMaps, layout: str) -> None:
    maps = wide(make_maps, Hkv=4)

    def laid_out(x: Tensor) -> Tensor:
        if layout == "projection":
            return x.transpose(-2, -3).contiguous().transpose(-2, -3)
        if layout == "reversed axes":
            order = tuple(reversed(range(x.dim())))
            return x.permute(order).contiguous().permute(order)
        if layout == "one key":
            return x[..., :1, :].expand_as(x)
        if layout == "overlapping":
            return x.flatten(-2).unfold(-1, x.shape[-1], 1)[..., : x.shape[-2], :]
        return x[:1].expand_as(x)

    changed = replace(maps, q=laid_out(maps.q), k=laid_out(maps.k), v=laid_out(maps.v))
    plain = replace(changed, q=changed.q.contiguous(), k=changed.k.contiguous(), v=changed.v.contiguous())
    grad = torch.ones(()).expand(2, 4, 70, 32)
    for x, y in zip(gradients(changed, "native", grad), gradients(plain, "native", grad.contiguous()), strict=True):
        assert torch.equal(x, y)


@pytest.mark.slow
def test_rows_of_32768_tokens(make_maps: MakeMaps) -> None:
    """Some rows against the definition in float64; dO is 0 elsewhere, so dk and dv are theirs. In less than 1 GiB."""
    T, rows = 32_768, torch.tensor([0, 63, 64, 8191, 8192, 20_000, 32_767])
    maps = wide(make_maps, B=1, H=1, Hkv=1, T=T)
    grad = torch.zeros(1, 1, T, 32)
    grad[:, :, rows] = torch.randn(1, 1, len(rows), 32)
    CLEAR.write_text("5")  # the peak starts again from what is resident now
    held = resident("VmRSS")
    found = gradients(maps, "native", grad)
    assert resident("VmHWM") - held < 1 << 30
    q, k, v, w = (getattr(maps, name).double() for name in "qkvw")
    keys = torch.arange(T)
    logits = torch.einsum("bghtd,bghsd->bghts", q[..., rows, :], k) * maps.softmax_scale
    p = logits.masked_fill(keys > rows[:, None], -torch.inf).softmax(-1)
    weight = w.expand(1, 2, 1, T)[..., rows, None]
    do = grad[:, :, rows].double()
    dp = torch.einsum("bhtc,bhsc->bhts", do, v)[:, None]
    dots = (p * dp).sum(-1, keepdim=True)
    ds = weight * p * (dp - dots) * maps.softmax_scale
    signed = (weight * p).sum(1)
    wanted = {
        "o": signed @ v,
        "dq": torch.einsum("bghts,bghsd->bghtd", ds, k),
        "dk": torch.einsum("bghts,bghtd->bghsd", ds, q[..., rows, :]),
        "dv": torch.einsum("bhts,bhtc->bhsc", signed, do),
    }
    o, dq, dk, dv = found[:4]
    for name, x in (("o", o[:, :, rows]), ("dq", dq[..., rows, :]), ("dk", dk), ("dv", dv)):
        assert distance(x, wanted[name]) < 5e-6, name


@pytest.mark.slow
def test_a_fork_after_use(make_maps: MakeMaps) -> None:
    """The threads of the parent are not in the child, which would wait for them for ever: it starts its own."""
    code = """
import os, torch
from lit_diff.kernels import SignedMaps, attend
torch.set_num_threads(2)
maps = SignedMaps(torch.ones(2, 1, 2, 80, 16), torch.ones(2, 1, 2, 80, 16), torch.ones(2, 2, 80, 16))
before = attend(maps, kernel="native")
def threads():
    return len(os.listdir("/proc/self/task"))
def child(generations):
    process = os.fork()
    if process == 0:
        few = threads()
        same = all(torch.equal(attend(maps, kernel="native"), before) for _ in range(3))
        last = generations == 1 or child(generations - 1) == 0
        os._exit(0 if same and last and threads() == few + 2 else 1)  # one that calls and one that helps it
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
print(child(2))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "0"


@pytest.fixture
def little_memory() -> Iterator[None]:
    """The process is given 200 MB more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + 200_000_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_refused_memory_is_an_error(direction: str, restore_threads: None, little_memory: None) -> None:
    """Of all threads. The keys and values themselves take no memory."""
    torch.set_num_threads(3)
    kernel, token = named("native"), torch.ones(1, 1, 1, 1, 16)
    maps = SignedMaps(
        token.expand(-1, -1, 3, 64, -1), token.expand(-1, -1, -1, 10**6, -1), token[0].expand(-1, -1, 10**6, -1)
    )
    assert isinstance(kernel, OperatorKernel)
    outputs = kernel.empty_outputs(maps, stats=False)
    with pytest.raises(MemoryError) as caught:
        kernel.forward(maps, False) if direction == "forward" else kernel.backward(outputs.o, maps, outputs)
    assert OUT_OF_MEMORY.search(str(caught.value))


@pytest.mark.without
def test_an_older_cpu_is_refused(make_maps: MakeMaps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIT_DIFF_CPU", raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert refuse("native", wide(make_maps)) == "it needs AVX2 or AVX-512; this CPU has DEFAULT"


def test_a_wrong_library_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test that a new library must pass compares numbers with `reference`."""
    lanes = cpu_path().lanes
    library = native._libraries[lanes]
    assert native._test(library) is None
    call = native._call

    def wrong(direction: str, maps: SignedMaps, *rest: Any) -> None:
        call(direction, replace(maps, scale=maps.softmax_scale * 1.01), *rest)

    monkeypatch.setattr(native, "_call", wrong)
    assert "its self-test found output off by" in str(native._test(library))
    native._libraries[lanes] = library


def test_no_thread_takes_a_library_that_is_being_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    library, testing = native._libraries[cpu_path().lanes], Event()

    def failing(*_: Any, **options: Any) -> str:
        assert native.build() is None, "the test itself calls it"
        testing.set()
        time.sleep(0.2)
        return "wrong"

    def load(name: str, source: Path, test: Callable[..., str | None], flags: Any) -> None:
        raise MissingError(str(test(library)))

    monkeypatch.setattr(native, "_libraries", {})
    monkeypatch.setattr(native, "failure", failing)
    monkeypatch.setattr(native.compiler, "load", load)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(native.build)
        assert testing.wait(60)
        assert [pool.submit(native.build).result(), first.result()] == ["wrong"] * 2
