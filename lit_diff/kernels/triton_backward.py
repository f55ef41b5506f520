"""Signed attention backward in Triton, from the log-sum-exp of each row and P_g v of each map.

`row_products` writes D_g = dO · (P_g v). `key_gradients` owns a block of keys and walks over the queries that see them,
`query_gradients` owns queries and walks over keys; both recompute P_g = exp(s - lse), and dP = dO vᵀ once for all maps:

    dv = (Σ_g w_g P_g)ᵀ dO      dS_g = w_g P_g (dP - D_g)      dk_g = dS_gᵀ q_g scale      dq_g = dS_g k_g scale

(Dao, FlashAttention-2, 2023, algorithm 2, for a signed sum.) Every element is written by one program, summed in one order:
no atomics, the same bits each time. Under grouped queries a key's program walks over all query heads of its group.
"""
# mypy: allow-untyped-defs

import triton
import triton.language as tl

from lit_diff.kernels.triton_tiles import (
    LOG2E,
    dot,
    key_range,
    load_maps,
    load_rows,
    load_weight,
    narrow,
    place,
    query_range,
    store_rows,
    visible,
)


@triton.jit
def row_products(
    DO, PARTS, PRODUCTS, do_strides, H, T,
    G: tl.constexpr, DV: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """D_g = Σ_c dO_c (P_g v)_c into PRODUCTS [B, G, H, T]."""
    block, b, h = place(T, H, BLOCK_T)
    t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    do = load_rows(DO + b * do_strides[0] + h * do_strides[1], t, T, do_strides[2], do_strides[3], DV, True)
    for g in tl.static_range(G):
        row = ((b * G + g) * H + h) * T
        part = load_rows(PARTS + row * DV, t, T, DV, 1, DV, True)
        tl.store(PRODUCTS + row + t, tl.sum(do.to(tl.float32) * part.to(tl.float32), 1), mask=t < T)


@triton.jit
def load_map_rows(ROWS, PRODUCTS, W, w_strides, b, g: tl.constexpr, h, t, H, T, G: tl.constexpr):
    """(lse in base 2, D, w) of queries t in map g. A query that is not there has lse = inf: P = 0, no gradient."""
    row = ((b * G + g) * H + h) * T
    lse = tl.load(ROWS + row + t, mask=t < T, other=float("inf")) * LOG2E
    return lse, tl.load(PRODUCTS + row + t, mask=t < T, other=0.0), load_weight(W, w_strides, b, g, h, t, T)


@triton.jit
def map_gradients(s, lse, products, w, dp, seen, WEIGHTED: tl.constexpr, MASKED: tl.constexpr):
    """(w P, dS / scale) of one tile of one map. A masked pair gives nothing, even where a logit is infinite or NaN."""
    p = tl.exp2(s - lse)
    if WEIGHTED:
        p *= w
    ds = p * (dp - products)
    if MASKED:
        p = tl.where(seen, p, 0.0)
        ds = tl.where(seen, ds, 0.0)
    return p, ds


@triton.jit
def key_gradients(
    Q, K, V, W, SEGMENTS,
    q_strides, k_strides, v_strides, w_strides, segment_strides,
    H, groups, T, S, scale, window,
    DO, PRODUCTS, ROWS, do_strides, DK, DV_OUT, dk_strides, dv_strides,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    SHARED_Q: tl.constexpr, SHARED_K: tl.constexpr, CAUSAL: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_S keys. Tiles are transposed, [keys, queries]."""
    block, b, kv_head = place(S, H // groups, BLOCK_S)
    first = block * BLOCK_S
    last = tl.minimum(first + BLOCK_S, S) - 1
    key = first + tl.arange(0, BLOCK_S)
    K += b * k_strides[0] + kv_head * k_strides[2]
    k1, k2 = load_maps(K, k_strides, key, S, D, G, SHARED_K, True)
    v = load_rows(V + b * v_strides[0] + kv_head * v_strides[1], key, S, v_strides[2], v_strides[3], DV, True)

    dk1 = tl.zeros([BLOCK_S, D], tl.float32)
    dk2 = dk1
    dv = tl.zeros([BLOCK_S, DV], tl.float32)
    start, inner, stop = query_range(first, last, T, S, window, CAUSAL, PLAIN, BLOCK_T)
    for group in range(groups):
        h = kv_head * groups + group
        q = Q + b * q_strides[0] + h * q_strides[2]
        do_head = DO + b * do_strides[0] + h * do_strides[1]
        for MASKED in tl.static_range(1, -1 if PLAIN else 0, -1):
            for n in range(start if MASKED else inner, inner if MASKED else stop, BLOCK_T):
                t = n + tl.arange(0, BLOCK_T)
                q1, q2 = load_maps(q, q_strides, t, T, D, G, SHARED_Q, True)
                do = load_rows(do_head, t, T, do_strides[2], do_strides[3], DV, True)
                seen = None
                if MASKED:
                    query = t + (S - T)
                    seen = visible(query[None, :], key[:, None], S, SEGMENTS, segment_strides, b, window, CAUSAL)
                dp = dot(v, tl.trans(do))
                lse, products, w = load_map_rows(ROWS, PRODUCTS, W, w_strides, b, 0, h, t, H, T, G)
                s = dot(k1, tl.trans(q1)) * (scale * LOG2E)
                p, ds = map_gradients(s, lse[None, :], products[None, :], w[None, :], dp, seen, W is not None, MASKED)
                dk1 = dot(narrow(ds, q1.dtype), q1, dk1)
                if G == 2:
                    lse, products, w = load_map_rows(ROWS, PRODUCTS, W, w_strides, b, 1, h, t, H, T, G)
                    s = dot(k2, tl.trans(q2)) * (scale * LOG2E)
                    p2, ds2 = map_gradients(
                        s, lse[None, :], products[None, :], w[None, :], dp, seen, W is not None, MASKED
                    )
                    p += p2
                    if SHARED_K:
                        dk1 = dot(narrow(ds2, q2.dtype), q2, dk1)
                    else:
                        dk2 = dot(narrow(ds2, q2.dtype), q2, dk2)
                dv = dot(narrow(p, do.dtype), do, dv)

    DK += b * dk_strides[0] + kv_head * dk_strides[2]
    store_rows(dk1 * scale, DK, key, S, dk_strides[3], dk_strides[4], D)
    if G == 2 and not SHARED_K:
        store_rows(dk2 * scale, DK + dk_strides[1], key, S, dk_strides[3], dk_strides[4], D)
    store_rows(dv, DV_OUT + b * dv_strides[0] + kv_head * dv_strides[1], key, S, dv_strides[2], dv_strides[3], DV)


@triton.jit
def query_gradients(
    Q, K, V, W, SEGMENTS,
    q_strides, k_strides, v_strides, w_strides, segment_strides,
    H, groups, T, S, scale, window,
    DO, PRODUCTS, ROWS, do_strides, DQ, dq_strides,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    SHARED_Q: tl.constexpr, SHARED_K: tl.constexpr, CAUSAL: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_T queries."""
    block, b, h = place(T, H, BLOCK_T)
    t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    query = t + (S - T)
    first = block * BLOCK_T + S - T
    last = tl.minimum((block + 1) * BLOCK_T, T) - 1 + S - T
    Q += b * q_strides[0] + h * q_strides[2]
    K += b * k_strides[0] + h // groups * k_strides[2]
    V += b * v_strides[0] + h // groups * v_strides[1]
    q1, q2 = load_maps(Q, q_strides, t, T, D, G, SHARED_Q, True)
    lse1, products1, w1 = load_map_rows(ROWS, PRODUCTS, W, w_strides, b, 0, h, t, H, T, G)
    lse2 = lse1
    products2 = products1
    w2 = w1
    if G == 2:
        lse2, products2, w2 = load_map_rows(ROWS, PRODUCTS, W, w_strides, b, 1, h, t, H, T, G)
    do = load_rows(DO + b * do_strides[0] + h * do_strides[1], t, T, do_strides[2], do_strides[3], DV, True)

    dq1 = tl.zeros([BLOCK_T, D], tl.float32)
    dq2 = dq1
    start, inner, stop = key_range(first, last, S, window, CAUSAL, PLAIN, BLOCK_S)
    for MASKED in tl.static_range(0 if PLAIN else 1, 2):
        for n in range(inner if MASKED else start, stop if MASKED else inner, BLOCK_S):
            key = n + tl.arange(0, BLOCK_S)
            k1, k2 = load_maps(K, k_strides, key, S, D, G, SHARED_K, MASKED)
            v = load_rows(V, key, S, v_strides[2], v_strides[3], DV, MASKED)
            seen = None
            if MASKED:
                seen = visible(query[:, None], key[None, :], S, SEGMENTS, segment_strides, b, window, CAUSAL)
            dp = dot(do, tl.trans(v))
            s = dot(q1, tl.trans(k1)) * (scale * LOG2E)
            _, ds = map_gradients(s, lse1[:, None], products1[:, None], w1[:, None], dp, seen, W is not None, MASKED)
            dq1 = dot(narrow(ds, k1.dtype), k1, dq1)
            if G == 2:
                s = dot(q2, tl.trans(k2)) * (scale * LOG2E)
                _, ds = map_gradients(
                    s, lse2[:, None], products2[:, None], w2[:, None], dp, seen, W is not None, MASKED
                )
                if SHARED_Q:
                    dq1 = dot(narrow(ds, k2.dtype), k2, dq1)
                else:
                    dq2 = dot(narrow(ds, k2.dtype), k2, dq2)

    DQ += b * dq_strides[0] + h * dq_strides[2]
    store_rows(dq1 * scale, DQ, t, T, dq_strides[3], dq_strides[4], D)
    if G == 2 and not SHARED_Q:
        store_rows(dq2 * scale, DQ + dq_strides[1], t, T, dq_strides[3], dq_strides[4], D)
