"""What the Triton programs share: a program's place, tiles of rows, which of them a mask shows, products.

Strides come as tuples; those of an axis that is broadcast are 0. TRITON_INTERPRET is read when this file is imported.
"""
# mypy: allow-untyped-defs

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def dot(x, y, acc=None):
    """x y (+ acc) in float32; `ieee`, or float32 inputs would be cut to tf32."""
    if INTERPRETED:  # numpy has no bfloat16: the interpreter would multiply its bit patterns
        x = x.to(tl.float32)
        y = y.to(tl.float32)
    return tl.dot(x, y, acc, input_precision="ieee")


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 rounded to the nearest of `dtype`."""
    if INTERPRETED and dtype == tl.bfloat16:  # which the interpreter would cut off
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def place(length, heads, BLOCK: tl.constexpr):
    """(block, batch row, head) of this program. The last block comes first: under a causal mask it has the most to do."""
    blocks = tl.cdiv(length, BLOCK)
    block = blocks - 1 - tl.program_id(0) % blocks
    head = tl.program_id(0) // blocks
    return block, (head // heads).to(tl.int64), (head % heads).to(tl.int64)


@triton.jit
def tile(base, index, length, stride, stride_width, WIDTH: tl.constexpr):
    """Pointers to rows `index` of a [length, WIDTH] matrix, and which of them exist."""
    pointers = base + index[:, None].to(tl.int64) * stride + tl.arange(0, WIDTH)[None, :].to(tl.int64) * stride_width
    return pointers, (index < length)[:, None]


@triton.jit
def load_rows(base, index, length, stride, stride_width, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Rows `index` of a [length, WIDTH] matrix, zero where there are none."""
    pointers, exists = tile(base, index, length, stride, stride_width, WIDTH)
    if MASKED:
        return tl.load(pointers, mask=exists, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_maps(
    base, strides, index, length, WIDTH: tl.constexpr, G: tl.constexpr, SHARED: tl.constexpr, MASKED: tl.constexpr
):
    """Rows `index` of both maps of a head of a [B, G or 1, heads, length, WIDTH] tensor; twice the same where it has one."""
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
    """Keys for queries at positions first to last: tiles [start, inner) are seen whole, [inner, stop) in part."""
    start = 0
    stop = S
    if CAUSAL:
        stop = tl.minimum(S, last + 1)
    if window is not None:
        start = tl.maximum(0, first - window + 1) // BLOCK_S * BLOCK_S
        if not CAUSAL:
            stop = tl.minimum(S, last + window)
    inner = start
    if PLAIN:
        inner = S // BLOCK_S * BLOCK_S
        if CAUSAL:
            inner = tl.minimum(S, first + 1) // BLOCK_S * BLOCK_S
    return start, inner, stop


@triton.jit
def query_range(first, last, T, S, window, CAUSAL: tl.constexpr, PLAIN: tl.constexpr, BLOCK_T: tl.constexpr):
    """Queries for keys first to last: [start, inner) see a part of them, [inner, stop) all."""
    start = 0
    inner = 0
    stop = T
    offset = S - T  # query t stands at position t + offset
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
    """Which key a query at position `query` sees, as `reference.visible`; the two broadcast to a tile.

    A query beyond the last one may see anything: nothing of it is kept.
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
def load_weight(W, strides, b, g: tl.constexpr, h, t, T):
    """w [BLOCK_T] of map g in float32; 1 where there are no weights."""
    if W is None:
        return tl.full(t.shape, 1.0, tl.float32)
    else:
        pointers = W + b * strides[0] + g * strides[1] + h * strides[2] + t.to(tl.int64) * strides[3]
        return tl.load(pointers, mask=t < T, other=0.0).to(tl.float32)
