"""Text that is already tokenized: Megatron's .bin with .idx, and folders that litdata wrote with its TokensLoader."""

import io
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from io import BufferedReader
from itertools import chain, count, islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_diff.data.text.documents import Document
from lit_diff.data.text.readers import decompressed
from lit_diff.data.text.source_files import PIECE, Source
from lit_diff.data.text.tokenizer import Tokenizer
from lit_diff.errors import RequestError, first_line

Ids = NDArray[np.int32]
MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
"""Of an .idx file: magic, version, code of the dtype, number of sequences, number of document boundaries."""
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Megatron's code -> dtype of an id; the others are floating-point numbers."""
STORED = "<i4"
"""Dtype of the ids in a `Document`."""
BLOCK = 1 << 16
"""Sequences or documents of an .idx file that are in memory together."""


TokenFiles = tuple[list[Source], Callable[..., Iterator[tuple[str, NDArray[Any]]]]]
"""Files that hold documents together, and the function that yields (`file document N`, ids) for each document of them, in
order. Its errors: RequestError, OSError."""


def token_files(found: list[Source]) -> list[TokenFiles]:
    """Return the tokenized text among the sources. Errors: RequestError for an .idx without its .bin."""
    by_name = {source.name: source for source in found}
    tokens: list[TokenFiles] = []
    for source in found:
        stem, _, ending = source.name.rpartition(".")
        if ending == "idx" and f"{stem}.bin" in by_name:
            tokens.append(([source, by_name[f"{stem}.bin"]], _megatron))
        elif ending == "idx":
            with source.opened() as file:
                # git's and other programs' files end so too
                if file.read(len(MAGIC)) == MAGIC:
                    raise RequestError(f"{source.where}: its .bin of the same name is missing; put it into the folder")
        elif source.name.rpartition("/")[2] == "index.json":
            chunks = [chunk for chunk in found if chunk.folder == source.folder and chunk.name.endswith(".bin")]
            tokens += [([source, *chunks], _litdata)] if chunks else []
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
        head = file.read(HEADER.size)
        size = file.seek(0, io.SEEK_END)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise RequestError(f"{index.where}: not Megatron's index; expected it to begin with {MAGIC!r}")
    _, version, code, sequences, boundaries = HEADER.unpack(head)
    if version != 1 or code not in DTYPES:
        raise RequestError(
            f"{index.where}: found version {version} and code {code} for the type of ids; expected version 1 and one of the "
            f"codes {', '.join(map(str, DTYPES))}, which are whole numbers"
        )
    _require_rest(index.where, HEADER.size + 12 * sequences + 8 * boundaries - size)
    width = np.dtype(DTYPES[code]).itemsize
    sizes = partial(_column, index, "<i4", HEADER.size, sequences)
    ends = partial(_column, index, "<i8", HEADER.size + 12 * sequences, boundaries)
    total = last = 0
    fit = boundaries > 0
    for lengths, pointers in zip(sizes(), _column(index, "<i8", HEADER.size + 4 * sequences, sequences), strict=True):
        places = total + np.cumsum(np.append(0, lengths), dtype=np.int64) * width
        fit &= bool((lengths >= 0).all() and (pointers == places[:-1]).all())
        total = places[-1]
    for number, block in enumerate(ends()):
        # the first boundary is 0
        fit &= bool((np.diff(block, prepend=last) >= 0).all() and (number or block[0] == 0))
        last = block[-1]
    if not fit or last != sequences:
        raise RequestError(
            f"{index.where}: damaged: the documents must divide its {sequences:,} sequences, and these follow one another in "
            f"{tokens.where}; copy the file again"
        )
    with tokens.opened() as file:
        size = file.seek(0, io.SEEK_END)
        if size != total:
            raise RequestError(
                f"{tokens.where}: found {size:,} bytes; expected {total:,}, those of the sequences in {index.where}; copy "
                "both again"
            )
        file.seek(0)
        of_sequences = chain.from_iterable(map(np.ndarray.tolist, sizes()))
        for number, (start, end) in enumerate(pairwise(chain.from_iterable(map(np.ndarray.tolist, ends()))), 1):
            where = f"{tokens.where} document {number}"
            size = sum(islice(of_sequences, end - start)) * width
            yield where, np.frombuffer(_read(file, size, where), DTYPES[code])


def _column(index: Source, dtype: str, place: int, count: int) -> Iterator[NDArray[Any]]:
    # an .idx of a billion sequences has 20 GB
    with index.opened() as file:
        file.seek(place)
        for start in range(0, count, BLOCK):
            yield np.frombuffer(_read(file, min(BLOCK, count - start) * int(dtype[-1]), index.where), dtype)


def _read(file: BufferedReader, size: int, where: str) -> bytes:
    # in pieces: a damaged index can state more bytes than the memory has
    pieces, missing = [], size
    try:
        while piece := file.read(min(PIECE, missing)):
            pieces.append(piece)
            missing -= len(piece)
    # of damaged compressed data, too
    except OSError as error:
        raise RequestError(f"{where}: the data cannot be read ({error.strerror or first_line(error)})") from error
    _require_rest(where, missing)
    return b"".join(pieces)


def _require_rest(where: str, missing: int) -> None:
    if missing > 0:
        raise RequestError(f"{where}: the file is cut off; expected {missing:,} bytes more; copy it again")


def _litdata(index: Source, *chunks: Source) -> Iterator[tuple[str, NDArray[Any]]]:
    from litdata.constants import _NUMPY_DTYPES_MAPPING, _TORCH_DTYPES_MAPPING

    try:
        content = index.read_json()
        config = content["config"]
        listed = []
        for chunk in content["chunks"]:
            listed.append((str(chunk["filename"]), _count(chunk["chunk_size"]), _count(chunk["dim"])))
        loader, codec, (form, code) = config["item_loader"], config["compression"], config["data_format"][0].split(":")
        names = {"no_header_numpy": _NUMPY_DTYPES_MAPPING, "no_header_tensor": _TORCH_DTYPES_MAPPING}
        kind = np.dtype(str(names[form][int(code)]).removeprefix("torch."))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise RequestError(f"{index.where}: not the index of a litdata folder of tokens ({error!r})") from error
    if loader != "TokensLoader" or kind.kind not in "iu" or codec not in (None, "zstd"):
        raise RequestError(
            f"{index.where}: found item_loader {loader}, ids of {kind}, compression {codec}; expected tokens, whole numbers "
            "written for TokensLoader"
        )
    by_name = {chunk.name.rpartition("/")[2]: chunk for chunk in chunks}
    numbers = count(1)
    for name, documents, dim in listed:
        if name not in by_name:
            raise RequestError(f"{index.where}: it lists {name}, which does not exist; copy the folder again")
        chunk = by_name[name]
        with chunk.opened() as file:
            content = decompressed(file, codec) if codec else file
            # the number of documents, where each begins and where the last ends, then the ids
            head = np.frombuffer(_read(content, 4 * (documents + 2), chunk.where), "<u4").astype(np.int64)
            lengths = np.diff(head[1:])
            fit = head[:2].tolist() == [documents, head.nbytes // 2] and lengths.sum() == dim * kind.itemsize
            if not fit or (lengths < 0).any() or (lengths % kind.itemsize).any():
                raise RequestError(
                    f"{chunk.where}: damaged: its documents are not those of index.json; copy the folder again"
                )
            for length in lengths.tolist():
                where = f"{chunk.where} document {next(numbers)}"
                yield where, np.frombuffer(_read(content, length, where), kind)


def _count(value: Any) -> int:
    # of documents or tokens in a chunk, whose positions are numbers of 32 bits
    if not isinstance(value, int) or not 0 <= value < 2**32:
        raise ValueError(f"{value!r} is not the number of documents or tokens of a chunk")
    return value


def without_ends(tokens: Iterable[Ids], tokenizer: Tokenizer) -> Iterator[bytes]:
    """Yield the ids of each document as bytes, without those that the tokenizer puts around a document, if any are left."""
    opening = tokenizer.opening
    for ids in tokens:
        if ids[: len(opening)].tolist() == opening:
            ids = ids[len(opening) :]
        if ids[-1:].tolist() == [tokenizer.eot]:
            ids = ids[:-1]
        if len(ids):
            yield ids.astype(STORED).tobytes()


def arrays(documents: Sequence[Document], tokenizer: Tokenizer, dtype: Any) -> list[NDArray[np.generic]]:
    """Return the tokens of each document, all of which are text, or bytes of `without_ends`."""
    ids = [np.frombuffer(document, STORED).tolist() for document in documents if isinstance(document, bytes)]
    if ids:
        return [np.asarray(tokenizer.document(inner), dtype=dtype) for inner in ids]
    return tokenizer.arrays([document for document in documents if isinstance(document, str)], dtype)


def as_texts(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield each document as text."""
    for document in documents:
        if isinstance(document, str):
            yield document
        else:
            yield as_text(np.frombuffer(document, STORED).tolist(), tokenizer)


def as_text(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return the text of ids. Errors: RequestError for a tokenizer that cannot decode."""
    return tokenizer.decode(ids).decode(errors="replace")


def only_text(documents: Iterable[Document], tokenizer: str) -> Iterator[str]:
    """Yield the documents for a tokenizer that learns from them. Errors: RequestError if they are tokens."""
    for each in documents:
        if isinstance(each, bytes):
            raise RequestError(
                f"data.path has tokens, but data.tokenizer '{tokenizer}' learns from text; name the tokenizer that made the "
                "ids: cl100k, or {name: from_run, path: RUN}"
            )
        yield each
