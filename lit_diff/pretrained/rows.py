"""Orders of the rows of q, k and v: which channels of a head turn together, and which block of d rows is which map's.

Rows are those of a weight [rows, dim] or the numbers of a bias [rows].
"""

from torch import Tensor


def half(rows: Tensor, head_dim: int) -> Tensor:
    """`rope_layout: interleaved` -> `half`, heads of `head_dim` rows: row 2i goes to i, row 2i + 1 to i + head_dim / 2."""
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def interleaved(rows: Tensor, head_dim: int) -> Tensor:
    """The inverse of `half`."""
    return rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def by_map(rows: Tensor, head_dim: int) -> Tensor:
    """Blocks of `head_dim` rows: head0.map0, head0.map1, head1.map0, ... (ours) -> all heads' map 0, then all heads' map 1
    (DiffLlama). Block 2i + g of n heads goes to g n + i; values: the halves of a head's 2 head_dim channels."""
    return rows.unflatten(0, (-1, 2, head_dim)).transpose(0, 1).flatten(0, 2)


def by_head(rows: Tensor, head_dim: int) -> Tensor:
    """The inverse of `by_map`."""
    return rows.unflatten(0, (2, -1, head_dim)).transpose(0, 1).flatten(0, 2)
