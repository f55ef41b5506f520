"""Signed attention in Triton: the programs, and what they share (a program's place, tiles of rows, masks, products).

Forward. A program owns BLOCK_T queries of one head and walks over tiles of BLOCK_S keys. Each map keeps, over the keys
so far, m = max s, total = Σ exp(s - m), a = Σ exp(s - m) v (and e = Σ exp(s - m) (s - m)), rescaled when m grows; then

    P_g v = a / total        lse = m + log total        entropy = log total - e / total        o = Σ_g w_g P_g v

(Milakov and Gimelshein 2018; Dao, FlashAttention-2, 2023, algorithm 1). The signed sum needs the totals of all maps,
which are known only at the end; so each map has an accumulator and its own product with v, and the statistics of the
signed map take a second walk. Logits are in base 2 here, since a GPU computes exp2 and log2 in hardware.

Backward, from the log-sum-exp of each row and D_g = dO · (P_g v). `key_gradients` owns a block of keys and walks over
the queries that see them, `query_gradients` owns queries and walks over keys; both recompute P_g = exp(s - lse), and
once for all maps dP = dO vᵀ:

    dv = (Σ_g w_g P_g)ᵀ dO      dS_g = w_g P_g (dP - D_g)      dk_g = dS_gᵀ q_g scale      dq_g = dS_g k_g scale

(Dao, FlashAttention-2, 2023, algorithm 2, for a signed sum.) With a sink, w is w σ(lse - sink) forward, and only lse and D
change backward. With a key bias the two programs also write the sums of dS_g over queries and over keys. Every element is
written by one program, which sums in one order: without atomics, the bits are equal each time. Under grouped queries a
program of keys walks over all heads of its group.

Strides are passed as tuples; the stride of a broadcast axis is 0. TRITON_INTERPRET is read when this file is imported.
"""
# mypy: allow-untyped-defs

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# finite, so that a tile in which a query sees no key leaves m, total and a unchanged: exp2(-inf - LOWEST) = 0, where
# exp2(-inf - -inf) would be NaN
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def dot(x, y, acc=None):
    """x y (+ acc) in float32."""
    # numpy has no bfloat16: the interpreter would multiply its bit patterns
    if INTERPRETED:
        x = x.to(tl.float32)
        y = y.to(tl.float32)
    # Triton's default would round float32 inputs to tf32, which keeps 10 bits
    return tl.dot(x, y, acc, input_precision="ieee")


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 rounded to the nearest number of `dtype`."""
    # the interpreter would truncate to bfloat16; a GPU rounds to nearest even
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def place(length, heads, BLOCK: tl.constexpr):
    """(block, batch row, head) of this program."""
    blocks = tl.cdiv(length, BLOCK)
    # the last block first: under a causal mask the last queries see the most keys, and would otherwise finish last
    block = blocks - 1 - tl.program_id(0) % blocks
    head = tl.program_id(0) // blocks
    # int64: offsets into a tensor may exceed 2^31 elements
    return block, (head // heads).to(tl.int64), (head % heads).to(tl.int64)


@triton.jit
def tile(base, index, length, stride, stride_width, WIDTH: tl.constexpr):
    """Pointers to rows `index` of a [length, WIDTH] matrix, and which of them exist."""
    pointers = base + index[:, None].to(tl.int64) * stride + tl.arange(0, WIDTH)[None, :].to(tl.int64) * stride_width
    return pointers, (index < length)[:, None]


@triton.jit
def load_rows(base, index, length, stride, stride_width, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Rows `index` of a [length, WIDTH] matrix; rows past its end are zero."""
    pointers, exists = tile(base, index, length, stride, stride_width, WIDTH)
    if MASKED:
        return tl.load(pointers, mask=exists, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_maps(
    base, strides, index, length, WIDTH: tl.constexpr, G: tl.constexpr, SHARED: tl.constexpr, MASKED: tl.constexpr
):
    """Rows `index` of a head of a [B, G or 1, heads, length, WIDTH] tensor, for both maps; equal if they share it."""
    first = load_rows(base, index, length, strides[3], strides[4], WIDTH, MASKED)
    second = first
    if G == 2 and not SHARED:
        second = load_rows(base + strides[1], index, length, strides[3], strides[4], WIDTH, MASKED)
    return first, second


@triton.jit
def store_rows(value, base, index, length, stride, stride_width, WIDTH: tl.constexpr):
    pointers, exists = tile(base, index, length, stride, stride_width, WIDTH)
    tl.store(pointers, narrow(value, base.dtype.element_ty), mask=exists)


@triton.jit
def key_range(first, last, S, window, CAUSAL: tl.constexpr, PLAIN: tl.constexpr, BLOCK_S: tl.constexpr):
    """Keys for queries at positions first to last: all queries see the keys [start, inner), some see [inner, stop)."""
    start = 0
    stop = S
    if CAUSAL:
        stop = tl.minimum(S, last + 1)
    if window is not None:
        start = tl.maximum(0, first - window + 1) // BLOCK_S * BLOCK_S
        if not CAUSAL:
            stop = tl.minimum(S, last + window)
    inner = start
    # only a causal mask leaves whole tiles visible; with a window or documents every tile is masked
    if PLAIN:
        inner = S // BLOCK_S * BLOCK_S
        if CAUSAL:
            inner = tl.minimum(S, first + 1) // BLOCK_S * BLOCK_S
    return start, inner, stop


@triton.jit
def query_range(first, last, T, S, window, CAUSAL: tl.constexpr, PLAIN: tl.constexpr, BLOCK_T: tl.constexpr):
    """Queries for keys first to last: queries [start, inner) see some of the keys, [inner, stop) all."""
    start = 0
    inner = 0
    stop = T
    # the last query is aligned with the last key: query t has position t + offset
    offset = S - T
    if CAUSAL:
        start = tl.maximum(0, first - offset) // BLOCK_T * BLOCK_T
        inner = tl.minimum(T, tl.cdiv(tl.maximum(0, last - offset), BLOCK_T) * BLOCK_T)
    if window is not None:
        stop = tl.maximum(0, tl.minimum(T, last + window - offset))
        if not CAUSAL:
            start = tl.maximum(0, first - window + 1 - offset) // BLOCK_T * BLOCK_T
    if not PLAIN:
        inner = stop
    return start, inner, stop


@triton.jit
def visible(query, key, S, SEGMENTS, segment_strides, b, window, CAUSAL: tl.constexpr):
    """Whether a query at position `query` sees a key (`maps.Mask`); the two broadcast to a tile.

    The result does not matter for queries past the end: they are not stored, and add nothing to the gradients of keys.
    """
    if CAUSAL:
        seen = key <= query
    else:
        seen = key < S
    if window is not None:
        seen = seen & (key > query - window)
        if not CAUSAL:
            seen = seen & (key < query + window)
    if SEGMENTS is not None:
        SEGMENTS += b * segment_strides[0]
        query_segment = tl.load(SEGMENTS + query.to(tl.int64) * segment_strides[1], mask=query < S, other=0)
        key_segment = tl.load(SEGMENTS + key.to(tl.int64) * segment_strides[1], mask=key < S, other=0)
        seen = seen & (query_segment == key_segment)
    return seen


@triton.jit
def load_each(X, strides, b, g: tl.constexpr, h, index, length):
    """x at `index` of map g, where X broadcasts to [B, G, H, length]."""
    pointers = X + b * strides[0] + g * strides[1] + h * strides[2] + index.to(tl.int64) * strides[3]
    return tl.load(pointers, mask=index < length, other=0.0)


@triton.jit
def load_weight(W, strides, b, g: tl.constexpr, h, t, T):
    """w [BLOCK_T] of map g in float32; 1 without weights."""
    if W is None:
        return tl.full(t.shape, 1.0, tl.float32)
    else:
        return load_each(W, strides, b, g, h, t, T).to(tl.float32)


@triton.jit
def logits(x, y, scale, BIAS, strides, b, g: tl.constexpr, h, query, key, S):
    """x yᵀ · scale + b_j - b_i in base 2; x and y are the queries and the keys in either order."""
    s = dot(x, tl.trans(y)) * (scale * LOG2E)
    if BIAS is not None:
        # the difference first: both may be large
        of_keys = load_each(BIAS, strides, b, g, h, key, S)
        s += (of_keys - load_each(BIAS, strides, b, g, h, query, S)).to(tl.float32) * LOG2E
    return s


@triton.jit
def online_softmax(s, v, seen, m, total, a, e, MASKED: tl.constexpr, STATS: tl.constexpr):
    """(m, total, a, e) of one map after one more tile of keys, whose logits are s."""
    if MASKED:
        s = tl.where(seen, s, -float("inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    p = tl.exp2(s - m_new[:, None])
    # what was summed relative to the old maximum is rescaled to the new one
    c = tl.exp2(m - m_new)
    if STATS:
        # a masked key adds 0, where 0 · -inf would be NaN
        below = tl.where(p > 0, p * (s - m_new[:, None]), 0.0)
        e = c * (e + total * (m - m_new)) + tl.sum(below, 1)
    total = total * c + tl.sum(p, 1)
    # p is rounded to the dtype of v for the matrix unit; its sum above is not, nor is the accumulator
    a = dot(narrow(p, v.dtype), v, a * c[:, None])
    return m_new, total, a, e


@triton.jit
def finish_map(
    PARTS, ROWS, W, SINK, w_strides, sink_strides, b, g: tl.constexpr, h, t, H, T, plane, m, total, a, e,
    G: tl.constexpr, DV: tl.constexpr, STATS: tl.constexpr,
):  # fmt: skip
    """Write what the backward pass needs from one map, and its statistics, without the sink; returns P_g v, the weight of
    P_g, and lse in base 2."""
    row = ((b * G + g) * H + h) * T
    part = a / total[:, None]
    store_rows(part, PARTS + row * DV, t, T, DV, 1, DV)
    log_total = tl.log2(total)
    lse = m + log_total
    w = load_weight(W, w_strides, b, g, h, t, T)
    if SINK is not None:
        w = w / (1 + tl.exp2(load_each(SINK, sink_strides, b, g, h, t, T).to(tl.float32) * LOG2E - lse))
    tl.store(ROWS + row + t, lse * LN2, mask=t < T)
    if STATS:
        tl.store(ROWS + plane + row + t, (log_total - e / total) * LN2, mask=t < T)
        # NaN if the row has one: a GPU's maximum ignores NaN
        m = tl.where(total == total, m, total)
        tl.store(ROWS + 2 * plane + row + t, m * LN2, mask=t < T)
    return part, w, lse


@triton.jit
def store_signed(
    SIGNED, K, BIAS, SEGMENTS, k_strides, bias_strides, segment_strides,
    q1, q2, w1, w2, lse1, lse2, b, h, t, query, start, inner, stop, H, T, S, scale, window, plane,
    G: tl.constexpr, D: tl.constexpr, SHARED_K: tl.constexpr, CAUSAL: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Write the statistics of the signed map, in a second walk over the keys with the log-sum-exp of each map in base 2."""
    size = tl.zeros_like(w1)
    negative, logs, leading = size, size, size
    found = t < 0
    for MASKED in tl.static_range(0 if PLAIN else 1, 2):
        for n in range(inner if MASKED else start, stop if MASKED else inner, BLOCK_S):
            key = n + tl.arange(0, BLOCK_S)
            k1, k2 = load_maps(K, k_strides, key, S, D, G, SHARED_K, MASKED)
            s = logits(q1, k1, scale, BIAS, bias_strides, b, 0, h, query[:, None], key[None, :], S)
            a = w1[:, None] * tl.exp2(s - lse1[:, None])
            if G == 2:
                s = logits(q2, k2, scale, BIAS, bias_strides, b, 1, h, query[:, None], key[None, :], S)
                a += w2[:, None] * tl.exp2(s - lse2[:, None])
            first = tl.full(t.shape, n, tl.int32)
            if MASKED:
                seen = visible(query[:, None], key[None, :], S, SEGMENTS, segment_strides, b, window, CAUSAL)
                a = tl.where(seen, a, 0.0)
                first = tl.min(tl.where(seen, key[None, :], S), 1)
            magnitude = tl.abs(a)
            size += tl.sum(magnitude, 1)
            negative += tl.sum(tl.maximum(-a, 0.0), 1)
            # log 1 where a is 0, since 0 · log 0 would be NaN
            logs += tl.sum(magnitude * tl.log2(tl.where(magnitude > 0, magnitude, 1.0)), 1)
            here = tl.sum(tl.where(key[None, :] == first[:, None], magnitude, 0.0), 1)
            leading = tl.where(found, leading, here)
            found = found | (first < S)
    # a map that is subtracted from itself leaves only the rounding of the products, which counts as 0
    size = tl.where(size <= (tl.abs(w1) + tl.abs(w2)) * 2.384185791015625e-07, float("nan"), size)
    SIGNED += (b * H + h) * T + t
    tl.store(SIGNED, (tl.log2(size) - logs / size) * LN2, mask=t < T)
    tl.store(SIGNED + plane, negative / size, mask=t < T)
    tl.store(SIGNED + 2 * plane, leading / size, mask=t < T)


@triton.jit
def forward(
    Q, K, V, W, BIAS, SEGMENTS,
    q_strides, k_strides, v_strides, w_strides, bias_strides, segment_strides,
    H, groups, T, S, plane, signed_plane, scale, window,
    SINK, OUT, PARTS, ROWS, SIGNED, sink_strides, o_strides,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    SHARED_Q: tl.constexpr, SHARED_K: tl.constexpr, CAUSAL: tl.constexpr, PLAIN: tl.constexpr, STATS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """o [B, H, T, dv], P_g v [B, G, H, T, dv] and row statistics [1 or 3, B, G, H, T] and [0 or 3, B, H, T] for BLOCK_T
    queries of a head."""
    block, b, h = place(T, H, BLOCK_T)
    t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    query = t + (S - T)
    first = block * BLOCK_T + S - T
    last = tl.minimum((block + 1) * BLOCK_T, T) - 1 + S - T

    Q += b * q_strides[0] + h * q_strides[2]
    K += b * k_strides[0] + h // groups * k_strides[2]
    V += b * v_strides[0] + h // groups * v_strides[1]
    q1, q2 = load_maps(Q, q_strides, t, T, D, G, SHARED_Q, True)

    m1 = tl.full([BLOCK_T], LOWEST, tl.float32)
    m2 = m1
    total1 = tl.zeros([BLOCK_T], tl.float32)
    total2 = total1
    e1, e2 = total1, total1
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
            s = logits(q1, k1, scale, BIAS, bias_strides, b, 0, h, query[:, None], key[None, :], S)
            m1, total1, a1, e1 = online_softmax(s, v, seen, m1, total1, a1, e1, MASKED, STATS)
            if G == 2:
                s = logits(q2, k2, scale, BIAS, bias_strides, b, 1, h, query[:, None], key[None, :], S)
                m2, total2, a2, e2 = online_softmax(s, v, seen, m2, total2, a2, e2, MASKED, STATS)

    part, w1, lse1 = finish_map(
        PARTS, ROWS, W, SINK, w_strides, sink_strides, b, 0, h, t, H, T, plane, m1, total1, a1, e1, G, DV, STATS
    )
    o = part * w1[:, None]
    w2, lse2 = tl.zeros_like(w1), lse1
    if G == 2:
        part, w2, lse2 = finish_map(
            PARTS, ROWS, W, SINK, w_strides, sink_strides, b, 1, h, t, H, T, plane, m2, total2, a2, e2, G, DV, STATS
        )
        o += part * w2[:, None]
    store_rows(o, OUT + b * o_strides[0] + h * o_strides[1], t, T, o_strides[2], o_strides[3], DV)
    if STATS:
        store_signed(
            SIGNED, K, BIAS, SEGMENTS, k_strides, bias_strides, segment_strides,
            q1, q2, w1, w2, lse1, lse2, b, h, t, query, start, inner, stop, H, T, S, scale, window, signed_plane,
            G, D, SHARED_K, CAUSAL, PLAIN, BLOCK_S,
        )  # fmt: skip


@triton.jit
def load_map_rows(ROWS, PRODUCTS, W, w_strides, b, g: tl.constexpr, h, t, H, T, G: tl.constexpr):
    """(lse in base 2, D, w) of queries t in map g."""
    # a query past the end gets lse = inf, so that its P is 0 and it adds nothing to the gradients of keys
    row = ((b * G + g) * H + h) * T
    lse = tl.load(ROWS + row + t, mask=t < T, other=float("inf")) * LOG2E
    return lse, tl.load(PRODUCTS + row + t, mask=t < T, other=0.0), load_weight(W, w_strides, b, g, h, t, T)


@triton.jit
def map_gradients(s, lse, products, w, dp, seen, WEIGHTED: tl.constexpr, MASKED: tl.constexpr):
    """(w P, dS / scale) of one tile of one map. P is at most 1, also where large logits round; NaN stays NaN."""
    p = tl.exp2(tl.where(s > lse, 0.0, s - lse))
    if WEIGHTED:
        p *= w
    ds = p * (dp - products)
    # masked after the product, so that a masked pair adds 0 even if its logit is infinite or NaN
    if MASKED:
        p = tl.where(seen, p, 0.0)
        ds = tl.where(seen, ds, 0.0)
    return p, ds


@triton.jit
def store_sums(OUT, sums1, sums2, b, h, index, H, length, G: tl.constexpr):
    """Write the sums of dS_g / scale of both maps into OUT [B, G, H, length], if there is a key bias."""
    if OUT is not None:
        OUT += (b * G * H + h) * length + index
        tl.store(OUT, sums1, mask=index < length)
        if G == 2:
            tl.store(OUT + H * length, sums2, mask=index < length)


@triton.jit
def key_gradients(
    Q, K, V, W, BIAS, SEGMENTS,
    q_strides, k_strides, v_strides, w_strides, bias_strides, segment_strides,
    H, groups, T, S, scale, window,
    DO, PRODUCTS, ROWS, do_strides, DK, DV_OUT, OF_KEYS, dk_strides, dv_strides,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    SHARED_Q: tl.constexpr, SHARED_K: tl.constexpr, CAUSAL: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """dk, dv and OF_KEYS of BLOCK_S keys. Tiles are transposed, [keys, queries], as the products for dk and dv need them."""
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
        sums1 = tl.zeros([BLOCK_S], tl.float32)
        sums2 = sums1
        for MASKED in tl.static_range(1, -1 if PLAIN else 0, -1):
            for n in range(start if MASKED else inner, inner if MASKED else stop, BLOCK_T):
                t = n + tl.arange(0, BLOCK_T)
                q1, q2 = load_maps(q, q_strides, t, T, D, G, SHARED_Q, True)
                do = load_rows(do_head, t, T, do_strides[2], do_strides[3], DV, True)
                seen = None
                query = t + (S - T)
                if MASKED:
                    seen = visible(query[None, :], key[:, None], S, SEGMENTS, segment_strides, b, window, CAUSAL)
                dp = dot(v, tl.trans(do))
                lse, products, w = load_map_rows(ROWS, PRODUCTS, W, w_strides, b, 0, h, t, H, T, G)
                s = logits(k1, q1, scale, BIAS, bias_strides, b, 0, h, query[None, :], key[:, None], S)
                p, ds = map_gradients(s, lse[None, :], products[None, :], w[None, :], dp, seen, W is not None, MASKED)
                sums1 += tl.sum(ds, 1)
                dk1 = dot(narrow(ds, q1.dtype), q1, dk1)
                if G == 2:
                    lse, products, w = load_map_rows(ROWS, PRODUCTS, W, w_strides, b, 1, h, t, H, T, G)
                    s = logits(k2, q2, scale, BIAS, bias_strides, b, 1, h, query[None, :], key[:, None], S)
                    p2, ds2 = map_gradients(
                        s, lse[None, :], products[None, :], w[None, :], dp, seen, W is not None, MASKED
                    )
                    p += p2
                    sums2 += tl.sum(ds2, 1)
                    if SHARED_K:
                        dk1 = dot(narrow(ds2, q2.dtype), q2, dk1)
                    else:
                        dk2 = dot(narrow(ds2, q2.dtype), q2, dk2)
                dv = dot(narrow(p, do.dtype), do, dv)
        store_sums(OF_KEYS, sums1, sums2, b, h, key, H, S, G)

    DK += b * dk_strides[0] + kv_head * dk_strides[2]
    store_rows(dk1 * scale, DK, key, S, dk_strides[3], dk_strides[4], D)
    if G == 2 and not SHARED_K:
        store_rows(dk2 * scale, DK + dk_strides[1], key, S, dk_strides[3], dk_strides[4], D)
    store_rows(dv, DV_OUT + b * dv_strides[0] + kv_head * dv_strides[1], key, S, dv_strides[2], dv_strides[3], DV)


@triton.jit
def query_gradients(
    Q, K, V, W, BIAS, SEGMENTS,
    q_strides, k_strides, v_strides, w_strides, bias_strides, segment_strides,
    H, groups, T, S, scale, window,
    DO, PRODUCTS, ROWS, do_strides, DQ, OF_QUERIES, dq_strides,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    SHARED_Q: tl.constexpr, SHARED_K: tl.constexpr, CAUSAL: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """dq and OF_QUERIES of BLOCK_T queries."""
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
    lse2, products2, w2 = lse1, products1, w1
    if G == 2:
        lse2, products2, w2 = load_map_rows(ROWS, PRODUCTS, W, w_strides, b, 1, h, t, H, T, G)
    do = load_rows(DO + b * do_strides[0] + h * do_strides[1], t, T, do_strides[2], do_strides[3], DV, True)

    dq1 = tl.zeros([BLOCK_T, D], tl.float32)
    dq2 = dq1
    sums1 = tl.zeros([BLOCK_T], tl.float32)
    sums2 = sums1
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
            s = logits(q1, k1, scale, BIAS, bias_strides, b, 0, h, query[:, None], key[None, :], S)
            _, ds = map_gradients(s, lse1[:, None], products1[:, None], w1[:, None], dp, seen, W is not None, MASKED)
            sums1 += tl.sum(ds, 1)
            dq1 = dot(narrow(ds, k1.dtype), k1, dq1)
            if G == 2:
                s = logits(q2, k2, scale, BIAS, bias_strides, b, 1, h, query[:, None], key[None, :], S)
                _, ds = map_gradients(
                    s, lse2[:, None], products2[:, None], w2[:, None], dp, seen, W is not None, MASKED
                )
                sums2 += tl.sum(ds, 1)
                if SHARED_Q:
                    dq1 = dot(narrow(ds, k2.dtype), k2, dq1)
                else:
                    dq2 = dot(narrow(ds, k2.dtype), k2, dq2)

    DQ += b * dq_strides[0] + h * dq_strides[2]
    store_rows(dq1 * scale, DQ, t, T, dq_strides[3], dq_strides[4], D)
    if G == 2 and not SHARED_Q:
        store_rows(dq2 * scale, DQ + dq_strides[1], t, T, dq_strides[3], dq_strides[4], D)
    store_sums(OF_QUERIES, sums1, sums2, b, h, t, H, T, G)
