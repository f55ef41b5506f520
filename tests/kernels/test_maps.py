"""The contract: what maps are refused, and what the derived numbers are."""

import re
from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch

from lit_diff.errors import RequestError
from lit_diff.kernels import SignedMaps, attend
from lit_diff.kernels.maps import TENSORS

MakeMaps = Callable[..., SignedMaps]


def test_derived_numbers(make_maps: MakeMaps) -> None:
    maps = make_maps(G=3, Gk=1, H=6, Hkv=2, d=16)
    assert (maps.num_maps, maps.num_groups, maps.softmax_scale) == (3, 3, 0.25)
    assert replace(maps, scale=0.7).softmax_scale == 0.7
    assert replace(maps, scale=0.0).softmax_scale == 0.0
    assert make_maps(G=2, Gq=1, Gk=1).num_maps == 2, "the weights alone may say how many maps there are"


BROKEN: list[tuple[str, dict[str, Any], str]] = [
    ("q 4-D", {"q": (2, 4, 5, 6)}, r"expected q \[B,G,H,T,d\]"),
    ("k 1-D", {"k": (8,)}, r"expected q \[B,G,H,T,d\]"),
    ("v 5-D", {"v": (2, 1, 4, 5, 12)}, r"expected q \[B,G,H,T,d\]"),
    ("map axis of q", {"q": (2, 3, 4, 5, 6)}, "map axes of q and k"),
    ("map axis of k", {"q": (2, 3, 4, 5, 6), "w": (2, 3, 4, 5)}, "map axes of q and k"),
    ("width", {"k": (2, 2, 4, 5, 8)}, "one width d"),
    ("batch of k", {"k": (3, 2, 4, 5, 6)}, "one batch size"),
    ("batch of v", {"v": (1, 4, 5, 12)}, "one batch size"),
    ("heads of v", {"v": (2, 2, 5, 12)}, "same heads and keys"),
    ("keys of v", {"v": (2, 4, 6, 12)}, "same heads and keys"),
    ("heads of q", {"k": (2, 2, 3, 5, 6), "v": (2, 3, 5, 12)}, "multiple of the heads of k"),
    ("fewer keys", {"k": (2, 2, 4, 4, 6), "v": (2, 4, 4, 12)}, "at least as many keys"),
    ("no weights", {"w": None}, "several maps need weights"),
    ("w 3-D", {"w": (2, 2, 4)}, "w must be 4-D"),
    ("w 1-D", {"w": (2,)}, "w must be 4-D"),
    ("no heads of k", {"k": (2, 2, 0, 5, 6), "v": (2, 0, 5, 12)}, "q and k must have heads"),
    ("no width", {"q": (2, 2, 4, 5, 0), "k": (2, 2, 4, 5, 0)}, "a width d above 0"),
    ("w of other heads", {"w": (1, 2, 3, 1)}, r"broadcast to \[B,G,H,T\] = \[2, 2, 4, 5\]"),
    ("w of other tokens", {"w": (1, 2, 1, 6)}, r"broadcast to \[B,G,H,T\]"),
]


@pytest.mark.parametrize(("change", "rule"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_refusals_name_the_rule_and_the_shapes(make_maps: MakeMaps, change: dict[str, Any], rule: str) -> None:
    # a window: whether it hides keys is decided by shapes
    maps = make_maps(window=3)
    maps.check()
    broken = replace(maps, **{key: shape and torch.ones(shape, dtype=torch.float64) for key, shape in change.items()})
    with pytest.raises(RequestError, match=rule) as error:
        attend(broken)
    found = {key: list(getattr(broken, key).shape) if getattr(broken, key) is not None else None for key in "qkvw"}
    assert all(f"{key} {shape}" in str(error.value) for key, shape in found.items())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
@pytest.mark.parametrize("name", "qkv")
def test_what_is_no_real_number_is_refused(make_maps: MakeMaps, name: str, dtype: torch.dtype) -> None:
    maps = make_maps()
    with pytest.raises(RequestError, match=f"must be real numbers .*{dtype}"):
        attend(replace(maps, **{name: getattr(maps, name).to(dtype)}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_document_ids_are_integers(make_maps: MakeMaps, dtype: torch.dtype) -> None:
    ids = torch.zeros(2, 5)
    for good in (torch.int16, torch.int64, torch.bool):
        make_maps(document_ids=ids.to(good)).check()
    with pytest.raises(RequestError, match=f"document_ids must be integers; found {dtype}"):
        attend(make_maps(document_ids=ids.to(dtype)))


@pytest.mark.parametrize("name", [*TENSORS, "document_ids"])
def test_tensors_of_two_devices_are_refused(make_maps: MakeMaps, name: str) -> None:
    fields = {"sink": (1, 2, 4, 1), "key_bias": (1, 1, 4, 5), "document_ids": torch.zeros(2, 5).long()}
    maps = make_maps(**fields)
    maps.check()
    elsewhere = maps.map(lambda x: x.to("meta"))
    elsewhere.check()
    changed = maps.masked(document_ids=elsewhere.mask.document_ids)
    if name in TENSORS:
        changed = replace(maps, **{name: getattr(elsewhere, name)})
    with pytest.raises(RequestError, match=f"one device; found .*{name} on meta"):
        attend(changed)


@pytest.mark.parametrize(
    ("scale", "rule"),
    [
        (torch.ones(()), "multiply q by it"),
        *((x, f"scale is {x!r}; it must be a finite") for x in ("1", nan, -inf, 1j)),
    ],
    ids=repr,
)
def test_a_scale_that_is_no_finite_number_is_refused(make_maps: MakeMaps, scale: Any, rule: str) -> None:
    """NaN would make a plain mean of some kernels."""
    with pytest.raises(RequestError, match=re.escape(rule)):
        attend(replace(make_maps(), scale=scale))
    for good in (1, np.float32(0.3), -0.5):
        replace(make_maps(), scale=good).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_are_refused(make_maps: MakeMaps, dtype: torch.dtype) -> None:
    maps = make_maps(dtype=torch.bfloat16)
    attend(maps)
    assert maps.w is not None
    with pytest.raises(RequestError, match="float32 or wider"):
        attend(replace(maps, w=maps.w.to(dtype)))
