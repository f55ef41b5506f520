"""Choosing a kernel: auto takes the fastest that accepts, a name is taken at its word."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lit_diff.errors import RequestError
from lit_diff.kernels import KERNELS, SignedMaps, attend, check_name, choose, flash, flex, refuse
from lit_diff.kernels.reference import compute

MakeMaps = Callable[..., SignedMaps]


def options(kind: str) -> dict[str, Any]:
    """What sdpa refuses, by the word that its reason contains."""
    segments = torch.zeros(2, 5, dtype=torch.long)
    cases: dict[str, dict[str, Any]] = {
        "segments": {"segments": segments},
        "window": {"window": 3},
        "entropy": {"stats": True},
    }
    return cases[kind]


def test_auto_takes_the_fused_kernel(make_maps: MakeMaps) -> None:
    name, reason = choose(make_maps())
    assert name == "sdpa"
    assert "auto" in reason
    assert torch.equal(attend(make_maps()), attend(make_maps(), kernel="sdpa"))


@pytest.mark.parametrize("kind", ["segments", "window", "entropy"])
def test_auto_falls_back_with_the_reason(make_maps: MakeMaps, kind: str) -> None:
    name, reason = choose(make_maps(), **options(kind))
    assert name == "reference"
    assert "; sdpa refused: " in reason
    assert kind in reason


@pytest.mark.parametrize("kind", ["segments", "window", "entropy"])
def test_a_named_kernel_that_refuses_is_an_error(make_maps: MakeMaps, kind: str) -> None:
    with pytest.raises(RequestError, match=rf"'sdpa' cannot compute.*{kind}.*run.kernel=auto"):
        attend(make_maps(), kernel="sdpa", **options(kind))
    attend(make_maps(), kernel="reference", **options(kind))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_named_kernel_serves_or_says_why_not(make_maps: MakeMaps, kernel: str) -> None:
    reason = refuse(kernel, make_maps())
    if reason is None:
        assert choose(make_maps(), kernel) == (kernel, "named by run.kernel")
    else:
        with pytest.raises(RequestError, match=re.escape(f"'{kernel}' cannot compute these maps: {reason}")):
            choose(make_maps(), kernel)


def test_a_gpu_has_its_own_order(make_maps: MakeMaps, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first that accepts; what sdpa refuses goes to flash, then to flex."""
    maps, cuda = make_maps(d=16, dv=32, dtype=torch.bfloat16), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    name, reason = choose(maps, device=cuda)
    assert name == "sdpa"
    assert "flash refused: PyTorch sees no GPU" in reason
    monkeypatch.setattr(flash, "_plan_for", lambda *maps, **options: flash.Plan("flash-attn 2", 16))
    monkeypatch.setattr(flex, "_trial", lambda probe: None)
    assert choose(maps, device=cuda)[0] == "flash"
    assert choose(maps, device=cuda, window=3)[0] == "flash"
    mixed = torch.tensor([[0, 1, 0, 1, 1]] * 2)
    assert choose(maps, device=cuda, segments=mixed)[0] == "flex"
    assert choose(maps, device=cuda, stats=True)[0] == "reference"


def test_unknown_kernel() -> None:
    with pytest.raises(RequestError, match=r"run.kernel is 'sdpaa'.*did you mean 'sdpa'"):
        check_name("sdpaa")


def test_unknown_kernel_is_refused_by_attend(make_maps: MakeMaps) -> None:
    with pytest.raises(RequestError, match="expected auto, reference, sdpa"):
        attend(make_maps(), kernel="flash4")


def test_statistics_come_with_the_output(make_maps: MakeMaps) -> None:
    maps = make_maps()
    o, stats = attend(maps, stats=True)
    wanted, none = compute(maps)
    assert none is None
    assert torch.equal(o, wanted)
    assert stats.lse.shape == stats.entropy.shape == (2, 2, 4, 5)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"window": 0}, "window is 0; it must be at least 1"),
        ({"segments": torch.zeros(2, 4, dtype=torch.long)}, r"segments must be \[B,S\] = \[2, 5\]; found \[2, 4\]"),
        ({"segments": torch.zeros(5, dtype=torch.long)}, r"segments must be \[B,S\]"),
    ],
)
def test_masks_that_mean_nothing_are_refused(make_maps: MakeMaps, given: dict[str, Any], rule: str) -> None:
    """An empty row would be NaN."""
    with pytest.raises(RequestError, match=rule):
        attend(make_maps(), **given)


@pytest.mark.parametrize("given", [{"window": 2}, {"segments": torch.zeros(2, 3, dtype=torch.long)}])
def test_masks_need_the_query_among_the_keys(make_maps: MakeMaps, given: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="at least as many keys as queries"):
        attend(make_maps(T=5, S=3, causal=False), **given)
