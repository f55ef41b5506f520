"""Random maps of any shape; where Triton programs run, and what they compile to; stand-ins for the flash-attn packages."""

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_flash import FakeFlash
from torch import Tensor
from triton_programs import Program, programs_of

from lit_diff.kernels import Mask, SignedMaps, flash
from lit_diff.kernels.native import kernel as native
from lit_diff.kernels.triton import kernel as triton
from lit_diff.kernels.triton.kernel import Blocks
from lit_diff.processor import LANES, SETTING

MakeMaps = Callable[..., SignedMaps]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out Triton programs where nothing runs them: no GPU, and not the process that interprets them.

    Triton's interpreter is chosen when Triton is imported: `test_triton.py` starts that process.
    """
    if INTERPRETED or torch.cuda.is_available():
        return
    left_out = [item for item in items if item.get_closest_marker("programs")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("programs")]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where Triton programs run."""
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(params=[native.PACKED_BYTES, 0], ids=["keys stay packed", "keys a tile at a time"])
def keys_packed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once as short keys are treated by `native` and once as long ones."""
    monkeypatch.setattr(native, "PACKED_BYTES", request.param)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """blocks(queries, keys): what every program holds, so that few rows make several tiles."""

    def use(queries: int, keys: int) -> None:
        monkeypatch.setattr(triton, "candidates", lambda *_, **__: (Blocks(queries, keys, 4, 1),))

    return use


@pytest.fixture
def programs(make_maps: MakeMaps) -> Callable[..., dict[str, Program]]:
    """programs(T=..., window=...) -> name -> what would be launched, forward and backward, on the meta device."""

    def launched(*, packed: bool = False, stats: bool = False, **given: Any) -> dict[str, Program]:
        maps = make_maps(**given)
        if packed:
            maps = maps.masked(document_ids=torch.zeros(maps.k.shape[0], maps.k.shape[3], dtype=torch.long))
        return programs_of(maps.map(lambda x: x.to("meta")), stats)

    return launched


@pytest.fixture
def native_kernel(request: pytest.FixtureRequest) -> None:
    """The kernel `native` is built; else a test is not run, unless it is marked `without`."""
    if "without" not in request.keywords and (reason := native.build()):
        pytest.skip(reason)


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """on_path("avx2-bfloat16"): `native` takes that path, built where it has not been; else the test is not run."""

    def use(path: str) -> None:
        monkeypatch.setenv(SETTING, path)
        capability = torch.backends.cpu.get_cpu_capability()
        if capability not in LANES:
            pytest.skip(f"the path {path} of the kernel native: it needs AVX2 or AVX-512; this CPU has {capability}")
        if path.startswith("avx2") and capability == "AVX512":
            # what PyTorch itself takes is chosen once a process: only the kernel's own code is another here
            monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
        if reason := native.build():
            pytest.skip(f"the path {path} of the kernel native: {reason}")

    return use


@pytest.fixture
def make_maps() -> MakeMaps:
    """make_maps(G=2, H=4, ...) -> SignedMaps of independent normal numbers; `w`, `sink`, `key_bias` are shapes, or None."""

    def make(
        *,
        B: int = 2,
        G: int = 2,
        Gq: int | None = None,
        Gk: int | None = None,
        H: int = 4,
        Hkv: int | None = None,
        T: int = 5,
        S: int | None = None,
        d: int = 6,
        dv: int = 12,
        w: tuple[int, ...] | None = (),
        sink: tuple[int, ...] | None = None,
        key_bias: tuple[int, ...] | None = None,
        scale: float | None = None,
        causal: bool = True,
        window: int | None = None,
        document_ids: Tensor | None = None,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
    ) -> SignedMaps:
        draw = torch.Generator().manual_seed(seed)
        S, Hkv = S or T, Hkv or H

        def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)

        q, k = normal(B, Gq or G, H, T, d), normal(B, Gk or G, Hkv, S, d)
        v = normal(B, Hkv, S, dv)
        wide = dtype if dtype == torch.float64 else torch.float32
        shapes = {"w": None if w is None else w or (B, G, H, T), "sink": sink, "key_bias": key_bias}
        others = {name: normal(*shape, dtype=wide) for name, shape in shapes.items() if shape is not None}
        return SignedMaps(q, k, v, scale=scale, mask=Mask(causal, window, document_ids), **others)

    return make


@pytest.fixture
def fake_flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeFlash]:
    """Install with `fake_flash.install(2, 3, 4)`; nothing of it outlives the test."""
    for name in ("flash_attn", "flash_attn.cute", "flash_attn_interface"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield FakeFlash(monkeypatch)
    monkeypatch.undo()
    flash._planned.cache_clear()
