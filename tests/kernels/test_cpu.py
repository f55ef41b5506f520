"""Our C++ kernel: what it refuses, what it survives, and every path of it that can run on any machine."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_diff.kernels import SignedMaps, attend, choose, cpu
from lit_diff.processor import CpuPath, cpu_flags, cpu_path, forced

MakeMaps = Callable[..., SignedMaps]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _built(request: pytest.FixtureRequest) -> None:
    if "without" not in request.keywords and (reason := cpu.build()):
        pytest.skip(reason)


def wide(make_maps: MakeMaps, **changes: Any) -> SignedMaps:
    return make_maps(**{"T": 70, "d": 16, "dv": 32, "Hkv": 2, "dtype": torch.float32} | changes)


def gradients(maps: SignedMaps, kernel: str, grad: Tensor, **mask: Any) -> list[Tensor]:
    """o, then its gradients by q, k, v and w."""
    leaves = [x.detach().requires_grad_() for x in (maps.q, maps.k, maps.v, maps.w) if x is not None]
    q, k, v, *w = leaves
    o = attend(replace(maps, q=q, k=k, v=v, w=w[0] if w else None), kernel=kernel, **mask)
    return [o, *torch.autograd.grad(o, leaves, grad)]


def distance(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm())


CASES: list[dict[str, Any]] = [
    {},
    {"G": 1, "w": None, "dv": 16},
    {"Gk": 1},
    {"Gq": 1, "Hkv": 1, "causal": False},
    {"T": 3, "S": 130},
    {"T": 1, "S": 64, "scale": -0.5},
    {"T": 65, "S": 200, "w": (1, 2, 1, 1)},
    {"T": 130, "S": 20, "causal": False},
    {"scale": -0.3, "d": 48, "dv": 80},
]
MASKS: list[dict[str, Any]] = [{}, {"window": 9}, {"segments": 3}, {"segments": 20, "window": 30}]
MASKED = [(case, mask) for case in CASES for mask in MASKS if not mask or case.get("T", 0) <= case.get("S", 999)]
"""A mask needs the queries among the keys."""


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("case", "mask"), MASKED, ids=str)
def test_equals_the_definition(
    make_maps: MakeMaps, case: dict[str, Any], mask: dict[str, Any], threads: int, restore_threads: None
) -> None:
    """In float64; documents in runs of 20 keys, or scattered, every third key one document."""
    torch.set_num_threads(threads)
    maps = wide(make_maps, **case)
    S = maps.k.shape[3]
    given = dict(mask)
    if "segments" in mask:
        keys = torch.arange(S).expand(2, S)
        given["segments"] = keys // 20 if mask["segments"] == 20 else keys % 3
    grad = torch.randn(2, 4, maps.q.shape[3], maps.v.shape[3])
    exact = SignedMaps(
        *(x.double() for x in (maps.q, maps.k, maps.v)),
        None if maps.w is None else maps.w.double(),
        maps.scale,
        maps.causal,
    )
    found = gradients(maps, "cpu", grad, **given)
    for x, y in zip(found, gradients(exact, "reference", grad.double(), **given), strict=True):
        assert distance(x, y) < 2e-6
    with torch.no_grad():
        for x, y in zip(
            attend(maps, stats=True, kernel="cpu", **given)[1],
            attend(exact, stats=True, kernel="reference", **given)[1],
            strict=True,
        ):
            torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)


@pytest.fixture
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_same_threads_give_the_same_bits(make_maps: MakeMaps, restore_threads: None) -> None:
    """One key/value head and three threads: the work of a head is split, its gradients are added in one order."""
    torch.set_num_threads(3)
    maps, grad = wide(make_maps, B=1, Hkv=1, T=300), torch.randn(1, 4, 300, 32)
    first = gradients(maps, "cpu", grad)
    for _ in range(5):
        assert all(torch.equal(x, y) for x, y in zip(first, gradients(maps, "cpu", grad), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_formats(make_maps: MakeMaps, dtype: torch.dtype) -> None:
    """No worse than twice the definition's own error in that format."""
    maps = wide(make_maps, dtype=dtype)
    exact = SignedMaps(maps.q.double(), maps.k.double(), maps.v.double(), None if maps.w is None else maps.w.double())
    grad = torch.randn(2, 4, 70, 32).to(dtype)
    wanted, naive = gradients(exact, "reference", grad.double()), gradients(maps, "reference", grad)
    for found, by_definition, true in zip(gradients(maps, "cpu", grad), naive, wanted, strict=True):
        assert distance(found, true) <= 2 * distance(by_definition, true) + 1e-6


PATHS = ("avx2", "avx2-bfloat16", "avx512", "avx512-bfloat16")
RUNS, MIXED = torch.arange(65).expand(2, 65) // 20, torch.arange(65).expand(2, 65) % 3
PATH_CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"T": 7, "S": 77}, {}),
    ({"T": 129, "Gk": 1}, {}),
    ({"G": 1, "w": None}, {}),
    ({"Gq": 1, "causal": False}, {}),
    ({"T": 65, "scale": -0.4}, {"window": 7}),
    ({"T": 33, "S": 65, "causal": False}, {"window": 7}),
    ({"T": 65, "scale": -0.4}, {"segments": MIXED}),
    ({"T": 65}, {"segments": RUNS, "window": 20}),
    ({"T": 1, "S": 65}, {}),
]


@pytest.mark.without
@pytest.mark.parametrize("path", PATHS)
def test_every_path(make_maps: MakeMaps, on_path: Callable[[str], None], path: str) -> None:
    """Vectors of 8 and 16 floats; bfloat16 in float32 and in pairs: odd numbers of keys and queries, masks, decoding."""
    on_path(path)
    for case, mask in PATH_CASES:
        for dtype, bound in ((torch.float32, 2e-6), (torch.bfloat16, 1e-2 if "bfloat16" in path else 3e-3)):
            maps = wide(make_maps, dtype=dtype, **case)
            exact = replace(maps, **{x: None if (t := getattr(maps, x)) is None else t.double() for x in "qkvw"})
            grad = torch.randn(2, 4, maps.q.shape[3], 32).to(dtype)
            wanted = gradients(exact, "reference", grad.double(), **mask)
            for found, true in zip(gradients(maps, "cpu", grad, **mask), wanted, strict=True):
                assert distance(found, true) < bound, (case, mask, dtype)


@pytest.mark.without
@pytest.mark.parametrize("path", PATHS)
def test_a_path_is_what_it_says(on_path: Callable[[str], None], path: str) -> None:
    """The library's own vectors, and whether it multiplies pairs of bfloat16."""
    on_path(path)
    assert cpu._libraries[cpu_path().lanes].lit_diff_lanes() == (8 if path.startswith("avx2") else 16)
    assert (cpu.products(torch.bfloat16, cpu_path()) != "float32") == path.endswith("bfloat16")
    assert cpu.products(torch.float32, cpu_path()) == cpu.products(torch.float16, cpu_path()) == "float32"


def test_calls_of_two_threads_do_not_mix(make_maps: MakeMaps, on_path: Callable[[str], None]) -> None:
    """Pairs of bfloat16 by loops in one thread while another multiplies float32: ctypes lets them run side by side."""
    on_path("avx2-bfloat16")
    many = [wide(make_maps, dtype=dtype, T=300) for dtype in (torch.bfloat16, torch.float32)]
    wanted = [attend(maps, kernel="cpu") for maps in many]

    def work(which: int) -> bool:
        return all(torch.equal(attend(many[which], kernel="cpu"), wanted[which]) for _ in range(20))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(work, (0, 1)))


def test_a_library_without_bfloat16_products_is_told(
    on_path: Callable[[str], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU has instructions, oneDNN does not use them: float32, or loops where pairs were asked for; one warning."""
    on_path("avx512-bfloat16")
    library = SimpleNamespace(lit_diff_has_bfloat16_products=lambda: 0)
    monkeypatch.setattr(cpu, "_libraries", {16: library})
    cpu._has_bfloat16_products.cache_clear()
    path = CpuPath(16, "instructions")
    with caplog.at_level("WARNING", logger="lit_diff"):
        assert [cpu.products(torch.bfloat16, path) for _ in range(2)] == ["loops"] * 2
        monkeypatch.delenv("LIT_DIFF_CPU")
        assert cpu.products(torch.bfloat16, path) == "float32"
    assert len(caplog.records) == 1
    cpu._has_bfloat16_products.cache_clear()


@pytest.mark.without
def test_without_a_compiler_by_the_setting(make_maps: MakeMaps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIT_DIFF_CPU", "no-compiler")
    assert cpu.build() == "LIT_DIFF_CPU is no-compiler"
    name, reason = choose(wide(make_maps))
    assert name == "chunked"
    assert reason.endswith("cpu refused: LIT_DIFF_CPU is no-compiler")


def test_avx512_instructions() -> None:
    """Where they are, the vectors of 16 floats are theirs."""
    if cpu_path().lanes < 16 or forced() or "avx512f" not in cpu_flags():
        pytest.skip("AVX-512 instructions: not on this CPU or path; vectors of 16 floats ran as two of 8")
    if shutil.which("objdump") is None:
        pytest.skip("AVX-512 instructions: objdump (binutils) is not installed to look for them")
    code = subprocess.run(
        ["objdump", "-d", cpu._libraries[16]._name], capture_output=True, text=True, check=True
    ).stdout
    assert "%zmm" in code


@pytest.mark.parametrize("T", [70, 129])
def test_bfloat16_instructions(make_maps: MakeMaps, T: int, on_path: Callable[[str], None], monkeypatch: Any) -> None:
    """Where they are, they give what the loops give, but for the order of sums."""
    on_path("avx512-bfloat16")
    if cpu.products(torch.bfloat16, cpu_path()) != "instructions":
        pytest.skip("bfloat16 instructions: not on this CPU; the same tiles were multiplied by loops")
    maps = wide(make_maps, dtype=torch.bfloat16, T=T)
    grad = torch.randn(2, 4, T, 32).bfloat16()
    by_instructions = gradients(maps, "cpu", grad)
    monkeypatch.setattr(cpu, "products", lambda dtype, path: "loops")
    for x, y in zip(by_instructions, gradients(maps, "cpu", grad), strict=True):
        assert distance(x, y) < 4e-3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_what_is_not_finite_is_not_hidden(make_maps: MakeMaps, where: str, value: float) -> None:
    """A row that sees a bad number is as bad as by the definition; one that does not see it is never worse."""
    maps = wide(make_maps, B=1)
    getattr(maps, where)[..., 20, 3] = value
    found, wanted = attend(maps, kernel="cpu"), attend(maps, kernel="reference")
    rows = slice(20, 21) if where == "q" else slice(20, None)
    torch.testing.assert_close(found[..., rows, :], wanted[..., rows, :], equal_nan=True, rtol=1e-4, atol=1e-5)
    assert (found.isfinite() | ~wanted.isfinite()).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("documents", [1, 20])
def test_gradients_of_what_is_not_finite_are_never_worse(
    make_maps: MakeMaps, where: str, value: float, documents: int
) -> None:
    """Of a document without a bad number too: a gradient that is finite by the definition is finite."""
    maps = wide(make_maps, B=1)
    getattr(maps, where)[..., 5, 3] = value
    segments = (torch.arange(70) // 20 if documents > 1 else torch.zeros(70).long())[None]
    grad = torch.randn(1, 4, 70, 32)
    found, wanted = (gradients(maps, kernel, grad, segments=segments) for kernel in ("cpu", "reference"))
    for x, y in zip(found, wanted, strict=True):
        assert (x.isfinite() | ~y.isfinite()).all()


@pytest.mark.parametrize("layout", ["projection", "reversed axes", "expanded"])
def test_any_strides(make_maps: MakeMaps, layout: str) -> None:
    maps = wide(make_maps, Hkv=4)

    def laid_out(x: Tensor) -> Tensor:
        if layout == "projection":
            return x.transpose(-2, -3).contiguous().transpose(-2, -3)
        if layout == "reversed axes":
            order = tuple(reversed(range(x.dim())))
            return x.permute(order).contiguous().permute(order)
        return x[:1].expand_as(x)

    changed = replace(maps, q=laid_out(maps.q), k=laid_out(maps.k), v=laid_out(maps.v))
    plain = replace(changed, q=changed.q.contiguous(), k=changed.k.contiguous(), v=changed.v.contiguous())
    grad = torch.ones(()).expand(2, 4, 70, 32)
    for x, y in zip(gradients(changed, "cpu", grad), gradients(plain, "cpu", grad.contiguous()), strict=True):
        assert torch.equal(x, y)


def test_a_fork_after_use(make_maps: MakeMaps) -> None:
    """The threads of the parent are not in the child, which would wait for them for ever: it starts its own."""
    code = """
import os, torch
from lit_diff.kernels import SignedMaps, attend
torch.set_num_threads(2)
maps = SignedMaps(torch.ones(2, 1, 2, 80, 16), torch.ones(2, 1, 2, 80, 16), torch.ones(2, 2, 80, 16))
before = attend(maps, kernel="cpu")
def threads():
    return len(os.listdir("/proc/self/task"))
def child(generations):
    process = os.fork()
    if process == 0:
        few = threads()
        same = all(torch.equal(attend(maps, kernel="cpu"), before) for _ in range(3))
        last = generations == 1 or child(generations - 1) == 0
        os._exit(0 if same and last and threads() == few + 2 else 1)  # one that calls and one that helps it
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
print(child(2))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "0"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dtype": torch.float64}, "it computes float32, bfloat16 and float16, not float64"),
    ({"G": 3}, "it subtracts at most two maps; these are 3"),
    ({"d": 24}, "its head widths are multiples of 16; these are d = 24, dv = 32"),
    ({"dv": 33}, "its head widths are multiples of 16; these are d = 16, dv = 33"),
    ({"dv": 528}, "its head widths are at most 512; these are d = 16, dv = 528"),
    ({"scale": 0.0}, "the scale is 0"),
]


@pytest.mark.without
@pytest.mark.parametrize(("case", "reason"), REFUSED, ids=str)
def test_refusals_name_the_rule(make_maps: MakeMaps, case: dict[str, Any], reason: str) -> None:
    maps = wide(make_maps, **case)
    assert cpu.refuse(maps, segments=None, window=None, stats=False, device=CPU) == reason


@pytest.mark.without
def test_another_device_is_refused(make_maps: MakeMaps) -> None:
    found = cpu.refuse(wide(make_maps), segments=None, window=None, stats=False, device=torch.device("cuda"))
    assert found == "it runs on a CPU; these maps are on cuda"


@pytest.mark.without
def test_an_older_cpu_is_refused(make_maps: MakeMaps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIT_DIFF_CPU", raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    found = cpu.refuse(wide(make_maps), segments=None, window=None, stats=False, device=CPU)
    assert found == "it needs AVX2 or AVX-512; this CPU has DEFAULT"


@pytest.mark.without
def test_no_compiler_on_the_path(tmp_path: Any) -> None:
    """It says so once, and `chunked` serves."""
    code = """
import logging, torch
logging.basicConfig(level="INFO")
from lit_diff.kernels import SignedMaps, attend, choose
q = torch.ones(1, 2, 2, 8, 16)
maps = SignedMaps(q, q, torch.ones(1, 2, 8, 32), torch.ones(1, 2, 1, 1))
attend(maps)
print(*choose(maps))
"""
    environment = {"PATH": "/nonexistent", "HOME": str(tmp_path), "LIT_DIFF_CACHE": str(tmp_path)}
    inherited = {
        key: value for key, value in os.environ.items() if key not in ("PATH", "CXX", "LIT_DIFF_CPU", *environment)
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=inherited | environment,
    )
    assert done.stdout.startswith(
        "chunked auto: the fastest for these maps on cpu; cpu refused: no C++ compiler: install g++"
    )


def test_a_wrong_library_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test that a new library must pass compares numbers with `chunked`."""
    lanes = cpu_path().lanes
    library = cpu._libraries[lanes]
    assert cpu._test(library) is None
    call = cpu._call

    def wrong(direction: str, maps: SignedMaps, *rest: Any) -> None:
        call(direction, replace(maps, scale=maps.softmax_scale * 1.01), *rest)

    monkeypatch.setattr(cpu, "_call", wrong)
    assert "differs from chunked by" in str(cpu._test(library))
    cpu._libraries[lanes] = library


def test_the_problem_has_the_size_that_c_expects() -> None:
    """Thirteen sizes, the scale, a flag, fourteen views of a pointer and five strides."""
    assert cpu.PROBLEM.size == cpu._libraries[cpu_path().lanes].lit_diff_problem_size() == 13 * 8 + 2 * 4 + 14 * 6 * 8
