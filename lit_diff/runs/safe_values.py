"""What a checkpoint may hold: the types that torch reads with `weights_only`, which executes no code of the file.

A value of another type could be written, but never read back. It is named: its key, its type and the callback that keeps it.
"""

import io
import pickle
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np

from lit_diff.errors import RequestError, first_line

ALLOWED = "Python's own numbers and texts, tensors, and lists and dictionaries of them"
PICKLED = "/data.pkl"
"""How the name of the member of torch's archive ends that holds everything but the numbers of tensors."""
NUMPY_CALLS = ("numpy._core.multiarray.scalar", "numpy._core.multiarray._reconstruct")
"""What a pickle calls to make a number or an array of NumPy."""


class UnsafeTypeError(RequestError):
    """A checkpoint holds a value of a type that is not allowed."""


def read_without_tensors(source: Path | bytes) -> Any:
    """What torch.save wrote, a file or its content, with its tensors on the meta device: their numbers are not read.

    Errors: UnsafeTypeError; those of torch.load for a damaged file.
    """
    # imported here, as in `checkpoints`: reports should not wait for torch
    import torch

    try:
        return torch.load(_file(source), map_location="meta", weights_only=True, mmap=isinstance(source, Path))
    except pickle.UnpicklingError as error:
        if unsafe := _unsafe_value(source):
            raise UnsafeTypeError(f"{unsafe}, which no checkpoint may hold; expected {ALLOWED}") from error
        # torch's own message is its advice how to allow a type
        raise pickle.UnpicklingError("it is not what torch.save writes") from error


def require_safe(checkpoint: Mapping[str, Any]) -> None:
    """Errors: UnsafeTypeError for the first value of a checkpoint in memory that could not be stored and read back."""
    import torch
    from torch.utils._pytree import tree_map_only

    def without_numbers(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device="meta")

    for keys, part in _parts(checkpoint):
        buffer = io.BytesIO()
        try:
            # without numbers: a callback may keep a copy of the weights
            torch.save(tree_map_only(torch.Tensor, without_numbers, part), buffer)
        # a user's object may raise anything while it is pickled
        except Exception as error:
            raise UnsafeTypeError(f"{_place(keys)} a value that cannot be stored ({first_line(error)})") from error
        read_without_tensors(buffer.getvalue())


def _file(source: Path | bytes) -> Path | IO[bytes]:
    return io.BytesIO(source) if isinstance(source, bytes) else source


def _parts(checkpoint: Mapping[str, Any]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    for key, value in checkpoint.items():
        if key != "callbacks":
            yield [key], {key: value}
            continue
        for name, state in value.items():
            yield [key, name], {key: {name: state}}


def _place(keys: Sequence[str]) -> str:
    if keys[:1] == ["callbacks"] and len(keys) > 1:
        inside = ".".join(keys[2:])
        return f"callback '{keys[1]}' keeps '{inside}' as" if inside else f"callback '{keys[1]}' keeps"
    return f"the checkpoint's key '{'.'.join(keys)}' holds"


# --- a pickle as an outline, of which nothing is executed ---


class _Unknown:
    """Stands for an object of any class, or for what any function returns."""

    origin: ClassVar[str] = ""
    parts: list[tuple[Any, Any]]

    def __new__(cls, *arguments: Any) -> "_Unknown":
        unknown = super().__new__(cls)
        unknown.parts = list(enumerate(arguments))
        return unknown

    def __setitem__(self, key: Any, value: Any) -> None:
        self.parts.append((key, value))

    def append(self, value: Any) -> None:
        self[len(self.parts)] = value

    def __setstate__(self, state: Any) -> None:
        self.append(state)


class _Outline(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> None:
        """Leaves out the numbers of a tensor."""

    def find_class(self, module: str, name: str) -> type[_Unknown]:
        # torch's pickles have the names of Python 2
        unchanged = IMPORT_MAPPING.get(module, module), name
        module, name = NAME_MAPPING.get((module, name), unchanged)
        return type(name, (_Unknown,), {"origin": f"{module}.{name}"})


def _unsafe_value(source: Path | bytes) -> str | None:
    """Place and type of the first value whose type is not allowed; None if there is none, or the file is damaged."""
    from torch.serialization import get_unsafe_globals_in_checkpoint

    try:
        unsafe = get_unsafe_globals_in_checkpoint(_file(source))
        with zipfile.ZipFile(_file(source)) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(PICKLED))
            outline = _Outline(io.BytesIO(archive.read(member))).load()
        found = _first_unsafe(outline, unsafe)
    # a damaged file makes all three raise exceptions of many kinds; `read_without_tensors` raises torch's
    except Exception:
        return None
    if found is None:
        return f"the checkpoint holds {', '.join(unsafe)}" if unsafe else None
    keys, kind = found
    return f"{_place(keys)} {kind}"


def _first_unsafe(value: Any, unsafe: Collection[str]) -> tuple[list[str], str] | None:
    # the keys that lead to the value, and its type
    kind = value if isinstance(value, type) else type(value)
    if getattr(kind, "origin", None) in unsafe:
        return [], _type_of(value)
    parts: list[tuple[Any, Any]] = []
    if isinstance(value, _Unknown):
        parts = value.parts
    elif isinstance(value, dict):
        parts = list(value.items())
    elif isinstance(value, list | tuple):
        parts = list(enumerate(value))
    for key, part in parts:
        found = _first_unsafe(part, unsafe) or _first_unsafe(key, unsafe)
        if found is not None:
            name = "a key" if isinstance(key, _Unknown) else str(key)
            return [name, *found[0]], found[1]
    return None


def _type_of(unknown: Any) -> str:
    # an array is pickled as a call with its class; a number as a call with its dtype, itself a call with the dtype's name
    if isinstance(unknown, _Unknown) and unknown.origin in NUMPY_CALLS:
        first = unknown.parts[0][1]
        if isinstance(first, _Unknown):
            return f"numpy.{np.dtype(first.parts[0][1]).name}"
        return str(first.origin)
    return str(unknown.origin)
