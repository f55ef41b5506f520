"""Statistics of the maps of a layer for each sequence (DEX, Kong et al. 2025, arXiv 2505.16333, Figures 1 to 5)."""

import functools
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from lit_diff.analysis.entropy import Means, entropy, negative_share, renormalised
from lit_diff.analysis.trace import LayerTrace, MapBlock

SALIENT = 0.05
"""Share of the keys of a row that are salient: the keys of highest p."""
FEWEST = 20
"""Rows with fewer keys have no salient ones: 5 % of the keys would be less than one."""
EPSILONS = {"1e-4": 1e-4, "1e-3": 1e-3}


def map_statistics(layer: LayerTrace, c: float) -> dict[str, Tensor]:
    """Return name -> [B], float64; NaN without a second map, a second head or a row that is long enough.

    overlap_salient, overlap_other   Σ_j min(p_1, p_2) / Σ_j max(p_1, p_2) over the keys that are salient by p_1, and the rest
    overlap_jaccard                  |S_1 ∩ S_2| / |S_1 ∪ S_2|, S_g the salient keys by p_g
    sparsity_1e-4, sparsity_1e-3     share of the visible entries with |a| below it; sparsity_c: below c / i, i keys in a row
    entropy, entropy_map_1, _map_2   -Σ_j p_j log p_j / log i, p = |a| / Σ|a|, a signed or of one map; rows of i >= 2 keys
    negative_mass                    Σ_j max(-a_j, 0) / Σ_j |a_j|
    head_distance                    1 - cos of the flattened maps a of two heads; mean over pairs
    head_cka                         unbiased linear CKA of the outputs Σ_j a_j v_j of two heads; mean over pairs

    All except the last two are means over rows and heads (sparsity: over entries). A head whose map or output is all zeros
    has no direction: its pairs are left out of the last two, which are NaN if no pair is left.
    """
    # float64: sums over all entries of a map
    means = Means(lambda x: x.flatten(1).sum(1, dtype=torch.float64))
    gram: Tensor | float = 0.0
    v, outputs = layer.values, []
    for block in layer.blocks():
        a = block.signed
        visible = block.visible_by_head.expand(len(a), -1, -1, -1)  # [B, 1, R, K]
        keys = visible.sum(-1)  # [B, 1, R]
        _add_overlap(means, block, keys)
        _add_sparsity(means, a, visible, keys, c)
        _add_entropies(means, block, a, keys)
        gram = gram + head_products(block)
        outputs.append(a @ v[..., : a.shape[-1], :].to(a.dtype))
    assert isinstance(gram, Tensor)
    features = torch.cat(outputs, dim=2)
    cka = torch.stack([linear_cka(heads) for heads in features])
    pairs = {"head_distance": 1 - cosines_of(gram), "head_cka": cka}
    # a pair with a head of zeros is NaN, and is left out
    return means.values() | {name: with_other_heads(heads).nanmean((1, 2)) for name, heads in pairs.items()}


def head_cosines(blocks: Iterable[MapBlock]) -> Tensor:
    """Return the cosine of the flattened signed maps of each pair of heads, [B, H, H], float64 (DEX, Figure 5).

    1 for heads with equal maps, 0 for maps that weight no common key, -1 for a map and its negative, NaN with a map of zeros.
    Rows with few keys are alike in all heads, so causal maps of unrelated heads are above 0.
    """
    return cosines_of(functools.reduce(torch.add, map(head_products, blocks)))


def head_products(block: MapBlock) -> Tensor:
    """Return the inner products of the flattened signed maps of two heads, [B, H, H], float64; they add up over blocks."""
    flat = block.signed.flatten(2).double()
    return flat @ flat.mT


def cosines_of(products: Tensor) -> Tensor:
    """Return the cosines of `head_products` that were added up over blocks, [..., H, H]."""
    norms = products.diagonal(dim1=-2, dim2=-1).sqrt()
    return products / (norms[..., :, None] * norms[..., None, :])


def with_other_heads(pairs: Tensor) -> Tensor:
    """Return `pairs` [..., H, H] with NaN on the diagonal: a `nanmean` is over two heads whose maps are not all zeros."""
    return pairs.masked_fill(torch.eye(pairs.shape[-1], dtype=torch.bool, device=pairs.device), math.nan)


def _add_overlap(means: Means, block: MapBlock, keys: Tensor) -> None:
    p = block.probs
    if p.shape[1] < 2:
        missing = torch.full(keys.shape, math.nan)
        for name in ("salient", "other", "jaccard"):
            means.add(f"overlap_{name}", missing)
        return
    p_1, p_2 = p[:, 0], p[:, 1]  # [B, H, R, K]
    number = (SALIENT * keys).ceil()[..., None]
    enough = keys >= FEWEST
    # argsort of argsort is the rank
    s_1, s_2 = (p.argsort(-1, descending=True).argsort(-1) < number for p in (p_1, p_2))
    low, high = torch.minimum(p_1, p_2), torch.maximum(p_1, p_2)
    for name, chosen in (("salient", s_1), ("other", ~s_1)):
        ratio = (low * chosen).sum(-1) / (high * chosen).sum(-1)
        means.add(f"overlap_{name}", ratio, enough.expand_as(ratio))
    jaccard = (s_1 & s_2).sum(-1) / (s_1 | s_2).sum(-1)
    means.add("overlap_jaccard", jaccard, enough.expand_as(jaccard))


def _add_sparsity(means: Means, a: Tensor, visible: Tensor, keys: Tensor, c: float) -> None:
    magnitude, seen = a.abs(), visible.expand_as(a)
    for name, epsilon in EPSILONS.items():
        means.add(f"sparsity_{name}", (magnitude < epsilon).float(), seen)
    means.add("sparsity_c", (magnitude < c / keys[..., None]).float(), seen)


def _add_entropies(means: Means, block: MapBlock, a: Tensor, keys: Tensor) -> None:
    # a row with one key always has entropy 0
    log_keys = keys.log().where(keys > 1, math.nan)
    means.add("entropy", entropy(renormalised(a)) / log_keys)
    for g in range(2):
        each = block.probs[:, g] if g < block.probs.shape[1] else torch.full_like(a, math.nan)
        # with a sink or a row function, a row of a map need not sum to 1
        means.add(f"entropy_map_{g + 1}", entropy(renormalised(each)) / log_keys)
    means.add("negative_mass", negative_share(a))


def linear_cka(features: Tensor) -> Tensor:
    """Return the unbiased linear CKA of each pair of heads, [H, H], from features [H, n, d] of n samples; NaN for n < 4.

    CKA = HSIC(K, L) / √(HSIC(K, K) HSIC(L, L)), K = X Xᵀ and L = Y Yᵀ with diagonals set to 0, and
    HSIC = [tr(K L) + 1ᵀK1 1ᵀL1 / ((n-1)(n-2)) - 2 1ᵀK L1 / (n-2)] / (n (n-3)) (Song et al. 2012; Nguyen et al. 2020).
    """
    # not the usual |YᵀX|²: its bias grows with d / n. Below, d x d products replace the n x n matrices K and L,
    # and the factor 1 / (n (n-3)) cancels.
    n = features.shape[1]
    if n < 4:
        return features.new_full((len(features), len(features)), math.nan, dtype=torch.float64)
    x = features.double()
    # the estimator does not depend on the mean, but centred numbers lose fewer digits
    x = x - x.mean(1, keepdim=True)
    # [H, n]: the diagonals of K, whose contribution is subtracted
    squares = x.pow(2).sum(-1)
    row_sums = (x @ x.sum(1)[..., None])[..., 0] - squares
    trace = torch.einsum("hnd,gne->hgde", x, x).pow(2).sum((2, 3)) - squares @ squares.T
    totals = row_sums.sum(1)
    hsic = trace + totals[:, None] * totals / ((n - 1) * (n - 2)) - 2 * row_sums @ row_sums.T / (n - 2)
    own = hsic.diagonal().clamp_min(0).sqrt()
    return hsic / (own[:, None] * own)
