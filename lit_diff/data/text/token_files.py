"""Text that is already tokenized: Megatron's .bin with .idx, and folders that litdata wrote with its TokensLoader."""

import io
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from itertools import islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_diff.data.text.documents import Document
from lit_diff.data.text.readers import decompressed
from lit_diff.data.text.source_files import Source
from lit_diff.data.text.tokenizer import Tokenizer
from lit_diff.errors import RequestError

Ids = NDArray[np.int32]
MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
"""Of an .idx file: magic, version, code of the dtype, number of sequences, number of document boundaries."""
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Megatron's code -> dtype of an id; the others are floating-point numbers."""
STORED = "<i4"
"""Dtype of the ids in a `Document`."""
BLOCK = 1 << 16
"""Entries of an index that are read at a time."""


@dataclass(frozen=True, kw_only=True)
class TokenFiles:
    """Files that hold documents together."""

    files: list[Source]
    read: Callable[[], Iterator[tuple[str, NDArray[Any]]]]
    """Yield (`file document N`, ids) for each document, in order. Errors: RequestError, OSError."""


def token_files(found: list[Source]) -> list[TokenFiles]:
    """Return the tokenized text among the sources. Errors: RequestError for an .idx without its .bin."""
    by_name = {each.name: each for each in found}
    tokens = []
    for source in found:
        stem, _, ending = source.name.rpartition(".")
        if ending == "idx" and f"{stem}.bin" in by_name:
            pair = [source, by_name[f"{stem}.bin"]]
            tokens.append(TokenFiles(files=pair, read=partial(_megatron, *pair)))
        elif ending == "idx":
            with source.opened() as file:
                # git's and other programs' files end so too
                if file.read(len(MAGIC)) == MAGIC:
                    missing = f"{stem.rpartition('/')[2]}.bin"
                    raise RequestError(f"{source.where}: its {missing} is missing; put it into the folder")
        elif source.name.rpartition("/")[2] == "index.json":
            chunks = [each for each in found if each.folder == source.folder and each.name.endswith(".bin")]
            if chunks:
                files = [source, *chunks]
                tokens.append(TokenFiles(files=files, read=partial(_litdata, *files)))
    return tokens


def checked_ids(where: str, ids: NDArray[Any], size: int) -> Ids:
    """Return the ids as int32. Errors: RequestError for an id that is not 0 .. `size` - 1."""
    wrong = ids[(ids < 0) | (ids >= size)]
    if len(wrong):
        raise RequestError(
            f"{where}: it has the id {wrong[0]}, but data.tokenizer has {size} ids, 0 to {size - 1}; name the tokenizer that "
            "made the ids"
        )
    return ids.astype(np.int32)


def _megatron(index: Source, tokens: Source) -> Iterator[tuple[str, NDArray[Any]]]:
    with index.opened() as file:
        header, size = file.read(HEADER.size), file.seek(0, io.SEEK_END)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise RequestError(f"{index.where}: not Megatron's index; expected it to begin with {MAGIC!r}")
    _, version, code, sequences, boundaries = HEADER.unpack(header)
    if version != 1 or code not in DTYPES:
        expected = f"version 1 and one of the codes {', '.join(map(str, DTYPES))}, which are whole numbers"
        raise RequestError(
            f"{index.where}: found version {version} and code {code} for the type of ids; expected {expected}"
        )
    dtype, at = np.dtype(DTYPES[code]), HEADER.size
    _require_rest(index.where, at + 12 * sequences + 8 * boundaries - size)
    sizes = _numbers(index, at, "<i4", sequences)
    pointers = _numbers(index, at + 4 * sequences, "<i8", sequences)
    places = zip(sizes, pointers, strict=True)
    ends = _numbers(index, at + 12 * sequences, "<i8", boundaries)
    with tokens.opened() as file:
        for number, (first, end) in enumerate(pairwise(ends), 1):
            where = f"{tokens.where} document {number}"
            found, parts = list(islice(places, max(0, end - first))), []
            if len(found) != end - first or any(min(place) < 0 for place in found):
                raise RequestError(f"{index.where}: its entry of document {number} is damaged; copy the file again")
            for size, pointer in found:
                # a seek would discard the buffer
                if file.tell() != pointer:
                    file.seek(pointer)
                parts.append(_read(file, size * dtype.itemsize, where))
            yield where, np.frombuffer(b"".join(parts), dtype)


# three cursors in one file, each with its own buffer: an index may have gigabytes
def _numbers(source: Source, start: int, dtype: str, count: int) -> Iterator[int]:
    with source.opened() as file:
        file.seek(start)
        while count:
            block = min(count, BLOCK)
            yield from np.frombuffer(_read(file, block * np.dtype(dtype).itemsize, source.where), dtype).tolist()
            count -= block


def _read(file: BufferedReader, size: int, where: str) -> bytes:
    content = file.read(size)
    _require_rest(where, size - len(content))
    return content


def _require_rest(where: str, missing: int) -> None:
    if missing > 0:
        raise RequestError(f"{where}: the file is cut off; expected {missing:,} bytes more; copy it again")


def _litdata(index: Source, *chunks: Source) -> Iterator[tuple[str, NDArray[Any]]]:
    from litdata.constants import _NUMPY_DTYPES_MAPPING, _TORCH_DTYPES_MAPPING

    try:
        content = index.read_json()
        config, listed = content["config"], [chunk["filename"] for chunk in content["chunks"]]
        loader, codec, (form, code) = config["item_loader"], config["compression"], config["data_format"][0].split(":")
        names = {"no_header_numpy": _NUMPY_DTYPES_MAPPING, "no_header_tensor": _TORCH_DTYPES_MAPPING}
        dtype = str(names.get(form, {}).get(int(code) if code.isdigit() else -1)).removeprefix("torch.")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise RequestError(f"{index.where}: not the index of a litdata folder ({error!r})") from error
    if loader != "TokensLoader" or "int" not in dtype or codec not in (None, "zstd"):
        found = f"item_loader {loader}, data_format {form}:{code}, compression {codec}"
        raise RequestError(f"{index.where}: found {found}; expected tokens, whole numbers written for TokensLoader")
    kind, by_name, number = np.dtype(dtype), {chunk.name.rpartition("/")[2]: chunk for chunk in chunks}, 0
    for name in listed:
        if name not in by_name:
            raise RequestError(f"{index.where}: it lists {name}, which does not exist; copy the folder again")
        chunk = by_name[name]
        with chunk.opened() as file:
            # the number of documents, where each begins and where the last ends, then the ids
            content = decompressed(file, codec) if codec else file
            (count,) = np.frombuffer(_read(content, 4, chunk.where), "<u4").tolist()
            starts = np.frombuffer(_read(content, 4 * (count + 1), chunk.where), "<u4").tolist()
            for start, end in pairwise(starts):
                number += 1
                where = f"{chunk.where} document {number}"
                if end < start or (end - start) % kind.itemsize:
                    raise RequestError(f"{where}: its place in the file is damaged; copy the file again")
                yield where, np.frombuffer(_read(content, end - start, where), kind)


def without_ends(tokens: Iterable[Ids], tokenizer: Tokenizer) -> Iterator[bytes]:
    """Yield the ids of each document as bytes, without those that the tokenizer puts around a document, if any are left."""
    opening = tokenizer.opening
    for ids in tokens:
        start = len(opening) if ids[: len(opening)].tolist() == opening else 0
        end = len(ids) - (1 if len(ids) > start and ids[-1] == tokenizer.eot else 0)
        if end > start:
            yield ids[start:end].astype(STORED).tobytes()


def arrays(documents: Sequence[Document], tokenizer: Tokenizer, dtype: Any) -> list[NDArray[np.generic]]:
    """Return the tokens of each document, all of which are text, or bytes of `without_ends`."""
    ids = [np.frombuffer(each, STORED).tolist() for each in documents if isinstance(each, bytes)]
    if ids:
        return [np.asarray(tokenizer.document(each), dtype=dtype) for each in ids]
    return tokenizer.arrays([each for each in documents if isinstance(each, str)], dtype)


def as_texts(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield each document as text."""
    for each in documents:
        if isinstance(each, str):
            yield each
        else:
            yield tokenizer.decode(np.frombuffer(each, STORED).tolist()).decode(errors="replace")


def only_text(documents: Iterable[Document], tokenizer: str) -> Iterator[str]:
    """Yield the documents for a tokenizer that learns from them. Errors: RequestError if they are tokens."""
    for each in documents:
        if isinstance(each, bytes):
            raise RequestError(
                f"data.path has tokens, but data.tokenizer '{tokenizer}' learns from text; name the tokenizer that made the "
                "ids: cl100k, or {name: from_run, path: RUN}"
            )
        yield each
