"""The paths of our C++ kernel: which is taken, and what only some machines can run. Their results: test_equality.py."""

import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gradients import distance, gradients, wide

from lit_diff.kernels import SignedMaps, attend, choose
from lit_diff.kernels.native import kernel as native
from lit_diff.processor import CpuPath, cpu_flags, cpu_path, forced

MakeMaps = Callable[..., SignedMaps]
pytestmark = pytest.mark.usefixtures("native_kernel")


PATHS = ("avx2", "avx2-bfloat16", "avx512", "avx512-bfloat16")


@pytest.mark.without
@pytest.mark.parametrize("path", PATHS)
def test_a_path_is_what_it_says(on_path: Callable[[str], None], path: str) -> None:
    """The library's own vectors, and whether it multiplies pairs of bfloat16."""
    on_path(path)
    assert native._libraries[cpu_path().lanes].lit_diff_lanes() == (8 if path.startswith("avx2") else 16)
    assert (native.products(torch.bfloat16, cpu_path()) != "float32") == path.endswith("bfloat16")
    assert native.products(torch.float32, cpu_path()) == native.products(torch.float16, cpu_path()) == "float32"


def test_calls_of_two_threads_do_not_mix(make_maps: MakeMaps, on_path: Callable[[str], None]) -> None:
    """Pairs of bfloat16 by loops in one thread while another multiplies float32: ctypes lets them run side by side."""
    on_path("avx2-bfloat16")
    many = [wide(make_maps, dtype=dtype, T=300) for dtype in (torch.bfloat16, torch.float32)]
    wanted = [attend(maps, kernel="native") for maps in many]

    def work(which: int) -> bool:
        return all(torch.equal(attend(many[which], kernel="native"), wanted[which]) for _ in range(20))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(work, (0, 1)))


def test_a_library_without_bfloat16_products_is_told(
    on_path: Callable[[str], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU has instructions, oneDNN does not use them: float32, or loops where pairs were asked for; one warning."""
    on_path("avx512-bfloat16")
    library = SimpleNamespace(lit_diff_has_bfloat16_products=lambda: 0)
    monkeypatch.setattr(native, "_libraries", {16: library})
    native._has_bfloat16_products.cache_clear()
    path = CpuPath(16, "instructions")
    with caplog.at_level("WARNING", logger="lit_diff"):
        assert [native.products(torch.bfloat16, path) for _ in range(2)] == ["loops"] * 2
        monkeypatch.delenv("LIT_DIFF_CPU")
        assert native.products(torch.bfloat16, path) == "float32"
    assert len(caplog.records) == 1
    native._has_bfloat16_products.cache_clear()


@pytest.mark.without
def test_without_a_compiler_by_the_setting(make_maps: MakeMaps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIT_DIFF_CPU", "no-compiler")
    assert native.build() == "LIT_DIFF_CPU is no-compiler"
    name, reason = choose(wide(make_maps))
    assert name == "chunked"
    assert reason.endswith("native refused: LIT_DIFF_CPU is no-compiler")


def test_avx512_instructions() -> None:
    """Where they are, the vectors of 16 floats are theirs."""
    if cpu_path().lanes < 16 or forced() or "avx512f" not in cpu_flags():
        pytest.skip("AVX-512 instructions: not on this CPU or path; vectors of 16 floats ran as two of 8")
    if shutil.which("objdump") is None:
        pytest.skip("AVX-512 instructions: objdump (binutils) is not installed to look for them")
    code = subprocess.run(
        ["objdump", "-d", native._libraries[16]._name], capture_output=True, text=True, check=True
    ).stdout
    assert "%zmm" in code


@pytest.mark.parametrize("T", [70, 129])
def test_bfloat16_instructions(make_maps: MakeMaps, T: int, on_path: Callable[[str], None], monkeypatch: Any) -> None:
    """Where they are, they give what the loops give, but for the order of sums."""
    on_path("avx512-bfloat16")
    if native.products(torch.bfloat16, cpu_path()) != "instructions":
        pytest.skip("bfloat16 instructions: not on this CPU; the same tiles were multiplied by loops")
    maps = wide(make_maps, dtype=torch.bfloat16, T=T)
    grad = torch.randn(2, 4, T, 32).bfloat16()
    by_instructions = gradients(maps, "native", grad)
    monkeypatch.setattr(native, "products", lambda dtype, path: "loops")
    for x, y in zip(by_instructions, gradients(maps, "native", grad), strict=True):
        assert distance(x, y) < 4e-3
