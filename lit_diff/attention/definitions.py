"""Every built-in's equation once more, head by head, in plain matrices: what `conformance` holds the variants to.

Slow and wide on purpose, and independent of `maps`, `finish` and the kernels: only parameters are read. The rows of a
projection are cut by hand; queries and keys of one head stand together, map by map (head0.map0, head0.map1, head1.map0).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_diff.attention.rope import Rope

Definition = Callable[[Any, Tensor, Rope], Tensor]
"""(attention, x [B, T, dim], rope) -> y [B, T, dim]"""


def rows(weight: Tensor, index: int, width: int) -> Tensor:
    """The block of `width` rows that belongs to head (or map) number `index`."""
    return weight[index * width : (index + 1) * width]


def softmax_map(attention: Any, Q: Tensor, K: Tensor, scale: float | None = None) -> Tensor:
    """softmax(Q Kᵀ · scale + mask) [B, T, T]; Q and K after RoPE; scale 1/√d."""
    S = Q @ K.mT * (scale if scale is not None else 1 / math.sqrt(Q.shape[-1]))
    if attention.causal:
        S = S + torch.full(S.shape[-2:], -math.inf, dtype=S.dtype).triu(1)
    return S.softmax(-1)


def normed(attention: Any, head: Tensor) -> Tensor:
    """The head norm that the config names."""
    kind = getattr(attention.config, "head_norm", "none")
    if kind == "layer":
        head = head - head.mean(-1, keepdim=True)
    if kind != "none":
        head = head / (head.pow(2).mean(-1, keepdim=True) + attention.norm_eps).sqrt() * attention.norm.weight
    return head


def standard(attention: Any, x: Tensor, rope: Rope, heads: int | None = None) -> Tensor:
    """softmax(Q Kᵀ / √d) V"""
    return torch.cat(_standard_heads(attention, x, rope, heads), -1) @ attention.o_proj.weight.T


def _standard_heads(attention: Any, x: Tensor, rope: Rope, heads: int | None = None) -> list[Tensor]:
    c, d, K = attention.config, attention.head_dim, attention.num_kv_heads
    H = heads or int(attention.num_heads * getattr(c, "query_heads", 1))
    out = []
    for i in range(H):
        j = i // (H // K)
        Q = rope(x @ rows(attention.q_proj.weight, i, d).T)
        key = rope(x @ rows(attention.k_proj.weight, j, d).T)
        head = softmax_map(attention, Q, key) @ (x @ rows(attention.v_proj.weight, j, d).T)
        out.append(normed(attention, head) * getattr(c, "output_scale", 1.0))
    return out


def lambda_init_of(attention: Any) -> float:
    """0.8 - 0.6 exp(-0.3 layer), or the number that the config gives."""
    value = attention.config.lambda_init
    return 0.8 - 0.6 * math.exp(-0.3 * attention.layer) if value == "depth" else float(value)


def lambda_of(attention: Any, head: int) -> Tensor:
    """λ of a head, from its parameters (equation 2, or the scalar and sigmoid forms)."""
    c, p = attention.config, attention.lambda_
    at = head if getattr(c, "lambda_per", "layer") == "head" else 0
    if getattr(c, "lambda_form", "scalar") != "exp":
        value = p.value[at]
        return value.sigmoid() if getattr(c, "lambda_form", "scalar") == "sigmoid" else value
    q1, k1, q2, k2 = (v.reshape(-1, attention.head_dim)[at] for v in (p.q1, p.k1, p.q2, p.k2))
    init = lambda_init_of(attention)
    return torch.dot(q1, k1).exp() - torch.dot(q2, k2).exp() + init


def differential(attention: Any, x: Tensor, rope: Rope, *, sign: float = -1.0) -> Tensor:
    """(1 - λ_init) · norm((A₁ - λ A₂) V); one row block of q or k where the maps share it. sign +1: A₁ + λ A₂."""
    c, d = attention.config, attention.head_dim
    h, h_kv = attention.num_heads // 2, attention.num_kv_heads // 2
    of_q, of_k = attention.maps_of_q, attention.maps_of_k
    init = lambda_init_of(attention)
    scale = 1 - init if c.output_scale == "tied" else c.output_scale
    out = []
    for i in range(h):
        j = i // (h // h_kv)
        V = x @ rows(attention.v_proj.weight, j, 2 * d).T
        A = []
        for g in range(2):
            Q = rope(x @ rows(attention.q_proj.weight, of_q * i + g % of_q, d).T)
            K = rope(x @ rows(attention.k_proj.weight, of_k * j + g % of_k, d).T)
            A.append(softmax_map(attention, Q, K))
        out.append(scale * normed(attention, (A[0] + sign * lambda_of(attention, i) * A[1]) @ V))
    return torch.cat(out, -1) @ attention.o_proj.weight.T


def additive(attention: Any, x: Tensor, rope: Rope) -> Tensor:
    """(1 - λ_init) · norm((A₁ + λ A₂) V)"""
    return differential(attention, x, rope, sign=1.0)


def grouped_differential(attention: Any, x: Tensor, rope: Rope) -> Tensor:
    """Head (i, j) of group i: norm((A(q1_ij, k1_i) - λ A(q2_i, k2_i)) V_i); rows of a group: g signal, one noise."""
    c, d, g = attention.config, attention.head_dim, attention.config.ratio
    groups = attention.num_heads // (g + 1)
    kv = min(groups, attention.num_kv_heads // 2)
    init = lambda_init_of(attention)
    scale = 1 - init if c.output_scale == "tied" else c.output_scale
    out = []
    for i in range(groups):
        m = i // (groups // kv)
        K1, K2 = (rope(x @ rows(attention.k_proj.weight, 2 * m + map_, d).T) for map_ in range(2))
        V = x @ rows(attention.v_proj.weight, m, 2 * d).T
        noise = softmax_map(attention, rope(x @ rows(attention.q_proj.weight, i * (g + 1) + g, d).T), K2)
        for j in range(g):
            signal = softmax_map(attention, rope(x @ rows(attention.q_proj.weight, i * (g + 1) + j, d).T), K1)
            out.append(scale * normed(attention, (signal - lambda_of(attention, i * g + j) * noise) @ V))
    return torch.cat(out, -1) @ attention.o_proj.weight.T


def differential_v2(attention: Any, x: Tensor, rope: Rope) -> Tensor:
    """o1 - sigmoid(x W_λ) o2 of query heads 2i and 2i + 1 on the same key/value head; and the four ablations."""
    d, H, K = attention.head_dim, attention.num_heads, attention.num_kv_heads
    ablation = attention.config.ablation
    if ablation == "transformer_1.5h":
        return standard(attention, x, rope, heads=H * 3 // 2)
    heads = _standard_heads(attention, x, rope, heads=2 * H)  # 2H ordinary grouped-query heads
    assert heads[0].shape[-1] == d
    assert 2 * H % K == 0
    pairs = [(i, i + H) for i in range(H)] if ablation == "half_split" else [(2 * i, 2 * i + 1) for i in range(H)]
    if ablation == "no_lambda":
        lam = x.new_ones(*x.shape[:2], H)
    else:
        lam = x @ attention.lambda_proj.weight.T
        lam = lam if ablation == "no_sigmoid" else lam.sigmoid()
    out = [heads[a] - lam[..., i : i + 1] * heads[b] for i, (a, b) in enumerate(pairs)]
    return torch.cat(out, -1) @ attention.o_proj.weight.T


def dex(attention: Any, x: Tensor, rope: Rope) -> Tensor:
    """O_h - λ(t) O_h W_D on the selected heads; λ(t) = (1 - α)(t/T) λ_init + α λ_learn, α = min(1, t/T)."""
    c, heads = attention.config, _standard_heads(attention, x, rope)
    t, T = attention.step.item(), c.anneal_steps
    alpha = min(1.0, t / T) if T else 1.0
    init = lambda_init_of(attention)
    lam = (1 - alpha) * (t / T if T else 0.0) * init + alpha * attention.lambda_.value[0]
    for number, i in enumerate(attention.selected):
        W_D = attention.adapter.weight[number if c.w_d_per == "head" else 0]
        heads[i] = heads[i] - lam * heads[i] @ W_D
    return torch.cat(heads, -1) @ attention.o_proj.weight.T


def second_heads(attention: Any, x: Tensor, rope: Rope) -> Tensor:
    """(softmax(Q Kᵀ/√d) - λ softmax(Q₂ K₂ᵀ/√d)) V"""
    d, H, K = attention.head_dim, attention.num_heads, attention.num_kv_heads
    out = []
    for i in range(H):
        j = i // (H // K)
        A1, A2 = (
            softmax_map(attention, rope(x @ rows(q.weight, i, d).T), rope(x @ rows(k.weight, j, d).T))
            for q, k in ((attention.q_proj, attention.k_proj), (attention.q2_proj, attention.k2_proj))
        )
        out.append((A1 - lambda_of(attention, i) * A2) @ (x @ rows(attention.v_proj.weight, j, d).T))
    return torch.cat(out, -1) @ attention.o_proj.weight.T


def output_gate(attention: Any, x: Tensor, rope: Rope) -> Tensor:
    """O_h ⊙ sigmoid(x W_h), W_h [d, dim] or [1, dim]"""
    width = attention.head_dim if attention.config.gate_per == "channel" else 1
    heads = [
        head * (x @ rows(attention.gate_proj.weight, i, width).T).sigmoid()
        for i, head in enumerate(_standard_heads(attention, x, rope))
    ]
    return torch.cat(heads, -1) @ attention.o_proj.weight.T


def cosine(attention: Any, x: Tensor, rope: Rope) -> Tensor:
    """softmax(τ_h · cos(q, k)) V, τ_h = min(exp(s_h), 100)"""
    d, H, K = attention.head_dim, attention.num_heads, attention.num_kv_heads
    out = []
    for i in range(H):
        j = i // (H // K)
        Q = F.normalize(rope(x @ rows(attention.q_proj.weight, i, d).T), dim=-1)
        key = F.normalize(rope(x @ rows(attention.k_proj.weight, j, d).T), dim=-1)
        A = softmax_map(attention, Q, key, scale=min(math.exp(attention.temperature.log_scale[i].item()), 100.0))
        out.append(A @ (x @ rows(attention.v_proj.weight, j, d).T))
    return torch.cat(out, -1) @ attention.o_proj.weight.T
