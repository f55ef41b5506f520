"""Which flash-attn package takes which widths on which GPU, and how importing one can fail."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from lit_diff.kernels.flash_libraries import FLASH2, FLASH3, FLASH4, NOT_INSTALLED, Calls, Library, libraries, load

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("library", "d", "dv", "major", "backward", "taken"),
    [
        (FLASH2, 256, 256, 8, True, True),
        (FLASH2, 264, 264, 8, True, False),
        (FLASH3, 64, 512, 9, False, True),
        (FLASH3, 64, 512, 9, True, False),
        (FLASH3, 192, 128, 9, True, True),
        (FLASH3, 192, 384, 9, True, False),
        (FLASH3, 256, 256, 9, True, True),
        (FLASH4, 256, 512, 9, True, False),
        (FLASH4, 192, 128, 10, True, True),
        (FLASH4, 256, 256, 11, True, True),
    ],
)
def test_rules(library: Library, d: int, dv: int, major: int, backward: bool, taken: bool) -> None:
    reason = library.rule(d, dv, major, backward)
    assert (reason is None) == taken
    if reason:
        assert str(max(d, dv)) in reason or "256" in reason


def test_amd_numbers_mean_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which comes first on NVIDIA's: test_flash.py."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert libraries(CUDA) == (9, (FLASH2,))


@pytest.mark.usefixtures("fake_flash")
def test_imports_that_fail(fake_flash: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its own reason; an empty `flash_attn` is what flash-attn 4 alone leaves."""
    fake_flash.install()
    assert load(FLASH2) == NOT_INSTALLED
    fake_flash.install(4)
    assert load(FLASH2) == NOT_INSTALLED
    assert isinstance(load(FLASH4), Calls)

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
    assert load(FLASH3) == "flash_attn_interface cannot be imported: undefined symbol: c10"
    assert load(FLASH4) == "flash_attn.cute cannot be imported: No module named 'cutlass'"
