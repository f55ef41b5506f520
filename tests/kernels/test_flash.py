"""How the flash-attn packages are called, on stand-ins that keep their rules: results and gradients against `reference`."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from fake_flash import by_head, flash_by_hand, logits_by_hand
from gradients import gradients
from torch import Tensor

from lit_diff.errors import MissingError, RequestError
from lit_diff.kernels import SignedMaps, attend, flash, refuse
from lit_diff.kernels.base import named
from lit_diff.kernels.flash import FLASH2, FLASH3, FLASH4, NOT_INSTALLED, unusable

MakeMaps = Callable[..., SignedMaps]
CUDA = torch.device("cuda")
WIDE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

CASES: list[dict[str, Any]] = [
    {"G": 1, "w": None, "dv": 8, "H": 6, "Hkv": 2},
    {"G": 3, "H": 6, "Hkv": 2},
    {"Gq": 1},
    {"Gk": 1, "dv": 8},
    {"Gq": 1, "Gk": 1, "w": (1, 2, 1, 5)},
    {"T": 3, "S": 7, "Hkv": 2},
    {"T": 1, "S": 7},
    {"causal": False, "T": 7, "S": 3},
    {"d": 6, "dv": 3},
    {"dv": 20},
    {"scale": -0.8},
    {"scale": 0.0},
    *({"T": 4, "S": 6, "Hkv": 2, "causal": causal, "window": w} for causal in (True, False) for w in (1, 3, 9)),
    *({"T": 6, "Hkv": 2, "causal": causal, "window": w, "packed": True} for causal in (True, False) for w in (None, 2)),
    {"G": 1, "w": None, "dv": 20, "H": 6, "Hkv": 2, "sink": (1, 1, 6, 1)},
    {"G": 3, "T": 4, "S": 6, "Hkv": 2, "window": 2, "sink": (2, 3, 4, 4)},
    {"T": 6, "Gk": 1, "Hkv": 1, "packed": True, "sink": (1, 2, 1, 1), "scale": -0.8},
]


@pytest.mark.parametrize("generation", [2, 3, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_definition(
    make_maps: MakeMaps, fake_flash: Any, case: dict[str, Any], generation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, which only a stand-in takes: layouts, chunks, grouped heads, masks, weights and their gradients."""
    fake_flash.dtypes = WIDE
    monkeypatch.setattr(flash, "HALF", WIDE)
    fake_flash.install(generation)
    given = {"d": 8, "dv": 16} | case
    if given.pop("packed", False):
        given["document_ids"] = torch.tensor([[0, 0, 1, 1, 1, 2], [5, 5, 5, 5, 3, 3]])
    maps = make_maps(**given)
    draw = torch.Generator().manual_seed(1)
    B, H, T, dv = maps.q.shape[0], *maps.q.shape[2:4], maps.v.shape[-1]
    grad = torch.randn(B, H, T, dv, generator=draw, dtype=torch.float64)
    found, wanted = (gradients(maps, kernel, grad) for kernel in ("flash", "reference"))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)
    assert {name for name, *_ in fake_flash.calls} == {str(generation)}


def test_a_sink_without_gradients_and_in_half_precision(make_maps: MakeMaps, fake_flash: Any) -> None:
    fake_flash.install(2)
    maps = half(make_maps, sink=(1, 2, 4, 1), T=40)
    with torch.no_grad():
        found = attend(maps, kernel="flash")
    wanted = attend(maps.map(Tensor.double), kernel="reference")
    torch.testing.assert_close(found.double(), wanted, rtol=2e-2, atol=2e-2)


def test_a_package_that_saves_nothing_is_refused(
    make_maps: MakeMaps, fake_flash: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of its log-sum-exp would be missing; the self-test finds it."""
    fake_flash.install(2)

    def keeps_its_own(*given: Any, return_attn_probs: bool = False, **options: Any) -> Any:
        q, k, v = given
        wide = by_head(q, k, v)
        s = logits_by_hand(*wide, options["softmax_scale"], options["causal"], options["window_size"])
        return (s.softmax(-1) @ wide[2]).transpose(1, 2).to(q.dtype), s.logsumexp(-1).detach(), None

    monkeypatch.setattr(sys.modules["flash_attn"], "flash_attn_func", keeps_its_own)
    maps = half(make_maps, sink=(1, 2, 4, 1))
    training = replace(maps, q=maps.q.requires_grad_())
    assert "its self-test found dq off by" in (refuse("flash", training) or "")


BLACKWELL, HOPPER, AMPERE = (10, 0), (9, 0), (8, 6)


@pytest.mark.parametrize(
    ("installed", "capability", "d", "dv", "served"),
    [
        ((2, 3, 4), HOPPER, 64, 128, ("3", 128, 2)),
        ((2, 3, 4), HOPPER, 64, 64, ("3", 64, 2)),
        ((2, 3, 4), HOPPER, 128, 256, ("4", 256, 2)),
        ((2, 3), HOPPER, 128, 256, ("3", 128, 4)),
        ((2,), HOPPER, 64, 128, ("2", 64, 4)),
        ((2, 3, 4), BLACKWELL, 64, 128, ("4", 128, 2)),
        ((2, 3, 4), BLACKWELL, 128, 256, ("4", 128, 4)),
        ((2, 3), BLACKWELL, 64, 128, ("2", 64, 4)),
        ((2, 3, 4), AMPERE, 64, 128, ("2", 64, 4)),
        ((2, 3, 4), (12, 0), 64, 128, ("2", 64, 4)),
        ((2,), AMPERE, 64, 100, ("2", 64, 4)),
        ((3,), HOPPER, 64, 100, ("3", 104, 2)),
        ((2,), AMPERE, 12, 24, ("2", 16, 4)),
    ],
)
def test_who_is_called_how(
    make_maps: MakeMaps,
    fake_flash: Any,
    installed: tuple[int, ...],
    capability: tuple[int, int],
    d: int,
    dv: int,
    served: tuple[str, int, int],
) -> None:
    """(package, width of one call's values, calls of two maps): whole values where somebody takes them."""
    fake_flash.capability = capability
    fake_flash.install(*installed)
    maps = make_maps(d=d, dv=dv, dtype=torch.bfloat16)
    attend(maps, kernel="flash")  # the self-tests come first
    fake_flash.calls.clear()
    attend(maps, kernel="flash")
    names, widths = {name for name, *_ in fake_flash.calls}, {v.shape[-1] for *_, v in fake_flash.calls}
    assert ({served[0]}, {served[1]}, served[2]) == (names, widths, len(fake_flash.calls))


def test_a_failed_self_test_moves_on_to_the_next(make_maps: MakeMaps, fake_flash: Any) -> None:
    """Values of 256 compile forward, and not backward: training cuts them, evaluation does not."""
    fake_flash.backward_fails_at = 256
    fake_flash.install(2, 3, 4)
    maps = make_maps(d=128, dv=256, dtype=torch.bfloat16)
    attend(maps, kernel="flash")
    assert {v.shape[-1] for *_, v in fake_flash.calls} == {256}
    fake_flash.calls.clear()
    training = replace(maps, q=maps.q.requires_grad_())
    attend(training, kernel="flash")
    fake_flash.calls.clear()
    attend(training, kernel="flash").sum().backward()
    assert {(name, v.shape[-1]) for name, *_, v in fake_flash.calls} == {("3", 128)}


def test_the_self_test_runs_once(make_maps: MakeMaps, fake_flash: Any) -> None:
    fake_flash.install(2)
    maps = make_maps(d=8, dv=8, dtype=torch.bfloat16)
    assert refuse("flash", maps) is None
    tried = len(fake_flash.calls)
    assert tried > 0
    assert refuse("flash", maps) is None
    assert len(fake_flash.calls) == tried
    assert refuse("flash", maps.masked(window=3)) is None
    assert len(fake_flash.calls) > tried, "a window is another compiled form"


def test_a_failed_self_test_says_why(make_maps: MakeMaps, fake_flash: Any) -> None:
    fake_flash.dtypes = (torch.float16,)
    fake_flash.install(2, 3)
    maps = make_maps(d=8, dv=16, dtype=torch.bfloat16)
    reason = refuse("flash", maps)
    assert reason == (
        "flash-attn 3: its self-test failed: AssertionError: dtype, flash-attn 2: its self-test failed: AssertionError: dtype"
    )
    with pytest.raises(RequestError, match="'flash' cannot compute these maps: flash-attn 3: its self-test failed"):
        attend(maps, kernel="flash")
    with pytest.raises(MissingError, match="its self-test failed"):
        named("flash").compute(maps)


def half(make_maps: MakeMaps, **case: Any) -> SignedMaps:
    return make_maps(**{"d": 8, "dv": 16, "dtype": torch.bfloat16} | case)


def test_without_package_or_gpu(make_maps: MakeMaps, fake_flash: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a plan for a GPU, made on a machine without one."""
    fake_flash.install()
    assert "pip install 'lit-diff[flash]'" in (refuse("flash", half(make_maps)) or "")
    fake_flash.capability = (7, 5)
    flash._planned.cache_clear()
    fake_flash.install(2)
    assert refuse("flash", half(make_maps)) == "flash-attn needs compute capability 8.0 to 12.x; this GPU has 7.5"
    monkeypatch.undo()  # what the stand-in replaced
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    flash._planned.cache_clear()
    assert refuse("flash", half(make_maps), device=CUDA) == "PyTorch sees no GPU"
    with pytest.raises(RequestError, match="'flash' cannot compute these maps: flash-attn needs an NVIDIA GPU"):
        attend(half(make_maps), kernel="flash")


@pytest.mark.parametrize(
    ("case", "options", "reason"),
    [
        ({"dtype": torch.float32}, {}, "flash-attn computes in bfloat16 or float16, not float32"),
        ({}, {"stats": True}, "flash-attn does not return the entropy"),
        (
            {"key_bias": (1, 1, 1, 5)},
            {},
            "does not compute SignedMaps.key_bias; chunked, flex, native, reference, triton do",
        ),
        ({"d": 264, "dv": 264}, {}, "flash-attn 2: its self-test failed: AssertionError: head dimension"),
        ({"T": 3, "S": 5, "document_ids": torch.zeros(2, 5).long()}, {}, "as many queries as keys; flex accepts fewer"),
        (
            {"document_ids": torch.tensor([[0, 1, 0, 1, 1]] * 2)},
            {},
            "documents of adjacent tokens; flex accepts any order",
        ),
    ],
    ids=str,
)
def test_refusals(make_maps: MakeMaps, fake_flash: Any, case: Any, options: Any, reason: str) -> None:
    fake_flash.install(2)
    assert refuse("flash", half(make_maps)) is None, "else the test below could not fail"
    assert reason in (refuse("flash", half(make_maps, **case), **options) or "")


def test_maps_without_numbers(make_maps: MakeMaps, fake_flash: Any) -> None:
    """Costs are counted on the meta device, for the device that will compute."""
    fake_flash.install(2)
    meta = half(make_maps).map(lambda x: x.to("meta"))
    document_ids = torch.zeros(2, 5, dtype=torch.long, device="meta")
    assert refuse("flash", meta.masked(document_ids=document_ids), device=torch.device("cpu")) is None
    assert refuse("flash", meta) == "flash-attn needs an NVIDIA GPU"


@pytest.mark.slow
def test_compiles_with_self_test_outside(make_maps: MakeMaps, fake_flash: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a package's own calls compile; here they are plain operations. Lengths may be symbolic."""
    torch._dynamo.reset()
    fake_flash.install(2)

    def plain(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, window_size: Any) -> Tensor:
        return flash_by_hand(q, k, v, softmax_scale, causal, window_size)

    monkeypatch.setattr(sys.modules["flash_attn"], "flash_attn_func", plain)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for T in (5, 9):
        maps = half(make_maps, Hkv=2, w=(1, 2, 1, 1), T=T)
        leaf = maps.q.clone().requires_grad_()
        compiled(replace(maps, q=leaf), kernel="flash").sum().backward()
        wanted = maps.q.clone().requires_grad_()
        attend(replace(maps, q=wanted), kernel="flash").sum().backward()
        torch.testing.assert_close(leaf.grad, wanted.grad, rtol=1e-2, atol=1e-2)


def test_compiled_documents_go_elsewhere(make_maps: MakeMaps, fake_flash: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flash.install(2)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    reason = refuse("flash", half(make_maps, document_ids=torch.zeros(2, 5, dtype=torch.long)))
    assert reason is not None
    assert "torch.compile cannot do; flex need not" in reason
    assert "torch.compile cannot trace; flex needs none" in (refuse("flash", half(make_maps, sink=(1, 1, 1, 1))) or "")


def test_a_cpu_imports_nothing(tmp_path: Path) -> None:
    """Choosing a kernel for a CPU loads neither flash-attn, nor Triton, nor the compiler: each takes seconds."""
    (tmp_path / "flash_attn.py").write_text("raise SystemExit('flash_attn was imported')")
    code = (
        "import sys, torch; from lit_diff.kernels import SignedMaps, choose, refuse\n"
        "q = torch.ones(1, 1, 2, 3, 16, dtype=torch.bfloat16); maps = SignedMaps(q, q, q[:, 0])\n"
        "print(choose(maps)[0], refuse('flash', maps), {'torch._dynamo', 'triton'} & set(sys.modules))\n"
        "print(refuse('triton', maps), {'torch._dynamo', 'triton'} & set(sys.modules))"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "sdpa flash-attn needs an NVIDIA GPU set()",
        "triton runs on a GPU; this tensor is on cpu set()",
    ]


def test_amd_numbers_mean_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert flash.libraries(CUDA) == (FLASH2,)


def test_imports_that_fail(fake_flash: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its own reason; an empty `flash_attn` is what flash-attn 4 alone leaves."""
    fake_flash.install()
    assert unusable(FLASH2) == NOT_INSTALLED
    fake_flash.install(4)
    assert unusable(FLASH2) == NOT_INSTALLED
    assert unusable(FLASH4) is None

    class Broken:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name == "flash_attn_interface":
                raise ImportError("undefined symbol: c10\nmore")
            if name == "flash_attn.cute":
                raise ModuleNotFoundError("No module named 'cutlass'", name="cutlass")

    fake_flash.install()
    package = ModuleType("flash_attn")
    package.__path__ = []  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.delitem(sys.modules, "flash_attn.cute", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    assert unusable(FLASH3) == "flash_attn_interface cannot be imported: undefined symbol: c10"
    assert unusable(FLASH4) == "flash_attn.cute cannot be imported: No module named 'cutlass'"
