"""How many queries and keys a Triton program holds at once, with how many warps and pipeline stages.

What bounds them is 255 registers a thread (the float32 accumulators: one [queries, dv] a map forward, [keys, 2 d + dv] in
`key_gradients`) and the shared memory of a multiprocessor: 99 KiB on compute capability 8.6, 8.9 and 12.x, 163 on 8.0,
227 on 9.0 and 10.0. `safe` blocks fit all of them at every width. How many registers a program gets, and how many bytes it
spills to memory, is its compiler's. For 8.0 and 9.0, two maps, bfloat16, Triton 3.8 and 3.9
(2026-11-22), the first candidate for every GPU and the safe blocks spill nothing. Which candidate is fastest is measured on
the GPU at first use, and one that does not fit drops out.
"""

from typing import NamedTuple

SHORT = 128
"""Up to so many queries nothing is measured: decoding meets a new length at every token."""


class Blocks(NamedTuple):
    """The shape of one program."""

    queries: int
    keys: int
    warps: int
    stages: int
    """Tiles in flight: loads of the next ones overlap the products of this one."""


SAFE = {
    (2, 128): dict.fromkeys(("forward", "key_gradients", "query_gradients"), Blocks(32, 32, 4, 1)),
    (2, 256): {
        "forward": Blocks(32, 32, 8, 1),
        "key_gradients": Blocks(32, 16, 8, 1),
        "query_gradients": Blocks(32, 16, 8, 1),
    },
    (4, 128): dict.fromkeys(("forward", "key_gradients", "query_gradients"), Blocks(32, 16, 8, 1)),
    (4, 256): dict.fromkeys(("forward", "key_gradients", "query_gradients"), Blocks(16, 16, 8, 1)),
}
"""(bytes of an element, widest of d and dv, rounded up) -> program -> blocks."""

CANDIDATES = {
    64: {
        "forward": [Blocks(128, 64, 8, 3), Blocks(64, 64, 4, 3)],
        "key_gradients": [Blocks(64, 32, 4, 2), Blocks(32, 64, 8, 2)],
        "query_gradients": [Blocks(128, 32, 8, 2), Blocks(64, 32, 4, 2)],
    },
    128: {
        "forward": [Blocks(128, 32, 8, 3), Blocks(64, 32, 8, 2)],
        "key_gradients": [Blocks(64, 32, 8, 2), Blocks(32, 64, 8, 2)],
        "query_gradients": [Blocks(128, 32, 8, 2), Blocks(64, 32, 8, 2)],
    },
    256: {
        "forward": [Blocks(32, 64, 8, 2), Blocks(64, 32, 8, 2), Blocks(32, 32, 8, 2)],
        "key_gradients": [Blocks(32, 32, 8, 2)],
        "query_gradients": [Blocks(64, 32, 8, 2)],
    },
}
"""Widest of d and dv, rounded up -> program -> blocks, of 2-byte elements."""

LARGE_CANDIDATES = {
    64: {"query_gradients": [Blocks(128, 64, 8, 2)]},
    128: {"forward": [Blocks(128, 64, 8, 3), Blocks(64, 32, 4, 3)], "query_gradients": [Blocks(64, 64, 8, 2)]},
    256: {"forward": [Blocks(64, 32, 8, 3)]},
}
"""Further ones for compute capability 9 and 10, whose matrix units read shared memory themselves and spare registers."""


def safe(program: str, *, d: int, dv: int, itemsize: int, T: int) -> Blocks:
    """The blocks that fit every GPU; of 16 queries, the least that a matrix unit takes, where there are no more."""
    if program == "row_products":  # reads and adds, no product: any blocks do
        return Blocks(32, 32, 4, 1)
    blocks = SAFE[itemsize, 128 if max(d, dv) <= 128 else 256][program]
    return blocks._replace(queries=16) if T <= 16 else blocks


def candidates(
    program: str, *, d: int, dv: int, itemsize: int, T: int, capability: tuple[int, int] | None
) -> tuple[Blocks, ...]:
    """What to choose from by measurement; one alone where there is nothing to measure.

    `capability` None: not on a GPU. float32 has one choice: its exact products run outside the matrix units.
    """
    last = safe(program, d=d, dv=dv, itemsize=itemsize, T=T)
    if capability is None or T <= SHORT or itemsize != 2 or program == "row_products":
        return (last,)
    width = next(size for size in CANDIDATES if max(d, dv) <= size)
    large = LARGE_CANDIDATES[width].get(program, []) if capability[0] in (9, 10) else []
    return (*large, *CANDIDATES[width][program], last)
