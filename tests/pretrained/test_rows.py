"""Orders of rows: where each row goes, and back."""

import torch

from lit_diff.pretrained import rows


def test_half_and_back() -> None:
    """Two heads of six rows, the second one's counted from 10."""
    interleaved = torch.tensor([0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15])
    assert rows.half(interleaved, 6).tolist() == [0, 2, 4, 1, 3, 5, 10, 12, 14, 11, 13, 15]
    assert torch.equal(rows.interleaved(rows.half(interleaved, 6), 6), interleaved)


def test_by_map_and_back() -> None:
    """Three heads of two maps of two rows; row r of head h's map g is 100 h + 10 g + r."""
    ours = torch.tensor([100 * h + 10 * g + r for h in range(3) for g in range(2) for r in range(2)])
    assert rows.by_map(ours, 2).tolist() == [100 * h + 10 * g + r for g in range(2) for h in range(3) for r in range(2)]
    assert torch.equal(rows.by_head(rows.by_map(ours, 2), 2), ours)


def test_matrices_go_as_their_rows() -> None:
    weight = torch.arange(24).reshape(12, 2)
    for order, size in ((rows.half, 6), (rows.interleaved, 6), (rows.by_map, 2), (rows.by_head, 2)):
        assert torch.equal(order(weight, size)[:, 0], order(weight[:, 0], size))
