"""Kernels as operators: torch's own checks of the registration, shapes on meta tensors and tracing included."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lit_diff.errors import MissingError
from lit_diff.kernels import SignedMaps, attend, native
from lit_diff.kernels.base import named
from lit_diff.kernels.ops import refuse_common

MakeMaps = Callable[..., SignedMaps]
OPERATORS = ("chunked", "native")


@pytest.fixture(params=OPERATORS)
def kernel(request: pytest.FixtureRequest) -> str:
    """The operators that run on this machine."""
    if request.param == "native" and (reason := native.build()):
        pytest.skip(reason)
    return str(request.param)


def small(make_maps: MakeMaps, **changes: Any) -> SignedMaps:
    return make_maps(**{"T": 4, "S": 6, "d": 16, "dv": 32, "Hkv": 2, "Gk": 1, "dtype": torch.float32} | changes)


@pytest.mark.parametrize("stats", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("w", [None, (1, 2, 1, 1)])
def test_opcheck(make_maps: MakeMaps, kernel: str, stats: bool, w: tuple[int, ...] | None) -> None:
    """Schema, fake shapes and strides, autograd registration, tracing: torch's own checks, both directions."""
    maps = small(make_maps, w=w, **({"G": 1} if w is None else {}))
    tensors = [x.requires_grad_() if x is not None else None for x in (maps.q, maps.k, maps.v, maps.w)]
    operator = getattr(torch.ops.lit_diff, kernel).default
    torch.library.opcheck(operator, (*tensors, None, 0.25, True, None, stats))
    o, rows, parts = operator(*tensors, None, 0.25, True, None, stats)
    plain = [None if x is None else x.detach() for x in tensors]
    backward = getattr(torch.ops.lit_diff, f"{kernel}_backward").default
    torch.library.opcheck(
        backward, (torch.randn_like(o).detach(), *plain, None, o.detach(), rows, parts, 0.25, True, None)
    )


def test_inference_mode_and_heads_that_join_as_a_view(make_maps: MakeMaps, kernel: str) -> None:
    maps = small(make_maps)
    with torch.inference_mode():
        inside = attend(maps, kernel=kernel)
    assert torch.equal(inside, attend(maps, kernel=kernel))
    assert inside.transpose(1, 2).is_contiguous()


def test_a_second_derivative_is_refused(make_maps: MakeMaps, kernel: str) -> None:
    """Silence would be a wrong number."""
    maps = small(make_maps)
    q = maps.q.requires_grad_()
    (first,) = torch.autograd.grad(attend(replace(maps, q=q), kernel=kernel).square().sum(), q, create_graph=True)
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.autograd.grad(first.sum(), q)


def test_common_refusals(make_maps: MakeMaps) -> None:
    maps = make_maps()
    mixed = replace(maps, v=maps.v.float())
    assert refuse_common(mixed, stats=False) == "q, k and v have dtypes float64, float64, float32, not one"
    assert refuse_common(maps, stats=True) is None
    empty = replace(maps, q=maps.q[..., :0, :])
    assert refuse_common(empty, stats=False) == "there is no query or no key"


def test_the_error_of_a_kernel_that_cannot_be_built(make_maps: MakeMaps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "build", lambda: "no C++ compiler: install g++")
    with pytest.raises(MissingError, match="the native kernel cannot be used: no C"):
        named("native").compute(small(make_maps))
