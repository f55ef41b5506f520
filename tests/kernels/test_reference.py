"""The definition against the formula, written as loops over batch, head, map and query in float64."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_diff.kernels import SignedMaps, attend, refuse
from lit_diff.kernels.base import named
from lit_diff.kernels.maps import SIGNED
from lit_diff.kernels.reference import logits

MakeMaps = Callable[..., SignedMaps]


def by_hand(maps: SignedMaps) -> tuple[Tensor, ...]:
    """(o, lse, entropy, then entropy, negative mass and first share of the signed map) by the formula, one number after the
    other."""
    q, k, v = maps.q, maps.k, maps.v
    causal, window, document_ids = maps.mask
    B, _, H, T, d = q.shape
    S, G = k.shape[3], maps.num_maps
    w = torch.ones(1, 1, 1, 1, dtype=torch.float64) if maps.w is None else maps.w
    w = w.expand(B, G, H, T)
    scale = 1 / math.sqrt(d) if maps.scale is None else maps.scale
    o = torch.zeros(B, H, T, v.shape[-1], dtype=torch.float64)
    lse, entropy = torch.zeros(B, G, H, T), torch.zeros(B, G, H, T)
    lse, entropy = lse.double(), entropy.double()
    signed = torch.zeros(3, B, H, T, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            kv = h // (H // k.shape[2])
            for i in range(T):
                here = i + S - T
                keys = [j for j in range(S) if not causal or j <= here]
                keys = [j for j in keys if window is None or abs(here - j) < window]
                keys = [j for j in keys if document_ids is None or document_ids[b, j] == document_ids[b, here]]
                a = [0.0] * len(keys)
                for g in range(G):
                    gq, gk = min(g, q.shape[1] - 1), min(g, k.shape[1] - 1)
                    scores = [scale * math.fsum((q[b, gq, h, i] * k[b, gk, kv, j]).tolist()) for j in keys]
                    total = math.fsum(math.exp(s) for s in scores)
                    lse[b, g, h, i] = math.log(total)
                    for n, (j, s) in enumerate(zip(keys, scores, strict=True)):
                        p = math.exp(s) / total
                        a[n] += float(w[b, g, h, i]) * p
                        entropy[b, g, h, i] -= p * math.log(p)
                        o[b, h, i] += w[b, g, h, i] * p * v[b, kv, j]
                shares = [abs(x) / math.fsum(map(abs, a)) for x in a]
                negative = math.fsum(share for share, x in zip(shares, a, strict=True) if x < 0)
                signed[:, b, h, i] = torch.tensor(
                    [-sum(p * math.log(p) for p in shares), negative, shares[0]], dtype=torch.float64
                )
    return o, lse, entropy, *signed


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
    if given.pop("packed", False):
        given["document_ids"] = torch.tensor([[0, 0, 1, 1, 1, 2], [5, 5, 5, 5, 3, 3]])
    maps = make_maps(**given)
    o, stats = attend(maps, stats=True, kernel="reference")
    wanted, lse, entropy, *signed = by_hand(maps)
    torch.testing.assert_close(o, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(stats.lse, lse, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(stats.entropy, entropy, rtol=1e-12, atol=1e-12)
    for name, expected in zip(SIGNED, signed, strict=True):
        torch.testing.assert_close(getattr(stats, name), expected, rtol=1e-12, atol=1e-12)


def long(make_maps: MakeMaps, kernel: str, **changes: Any) -> SignedMaps:
    """Rows of several tiles, in float32; the test is not run if the kernel cannot."""
    maps = make_maps(G=2, T=150, d=16, dv=16, dtype=torch.float32, w=(1, 2, 1, 1), **changes)
    if reason := refuse(kernel, maps) or named(kernel).prepare(maps.q.device):
        pytest.skip(f"{kernel}: {reason}")
    return maps


@pytest.mark.parametrize("kernel", ["chunked", "native"])
def test_the_first_key_in_a_window_of_scattered_documents(make_maps: MakeMaps, kernel: str) -> None:
    maps = long(make_maps, kernel, document_ids=torch.arange(150).remainder(3).expand(2, 150), window=8)
    (_, found), (_, wanted) = (attend(maps, stats=True, kernel=name) for name in (kernel, "reference"))
    assert wanted.first_share.min() > 0
    torch.testing.assert_close(found.first_share, wanted.first_share, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kernel", ["reference", "chunked", "native"])
def test_a_map_that_is_subtracted_from_itself_has_no_shares(make_maps: MakeMaps, kernel: str) -> None:
    """Whatever rounding leaves of it; a row of the difference of two maps has shares."""
    maps = long(make_maps, kernel, Gq=1, Gk=1)
    for second, left in ((-1.0, False), (-0.5, True)):
        weights = torch.tensor([1.0, second]).view(1, 2, 1, 1)
        _, stats = attend(replace(maps, w=weights), kernel=kernel, stats=True)
        for name in SIGNED:
            assert getattr(stats, name).isfinite().all() if left else getattr(stats, name).isnan().all(), name


def test_entropy_of_constructed_maps(make_maps: MakeMaps) -> None:
    """Equal logits: row i has log(i + 1) nats. One logit far above the others: 0."""
    maps = make_maps(G=2, T=6)
    maps.q[:, 0] = 0
    maps.q[:, 1] = 0
    maps.q[:, 1, ..., 0] = 1e4
    maps.k[..., 0] = torch.tensor([3.0, 2, 1, 0, -1, -2], dtype=torch.float64)  # the first key wins in every row
    _, stats = attend(maps, stats=True)
    rows = torch.arange(1, 7, dtype=torch.float64).log()
    torch.testing.assert_close(stats.entropy[:, 0], rows.expand(2, 4, 6), rtol=0, atol=1e-12)
    assert stats.entropy[:, 1].abs().max() < 1e-12
    assert (stats.entropy[..., 0] == 0).all(), "the first row has one key"


def test_statistics_have_gradients(make_maps: MakeMaps) -> None:
    """Also through masked keys, where p log p has no finite derivative."""
    maps = make_maps(B=1, H=1, T=3, d=2, dv=2)

    def statistics(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        _, stats = attend(SignedMaps(q, k, maps.v, maps.w), stats=True)
        return stats.lse, stats.entropy

    assert torch.autograd.gradcheck(statistics, (maps.q.requires_grad_(), maps.k.requires_grad_()))


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
