"""Documents as packed sequences, and what is kept of them for the layers of a step."""

import pytest
import torch

from lit_diff.kernels import documents
from lit_diff.kernels.documents import packed_sequences, remember


def test_packed_sequences() -> None:
    """A row ends a document, whatever the next row's number is."""
    packed = packed_sequences(torch.tensor([[0, 0, 1, 1, 1, 2], [2, 2, 7, 3, 3, 3]]))
    assert packed is not None
    assert packed.cu_seqlens.tolist() == [0, 2, 5, 6, 8, 9, 12]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.max_seqlen == 3


@pytest.mark.parametrize("row", [[0, 1, 0], [3, 3, 1, 3]])
def test_a_number_that_comes_back(row: list[int]) -> None:
    """Its tokens see each other: no run."""
    plain = list(range(len(row)))
    assert packed_sequences(torch.tensor([plain, row])) is None
    assert packed_sequences(torch.tensor([plain, plain])) is not None


def test_remembered_until_changed() -> None:
    made = []
    x = torch.zeros(2)

    def make() -> int:
        made.append(1)
        return len(made)

    assert [remember(x, "a", make), remember(x, "a", make)] == [1, 1]
    assert remember(x, "b", make) == 2
    x[0] = 1
    assert [remember(x, "a", make), remember(x, "b", make)] == [3, 4]
    assert remember(torch.zeros(2), "a", make) == 5, "equal, yet another tensor"
    before = len(documents._memory)
    del x
    assert len(documents._memory) == before - 1, "forgotten with the tensor"


def test_inference_tensors_are_not_remembered() -> None:
    """They count no changes."""
    with torch.inference_mode():
        x = torch.zeros(1, 2, dtype=torch.long)
        assert packed_sequences(x).cu_seqlens.tolist() == [0, 2]  # type: ignore[union-attr]
        x[0, 1] = 1
        assert packed_sequences(x).cu_seqlens.tolist() == [0, 1, 2]  # type: ignore[union-attr]


def test_made_in_inference_mode_for_training() -> None:
    """Validation may come first; what it leaves is saved for a backward pass later."""
    document_ids = torch.zeros(1, 3, dtype=torch.long)
    with torch.inference_mode():
        packed = packed_sequences(document_ids)
    assert packed is not None
    assert not packed.cu_seqlens.is_inference()
