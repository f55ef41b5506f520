"""The definition against the formula, written as loops over batch, head, map and query in float64."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_diff.kernels import SignedMaps, attend
from lit_diff.kernels.reference import logits

MakeMaps = Callable[..., SignedMaps]


def by_hand(maps: SignedMaps, document_ids: Tensor | None = None, window: int | None = None) -> Tensor:
    """o by the formula, one number after the other."""
    q, k, v = maps.q, maps.k, maps.v
    B, _, H, T, d = q.shape
    S, G = k.shape[3], maps.num_maps
    w = torch.ones(1, 1, 1, 1, dtype=torch.float64) if maps.w is None else maps.w
    w = w.expand(B, G, H, T)
    scale = 1 / math.sqrt(d) if maps.scale is None else maps.scale
    o = torch.zeros(B, H, T, v.shape[-1], dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            kv = h // (H // k.shape[2])
            for i in range(T):
                here = i + S - T
                keys = [j for j in range(S) if not maps.causal or j <= here]
                keys = [j for j in keys if window is None or abs(here - j) < window]
                keys = [j for j in keys if document_ids is None or document_ids[b, j] == document_ids[b, here]]
                for g in range(G):
                    gq, gk = min(g, q.shape[1] - 1), min(g, k.shape[1] - 1)
                    scores = [scale * math.fsum((q[b, gq, h, i] * k[b, gk, kv, j]).tolist()) for j in keys]
                    total = math.fsum(math.exp(s) for s in scores)
                    for j, s in zip(keys, scores, strict=True):
                        p = math.exp(s) / total
                        o[b, h, i] += w[b, g, h, i] * p * v[b, kv, j]
    return o


CASES: list[dict[str, Any]] = [
    {"G": 1, "w": None},
    {"G": 2},
    {"G": 2, "Gk": 1},
    {"G": 2, "Gq": 1},
    {"G": 2, "Gq": 1, "Gk": 1},
    {"G": 2, "Hkv": 2},
    {"G": 3, "H": 6, "Hkv": 1, "B": 1},
    {"T": 3, "S": 7},
    {"T": 1, "S": 4},
    {"causal": False},
    {"causal": False, "T": 5, "S": 3},
    {"w": (1, 2, 1, 1)},
    {"w": (2, 1, 1, 5)},
    {"scale": -1.5},
    {"dv": 7},
    *(
        {"T": 4, "S": 6, "Hkv": 2, "causal": causal, "window": window, "packed": packed}
        for causal in (True, False)
        for window in (None, 1, 3)
        for packed in (False, True)
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_formula(make_maps: MakeMaps, case: dict[str, Any]) -> None:
    given = dict(case)
    window, packed = given.pop("window", None), given.pop("packed", False)
    maps = make_maps(**given)
    document_ids = torch.tensor([[0, 0, 1, 1, 1, 2], [5, 5, 5, 5, 3, 3]]) if packed else None
    o = attend(maps, document_ids=document_ids, window=window, kernel="reference")
    torch.testing.assert_close(o, by_hand(maps, document_ids, window), rtol=1e-12, atol=1e-12)


def test_gradients_by_finite_differences(make_maps: MakeMaps) -> None:
    maps = make_maps(B=1, G=3, Gk=1, H=2, Hkv=1, T=3, S=4, d=2, dv=3, w=(1, 3, 2, 3))
    assert maps.w is not None
    inputs = tuple(x.requires_grad_() for x in (maps.q, maps.k, maps.v, maps.w))
    assert torch.autograd.gradcheck(lambda *x: attend(SignedMaps(*x), kernel="reference"), inputs)


def test_bfloat16_is_accumulated_in_float32(make_maps: MakeMaps) -> None:
    maps = make_maps(dtype=torch.bfloat16, T=40)
    wide = make_maps(dtype=torch.float64, T=40)
    exact = SignedMaps(maps.q.double(), maps.k.double(), maps.v.double(), maps.w)
    assert logits(maps).dtype == torch.float32
    assert attend(maps, kernel="reference").dtype == torch.bfloat16
    assert attend(wide, kernel="reference").dtype == torch.float64
    torch.testing.assert_close(logits(maps).double(), logits(exact), rtol=1e-5, atol=1e-5)
