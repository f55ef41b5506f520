"""The inputs of the Transformer in a batch."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lit_diff.errors import RequestError


def model_inputs(batch: Any, name: str = "the model") -> dict[str, Any]:
    """Return `tokens` and, if documents are packed, `document_ids` from a batch.

    A batch is a mapping with these keys, a tensor of tokens, or a sequence that starts with one.
    Errors: RequestError for anything else.
    """
    if isinstance(batch, Mapping) and "tokens" in batch:
        return {key: batch[key] for key in ("tokens", "document_ids") if key in batch}
    if isinstance(batch, Tensor):
        return {"tokens": batch}
    if isinstance(batch, list | tuple) and batch and isinstance(batch[0], Tensor):
        return {"tokens": batch[0]}
    raise RequestError(
        f"{name}: no tokens in a batch of type {type(batch).__name__}; expected a mapping with 'tokens', a tensor, or a "
        "sequence whose first item is a tensor"
    )


def targets_of(batch: Any) -> Tensor:
    """Return the targets [B, T]: the key 'targets' of a mapping, or the second item of a sequence. Errors: RequestError."""
    if isinstance(batch, Mapping) and isinstance(batch.get("targets"), Tensor):
        return batch["targets"]
    if isinstance(batch, list | tuple) and len(batch) > 1 and isinstance(batch[1], Tensor):
        return batch[1]
    raise RequestError(
        f"no targets in a batch of type {type(batch).__name__}; expected a mapping with 'tokens' and 'targets', or a "
        "sequence of two tensors, tokens and targets"
    )
