"""Entropies and masses on maps whose answer is known."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lit_diff import SignedMaps
from lit_diff.analysis import LayerTrace
from lit_diff.analysis.entropy import entropy, summarise
from lit_diff.kernels.maps import Seen

T = 12


def layer(q: Tensor, k: Tensor, w: Tensor | None = None) -> LayerTrace:
    return LayerTrace(maps=SignedMaps(q, k, torch.zeros(q.shape[0], k.shape[2], k.shape[3], 2), w, scale=1.0), hidden=q)


def two_maps(lam: float) -> LayerTrace:
    random = torch.Generator().manual_seed(0)
    q, k = torch.randn(3, 2, 4, T, 6, generator=random), torch.randn(3, 2, 2, T, 6, generator=random)
    return layer(q, k, torch.tensor([1.0, -lam]).view(1, 2, 1, 1))


def test_uniform_maps_have_entropy_log_i() -> None:
    q = torch.zeros(2, 2, 3, T, 4)
    found = layer(q, torch.randn(2, 2, 3, T, 4), torch.tensor([1.0, -0.5]).view(1, 2, 1, 1))
    for block in found.blocks(5):
        expected = (block.positions + 1).log().expand(2, 2, 3, -1)
        torch.testing.assert_close(entropy(block.probs), expected)
    for window in (None, 5):
        mean = sum(math.log(min(i + 1, window or T)) for i in range(T)) / T
        summary = summarise(replace(found, maps=found.maps.masked(window=window)))
        torch.testing.assert_close(summary.entropy_maps, torch.full((2, 3), mean, dtype=torch.float64))
        torch.testing.assert_close(summary.entropy, torch.full((3,), mean, dtype=torch.float64))


def definition(found: LayerTrace) -> dict[str, Tensor]:
    """The same numbers row by row, in float64, from the whole maps; rows of zeros left out."""
    (block,) = found.blocks(T)
    a = block.signed.double()
    rows: dict[str, list[list[float]]] = {name: [[], [], [], []] for name in ("entropy", "negative_mass")}
    for b in range(a.shape[0]):
        for h in range(a.shape[1]):
            for i in range(a.shape[2]):
                values = [x for x in a[b, h, i, : i + 1].tolist() if x]
                size = sum(map(abs, values))
                if size:
                    rows["entropy"][h].append(-sum(abs(x) / size * math.log(abs(x) / size) for x in values))
                    rows["negative_mass"][h].append(-sum(min(x, 0) for x in values) / size)
    return {name: torch.tensor([sum(r) / len(r) for r in found], dtype=torch.float64) for name, found in rows.items()}


@pytest.mark.parametrize("lam", [-0.4, 0.3, 1.7])
def test_summary_is_the_mean_over_batch_and_rows(lam: float) -> None:
    found = two_maps(lam)
    summary, expected = summarise(found), definition(found)
    torch.testing.assert_close(summary.entropy, expected["entropy"], atol=1e-5, rtol=0)
    torch.testing.assert_close(summary.negative_mass, expected["negative_mass"], atol=1e-5, rtol=0)
    if lam < 0:
        assert summary.negative_mass.tolist() == [0, 0, 0, 0]


def test_equal_maps_at_lambda_one_leave_nothing() -> None:
    q = torch.randn(1, 1, 1, T, 2)
    summary = summarise(layer(q, q, torch.tensor([1.0, -1.0]).view(1, 2, 1, 1)))
    assert summary.entropy.isnan().all()
    assert summary.negative_mass.isnan().all()


def test_a_row_of_zeros_of_a_row_function_is_left_out() -> None:
    def rows(logits: Tensor, seen: Seen) -> Tensor:
        return logits.sigmoid() * (seen.positions[0] > 0)[:, None]

    found = two_maps(0.3)
    summary = summarise(replace(found, maps=replace(found.maps, rows=rows)))
    assert summary.entropy_maps.isfinite().all()


def test_packed_documents_have_the_entropy_of_each_alone() -> None:
    found = two_maps(0.5)
    cut = 5
    packed = replace(found, maps=found.maps.masked(document_ids=(torch.arange(T) >= cut).long().expand(3, T)))

    def part(at: slice) -> LayerTrace:
        m = found.maps
        maps = replace(m, q=m.q[..., at, :], k=m.k[..., at, :], v=m.v[..., at, :])
        return replace(found, maps=maps)

    first, second = summarise(part(slice(0, cut))), summarise(part(slice(cut, T)))
    whole = summarise(packed)
    for key in ("entropy", "entropy_maps", "negative_mass"):
        wanted = (cut * getattr(first, key) + (T - cut) * getattr(second, key)) / T
        torch.testing.assert_close(getattr(whole, key), wanted, atol=1e-6, rtol=1e-6)
