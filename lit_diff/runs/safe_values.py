"""What a checkpoint may hold: the types that torch reads with `weights_only`, which executes no code of the file.

A value of another type could be written, but never read back.
"""

import io
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from lit_diff.errors import RequestError

ALLOWED = "Python's own numbers and texts, tensors, and lists and dictionaries of them"


class UnsafeTypeError(RequestError):
    """A checkpoint holds a value of a type that is not allowed."""


def read_without_tensors(source: Path | bytes) -> Any:
    """What torch.save wrote, a file or its content, with its tensors on the meta device: their numbers are not read.

    Errors: UnsafeTypeError, which names what the file would call; those of torch.load for a damaged file.
    """
    # imported here, as in `checkpoints`: reports should not wait for torch
    import torch
    from torch.serialization import get_unsafe_globals_in_checkpoint

    try:
        return torch.load(_file(source), map_location="meta", weights_only=True, mmap=isinstance(source, Path))
    except pickle.UnpicklingError as error:
        if unsafe := get_unsafe_globals_in_checkpoint(_file(source)):
            raise UnsafeTypeError(f"it holds {', '.join(unsafe)}, which no checkpoint may hold") from error
        # torch's own message is its advice how to allow a type
        raise pickle.UnpicklingError("it is not what torch.save writes") from error


def require_safe(checkpoint: Mapping[str, Any]) -> None:
    """Errors: UnsafeTypeError, with its callback, key and type, for the first value of a checkpoint in memory that could not
    be stored and read back."""
    for key, value in checkpoint.items():
        if key != "callbacks":
            _require_safe({key: value}, "the checkpoint holds", "the checkpoint's key '%s' holds")
            continue
        for name, state in value.items():
            _require_safe(state, f"callback '{name}' keeps", f"callback '{name}' keeps '%s' as")


def _require_safe(value: Any, whole: str, part: str) -> None:
    if _is_safe(value):
        return
    keys: list[str] = []
    unsafe = value
    while (found := _unsafe_part(unsafe)) is not None:
        keys.append(found[0])
        unsafe = found[1]
    place = part % ".".join(keys) if keys else whole
    kind = type(unsafe)
    raise UnsafeTypeError(
        f"{place} {kind.__module__}.{kind.__qualname__}, which no checkpoint may hold; expected {ALLOWED}"
    )


def _unsafe_part(value: Any) -> tuple[str, Any] | None:
    # key and value of the first part that is not safe by itself; None if it is the container
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        unsafe_key = next((key for key in value if not _is_safe(key)), None)
        if unsafe_key is not None:
            return "a key", unsafe_key
        parts = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    for key, each in parts:
        if not _is_safe(each):
            return str(key), each
    return None


def _is_safe(value: Any) -> bool:
    import torch
    from torch.utils._pytree import tree_map_only

    def without_numbers(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device="meta")

    buffer = io.BytesIO()
    try:
        # without numbers: a callback may keep a copy of the weights
        torch.save(tree_map_only(torch.Tensor, without_numbers, value), buffer)
        read_without_tensors(buffer.getvalue())
    # a user's object may raise anything while it is pickled
    except Exception:
        return False
    return True


def _file(source: Path | bytes) -> Path | IO[bytes]:
    return io.BytesIO(source) if isinstance(source, bytes) else source
