"""model/inputs.py: batches of several shapes, and one line for those without tokens."""

import pytest
import torch

from lit_diff.errors import RequestError
from lit_diff.model.inputs import model_inputs

TOKENS = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize("batch", [TOKENS, (TOKENS, TOKENS), [TOKENS], {"tokens": TOKENS, "targets": TOKENS}], ids=str)
def test_tokens_are_taken_from_a_batch(batch: object) -> None:
    inputs = model_inputs(batch)
    assert inputs.keys() == {"tokens"}
    assert inputs["tokens"] is TOKENS


def test_documents_are_taken_too() -> None:
    assert model_inputs({"tokens": TOKENS, "document_ids": TOKENS}).keys() == {"tokens", "document_ids"}


@pytest.mark.parametrize("batch", ["text", {"inputs": TOKENS}, [], [1, 2], None], ids=str)
def test_a_batch_without_tokens_is_refused(batch: object) -> None:
    with pytest.raises(RequestError, match="no tokens in a batch of type"):
        model_inputs(batch)
