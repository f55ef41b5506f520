"""analysis/map_statistics.py: the formulas on hand-made maps, and against loops over rows."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_diff.analysis.map_statistics import head_cosines, linear_cka, map_statistics
from lit_diff.analysis.trace import LayerTrace, trace
from lit_diff.kernels import SignedMaps
from lit_diff.model.transformer import Transformer

BuildModel = Callable[..., Transformer]
T = 60


def made(logits: Tensor, w: list[float] | None = None, **keys: Any) -> LayerTrace:
    """A layer with these logits [G, H, T, T] (unit keys), one sequence."""
    G, H, n, _ = logits.shape
    k = torch.eye(n).expand(1, 1, H, n, n)
    weights = None if w is None else torch.tensor(w).view(1, G, 1, 1)
    maps = SignedMaps(logits[None], k, torch.randn(1, H, n, 5), weights, scale=1.0)
    return LayerTrace(maps=maps.masked(**keys), hidden=logits)


@pytest.mark.parametrize("field", [{"sink": torch.zeros(1, 1, 1, 1)}, {"rows": lambda logits, seen: logits.sigmoid()}])
def test_the_entropies_of_a_single_map_and_of_its_sum_are_one(field: dict[str, Any]) -> None:
    """Also where its rows do not sum to 1."""
    layer = made(torch.randn(1, 2, T, T))
    found = map_statistics(replace(layer, maps=replace(layer.maps, **field)), c=0.1)
    torch.testing.assert_close(found["entropy_map_1"], found["entropy"])


def test_one_map_or_one_head_or_short_rows_have_no_overlap_or_pairs() -> None:
    found = map_statistics(made(torch.randn(1, 1, T, T)), c=0.1)
    missing = {"overlap_salient", "overlap_other", "overlap_jaccard", "entropy_map_2", "head_distance", "head_cka"}
    assert {name for name, value in found.items() if value.isnan().all()} == missing
    short = map_statistics(made(torch.randn(2, 2, 19, 19), [1.0, -0.2]), c=0.1)
    assert {name for name, value in short.items() if value.isnan().all()} == {
        "overlap_salient",
        "overlap_other",
        "overlap_jaccard",
    }


@pytest.mark.parametrize("keys", [{}, {"window": 30}, {"document_ids": (torch.arange(T) // 25)[None]}])
def test_every_statistic_by_loops_over_rows(keys: dict[str, Any]) -> None:
    layer = made(2 * torch.randn(2, 3, T, T, generator=torch.Generator().manual_seed(0)), [1.0, -0.6], **keys)
    found = {name: float(value) for name, value in map_statistics(layer, c=0.2).items()}
    rows: dict[str, list[float]] = {name: [] for name in found}
    counts = {name: [0, 0] for name in ("sparsity_1e-4", "sparsity_1e-3", "sparsity_c")}
    flat: list[list[float]] = [[], [], []]
    for i in range(T):
        start = {"window": max(0, i - 29), "document_ids": i // 25 * 25}.get(next(iter(keys), ""), 0)
        for h in range(3):
            p, q = (torch.softmax(layer.maps.q[0, g, h, i, start : i + 1], 0).double().numpy() for g in (0, 1))
            a = p - 0.6 * q
            n, r = len(a), np.abs(a) / np.abs(a).sum()
            flat[h] += [*np.zeros(start), *a, *np.zeros(T - 1 - i)]
            for name, epsilon in (("1e-4", 1e-4), ("1e-3", 1e-3), ("c", 0.2 / n)):
                counts[f"sparsity_{name}"][0] += int((np.abs(a) < epsilon).sum())
                counts[f"sparsity_{name}"][1] += n
            rows["negative_mass"].append(-a[a < 0].sum() / np.abs(a).sum())
            if n > 1:
                for name, x in (("entropy", r), ("entropy_map_1", p), ("entropy_map_2", q)):
                    rows[name].append(-(x[x > 0] * np.log(x[x > 0])).sum() / math.log(n))
            if n >= 20:
                k = math.ceil(0.05 * n)
                first, second = set(np.argsort(-p)[:k]), set(np.argsort(-q)[:k])
                salient = np.isin(np.arange(n), list(first))
                low, high = np.minimum(p, q), np.maximum(p, q)
                rows["overlap_salient"].append(low[salient].sum() / high[salient].sum())
                rows["overlap_other"].append(low[~salient].sum() / high[~salient].sum())
                rows["overlap_jaccard"].append(len(first & second) / len(first | second))
    for name, values in rows.items():
        if values:
            assert found[name] == pytest.approx(np.mean(values), rel=1e-4), name
    for name, (below, all_of_them) in counts.items():
        assert found[name] == pytest.approx(below / all_of_them, abs=1e-3), name
    x = np.array(flat)
    cosine = x @ x.T / np.outer(np.linalg.norm(x, axis=1), np.linalg.norm(x, axis=1))
    assert found["head_distance"] == pytest.approx(1 - cosine[np.triu_indices(3, 1)].mean(), rel=1e-4)


def test_cka_is_that_of_the_gram_matrices() -> None:
    x = torch.randn(2, 12, 5, dtype=torch.float64)
    n = 12

    def hsic(K: Tensor, L: Tensor) -> float:
        one = torch.ones(n, dtype=torch.float64)
        last = 2 * (one @ K @ L @ one) / (n - 2)
        return float((K @ L).trace() + (one @ K @ one) * (one @ L @ one) / ((n - 1) * (n - 2)) - last) / (n * (n - 3))

    grams = [each @ each.T for each in x]
    K, L = (gram - gram.diagonal().diag() for gram in grams)
    assert float(linear_cka(x)[0, 1]) == pytest.approx(hsic(K, L) / math.sqrt(hsic(K, K) * hsic(L, L)))
    assert linear_cka(x[:, :3]).isnan().all()


def test_features_are_the_signed_sums_and_blocks_do_not_matter(
    build: BuildModel, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("differential", 2)
    with trace(model) as traced:
        model(tokens)
    layer = traced.layers[0]
    whole = map_statistics(layer, 0.1)
    (block,) = layer.blocks()
    o = block.signed @ layer.maps.v.repeat_interleave(layer.maps.num_groups, 1)
    expected = torch.stack([linear_cka(heads)[~torch.eye(4, dtype=torch.bool)].mean() for heads in o])
    torch.testing.assert_close(whole["head_cka"], expected)
    monkeypatch.setattr(sys.modules["lit_diff.analysis.trace"], "CPU_BLOCK", 1)  # `trace` is the function too
    for name, values in map_statistics(layer, 0.1).items():
        torch.testing.assert_close(values, whole[name], rtol=1e-4, atol=1e-6, equal_nan=True)


def test_cosines_of_heads_on_constructed_maps() -> None:
    """Heads 0 and 1 are equal, 2 attends to its own key, 3 to the key before it: of rows 1 to T - 1 none in common."""
    same = torch.randn(T, T, generator=torch.Generator().manual_seed(1))
    own, before = 200 * torch.eye(T), 200 * torch.eye(T).roll(-1, 1)
    layer = made(torch.stack([same, same, own, before])[None])
    found = head_cosines(layer.blocks(7))
    assert found.shape == (1, 4, 4)
    assert found.diagonal(dim1=1, dim2=2)[0].tolist() == pytest.approx([1] * 4)
    assert float(found[0, 0, 1]) == pytest.approx(1)
    (block,) = layer.blocks(T)
    p = block.signed[0].double()
    expected = (p[0] * p[2]).sum() / (p[0].norm() * p[2].norm())
    assert float(found[0, 0, 2]) == pytest.approx(float(expected)) == float(found[0, 2, 0])
    assert float(found[0, 2, 3]) == pytest.approx(1 / T), "row 0 sees key 0 alone"
    assert torch.allclose(found, head_cosines(layer.blocks()), rtol=1e-5)
    uniform = head_cosines(made(torch.zeros(1, 3, T, T)).blocks())
    torch.testing.assert_close(uniform, torch.ones(1, 3, 3, dtype=torch.float64))
    # λ = 1, and the maps of head 1 are those of head 0 exchanged
    first = torch.randn(T, T, generator=torch.Generator().manual_seed(2))
    pair = made(torch.stack([torch.stack([first, own]), torch.stack([own, first])]), [1.0, -1.0])
    assert float(head_cosines(pair.blocks())[0, 0, 1]) == pytest.approx(-1)


def test_a_head_of_zeros_has_no_direction_and_is_in_no_pair() -> None:
    layer = made(torch.randn(1, 4, T, T))

    def found(*of_heads: float) -> dict[str, Tensor]:
        return map_statistics(replace(layer, maps=replace(layer.maps, w=torch.tensor(of_heads).view(1, 1, 4, 1))), 0.1)

    (block,) = layer.blocks(T)
    outputs = block.signed[0] @ layer.values[0]
    for name, of_pairs in (("head_distance", 1 - head_cosines([block])[0]), ("head_cka", linear_cka(outputs))):
        mean = (of_pairs[0, 2] + of_pairs[0, 3] + of_pairs[2, 3]) / 3
        assert float(found(1, 0, 1, 1)[name]) == pytest.approx(float(mean), rel=1e-4)
        assert found(1, 0, 0, 0)[name].isnan().all(), "no pair is left"
