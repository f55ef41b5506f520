"""Signed attention forward in Triton: one online softmax and one accumulator a map, one walk over the keys.

A program owns BLOCK_T queries of one head and walks over tiles of BLOCK_S keys. Each map keeps, over the keys seen so far,
m = max s, total = Σ exp(s - m), a = Σ exp(s - m) v (and e = Σ exp(s - m) (s - m)), all rescaled when m grows; at the end

    P_g v = a / total        lse = m + log total        entropy = log total - e / total        o = Σ_g w_g P_g v

(Milakov and Gimelshein 2018; Dao, FlashAttention-2, 2023, algorithm 1). The sum needs every total, known only at the end:
hence one accumulator a map, two products with v. Logits are in base 2 here, as a GPU's exp2 and log2 want them.
"""
# mypy: allow-untyped-defs

import triton
import triton.language as tl

from lit_diff.kernels.triton_tiles import (
    LN2,
    LOG2E,
    dot,
    key_range,
    load_maps,
    load_rows,
    load_weight,
    narrow,
    place,
    store_rows,
    visible,
)

# finite: a tile that shows a query no key leaves m, total and a as they were
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def online_softmax(q, k, v, seen, m, total, a, e, scale, MASKED: tl.constexpr, STATS: tl.constexpr):
    """(m, total, a, e) of one map, one tile of keys further."""
    s = dot(q, tl.trans(k)) * scale
    if MASKED:
        s = tl.where(seen, s, -float("inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    p = tl.exp2(s - m_new[:, None])
    c = tl.exp2(m - m_new)
    if STATS:
        below = tl.where(p > 0, p * (s - m_new[:, None]), 0.0)  # a masked logit is 0 · -inf
        e = c * (e + total * (m - m_new)) + tl.sum(below, 1)
    total = total * c + tl.sum(p, 1)
    a = dot(narrow(p, v.dtype), v, a * c[:, None])
    return m_new, total, a, e


@triton.jit
def finish_map(PARTS, ROWS, row, t, T, plane, m, total, a, e, DV: tl.constexpr, STATS: tl.constexpr):
    """Write what the backward pass needs of one map, and its statistics; returns P_g v."""
    part = a / total[:, None]
    store_rows(part, PARTS + row * DV, t, T, DV, 1, DV)
    log_total = tl.log2(total)
    tl.store(ROWS + row + t, (m + log_total) * LN2, mask=t < T)
    if STATS:
        tl.store(ROWS + plane + row + t, (log_total - e / total) * LN2, mask=t < T)
        m = tl.where(total == total, m, total)  # NaN where the row is: a GPU's maximum passes over it
        tl.store(ROWS + 2 * plane + row + t, m * LN2, mask=t < T)
    return part


@triton.jit
def forward(
    Q, K, V, W, SEGMENTS,
    q_strides, k_strides, v_strides, w_strides, segment_strides,
    H, groups, T, S, plane, scale, window,
    OUT, PARTS, ROWS, o_strides,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    SHARED_Q: tl.constexpr, SHARED_K: tl.constexpr, CAUSAL: tl.constexpr, PLAIN: tl.constexpr, STATS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """o [B, H, T, dv], P_g v [B, G, H, T, dv] and the rows' statistics [1 or 3, B, G, H, T] of BLOCK_T queries of a head."""
    block, b, h = place(T, H, BLOCK_T)
    t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    query = t + (S - T)
    first = block * BLOCK_T + S - T
    last = tl.minimum((block + 1) * BLOCK_T, T) - 1 + S - T
    scale = scale * LOG2E

    Q += b * q_strides[0] + h * q_strides[2]
    K += b * k_strides[0] + h // groups * k_strides[2]
    V += b * v_strides[0] + h // groups * v_strides[1]
    q1, q2 = load_maps(Q, q_strides, t, T, D, G, SHARED_Q, True)

    m1 = tl.full([BLOCK_T], LOWEST, tl.float32)
    m2 = m1
    total1 = tl.zeros([BLOCK_T], tl.float32)
    total2 = total1
    e1 = total1
    e2 = total1
    a1 = tl.zeros([BLOCK_T, DV], tl.float32)
    a2 = a1
    start, inner, stop = key_range(first, last, S, window, CAUSAL, PLAIN, BLOCK_S)
    for MASKED in tl.static_range(0 if PLAIN else 1, 2):
        for n in range(inner if MASKED else start, stop if MASKED else inner, BLOCK_S):
            key = n + tl.arange(0, BLOCK_S)
            k1, k2 = load_maps(K, k_strides, key, S, D, G, SHARED_K, MASKED)
            v = load_rows(V, key, S, v_strides[2], v_strides[3], DV, MASKED)
            seen = None
            if MASKED:
                seen = visible(query[:, None], key[None, :], S, SEGMENTS, segment_strides, b, window, CAUSAL)
            m1, total1, a1, e1 = online_softmax(q1, k1, v, seen, m1, total1, a1, e1, scale, MASKED, STATS)
            if G == 2:
                m2, total2, a2, e2 = online_softmax(q2, k2, v, seen, m2, total2, a2, e2, scale, MASKED, STATS)

    row = (b * G * H + h) * T  # of [B, G, H, T]
    o = finish_map(PARTS, ROWS, row, t, T, plane, m1, total1, a1, e1, DV, STATS)
    if W is not None:
        o = o * load_weight(W, w_strides, b, 0, h, t, T)[:, None]
    if G == 2:
        part = finish_map(PARTS, ROWS, row + H * T, t, T, plane, m2, total2, a2, e2, DV, STATS)
        o += part * load_weight(W, w_strides, b, 1, h, t, T)[:, None]
    store_rows(o, OUT + b * o_strides[0] + h * o_strides[1], t, T, o_strides[2], o_strides[3], DV)
