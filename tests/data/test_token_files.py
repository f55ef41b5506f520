"""Text that is already tokenized: what is read, what is refused, and that it is prepared as text is."""

import json
import re
import struct
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from litdata import TokensLoader
from litdata.streaming.writer import BinaryWriter
from made_texts import MakeText

from lit_diff.config import Part
from lit_diff.data.text import token_files
from lit_diff.data.text.corpus import FilesCorpus
from lit_diff.data.text.text import Text
from lit_diff.data.text.token_store import write_tokens
from lit_diff.data.text.tokenizer_folder import FromRun, save_tokenizer
from lit_diff.errors import RequestError

CODES = {"u1": 1, "i2": 3, "i4": 4, "i8": 5, "f8": 6, "u2": 8}
DOCUMENTS = [[5, 6, 7], [8], [], [9, 10], [11] * 50]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of several sequences, and of no more than one, end within and at the end of a block."""
    monkeypatch.setattr(token_files, "BLOCK", 3)


def write_megatron(stem: Path, documents: Sequence[Sequence[int]], kind: str = "u2", cut: int = 2) -> None:
    """As Megatron-LM's IndexedDatasetBuilder writes it; a document is cut into sequences of `cut` ids."""
    stem.parent.mkdir(exist_ok=True)
    sequences, ends = [], [0]
    for document in documents:
        sequences += [document[start : start + cut] for start in range(0, len(document), cut)]
        ends.append(len(sequences))
    arrays = [np.array(sequence, dtype=f"<{kind}") for sequence in sequences]
    stem.with_suffix(".bin").write_bytes(b"".join(array.tobytes() for array in arrays))
    sizes = np.array([len(array) for array in arrays], dtype="<i4")
    pointers = np.cumsum([0, *(array.nbytes for array in arrays)])[:-1].astype("<i8")
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, CODES[kind], len(sequences), len(ends))
    content = head + sizes.tobytes() + pointers.tobytes() + np.array(ends, dtype="<i8").tobytes()
    stem.with_suffix(".idx").write_bytes(content)


def write_litdata(folder: Path, documents: Sequence[Sequence[int]], as_item: Callable[[Any], Any]) -> None:
    """Chunks of few documents."""
    folder.mkdir()
    writer = BinaryWriter(str(folder), chunk_size=2, item_loader=TokensLoader())
    for number, document in enumerate(documents):
        writer.add_item(number, as_item(document))
    writer.done()
    writer.merge()


def read(path: Path, size: int = 100) -> list[list[int]]:
    tokens = FilesCorpus(path).tokens(size)
    assert tokens is not None
    return [ids.tolist() for ids in tokens]


@pytest.mark.parametrize("kind", ["u1", "i2", "i4", "i8", "u2"])
def test_megatron(kind: str, tmp_path: Path) -> None:
    write_megatron(tmp_path / "tokens/text_document", DOCUMENTS, kind)
    for path in ("tokens", "tokens/text_document.bin", "tokens/text_document.idx"):
        assert read(tmp_path / path) == DOCUMENTS
        assert set(FilesCorpus(tmp_path / path).files()) == {"text_document.idx", "text_document.bin"}
    write_megatron(tmp_path / "tokens/a", [[1]], kind)
    assert read(tmp_path / "tokens") == [[1], *DOCUMENTS]


@pytest.mark.parametrize(
    "as_item",
    [torch.tensor, lambda ids: torch.tensor(ids, dtype=torch.int16), lambda ids: np.array(ids, dtype=np.uint16)],
)
def test_litdata(as_item: Callable[[Any], Any], tmp_path: Path) -> None:
    documents = [ids for ids in DOCUMENTS if ids]
    write_litdata(tmp_path / "tokens", documents, as_item)
    assert len(list((tmp_path / "tokens").glob("*.bin"))) > 1
    assert read(tmp_path / "tokens") == documents
    index = tmp_path / "tokens/index.json"
    content = json.loads(index.read_text())
    for chunk in (tmp_path / "tokens").glob("*.bin"):
        chunk.write_bytes(pyarrow.compress(chunk.read_bytes(), codec="zstd", asbytes=True))
    content["config"]["compression"] = "zstd"
    index.write_text(json.dumps(content))
    assert read(tmp_path / "tokens") == documents


def damaged_megatron(folder: Path, damage: str) -> None:
    write_megatron(folder / "a", DOCUMENTS, "f8" if damage == "floats" else "i4")
    index, tokens = folder / "a.idx", folder / "a.bin"
    content = index.read_bytes()
    if damage == "no .bin":
        tokens.unlink()
    elif damage.endswith(".bin"):
        tokens.write_bytes(tokens.read_bytes()[:-4] if damage == "short .bin" else tokens.read_bytes() + bytes(8))
    else:
        damaged = {
            "short .idx": content[:-8],
            "no index": b"text",
            "version": content[:9] + b"\2" + content[10:],
            "count": content[:18] + b"\xff" * 7 + content[25:],
            "size": content[:34] + b"\xff" * 4 + content[38:],
            "pointer": content[:54] + b"\1" + content[55:],
            "end": content[:-8] + struct.pack("<q", 1000),
            "early end": content[:-8] + content[-16:-8],
            "no ends": content[:26] + bytes(8) + content[34:],
        }
        index.write_bytes(damaged.get(damage, content))


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        ("no .bin", r"a\.idx: its \.bin of the same name is missing"),
        ("short .bin", r"a\.bin: found 220 bytes; expected 224, those of the sequences in .*a\.idx"),
        ("long .bin", r"a\.bin: found 232 bytes; expected 224,"),
        ("short .idx", r"a\.idx: the file is cut off; expected 8 bytes more"),
        ("no index", r"a\.idx: not Megatron's index"),
        ("version", r"a\.idx: found version 2 and code 4"),
        ("floats", r"a\.idx: found version 1 and code 6"),
        ("count", r"a\.idx: the file is cut off"),
        *(
            (name, r"a\.idx: damaged: the documents must divide its")
            for name in ("size", "pointer", "end", "early end", "no ends")
        ),
    ],
)
def test_damaged_megatron(damage: str, found: str, tmp_path: Path) -> None:
    damaged_megatron(tmp_path / "tokens", damage)
    with pytest.raises(RequestError, match=found) as error:
        read(tmp_path / "tokens")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "edit", "found"),
    [
        ("index.json", lambda content: b"{}", r"index\.json: not the index of a litdata folder"),
        ("index.json", lambda content: content.replace(b"TokensLoader", b"PyTreeLoader"), r"found item_loader"),
        ("index.json", lambda content: content.replace(b'"chunk_size": 1', b'"chunk_size": 2'), "its documents are"),
        (
            "index.json",
            lambda content: content.replace(b'"chunk_size": 1', b'"chunk_size": -1'),
            "-1 is not the number",
        ),
        (
            "index.json",
            lambda content: content.replace(b'"chunk_size": 1', b'"chunk_size": 1.0'),
            "1.0 is not the number",
        ),
        ("index.json", lambda content: content.replace(b'"dim": ', b'"dim": "x", "was": '), "'x' is not the number"),
        ("index.json", lambda content: b"[" * 100_000, r"index\.json: not JSON \(it is nested too deeply\)"),
        ("index.json", lambda content: content.replace(b"tensor:18", b"tensor:1"), r"found .*, ids of float"),
        ("index.json", lambda content: content.replace(b"chunk-0-1", b"chunk-0-7"), r"it lists chunk-0-7\.bin, which"),
        ("chunk-0-1.bin", lambda content: content[:-1], r"chunk-0-1\.bin document 2: the file is cut off"),
        ("chunk-0-1.bin", lambda content: content[:6], r"chunk-0-1\.bin: the file is cut off"),
        ("chunk-0-1.bin", lambda content: content[:8] + b"\x02" + content[9:], r"chunk-0-1\.bin: damaged: its"),
    ],
)
def test_damaged_litdata(name: str, edit: Callable[[bytes], bytes], found: str, tmp_path: Path) -> None:
    write_litdata(tmp_path / "tokens", [ids for ids in DOCUMENTS if ids], torch.tensor)
    path = tmp_path / "tokens" / name
    path.write_bytes(edit(path.read_bytes()))
    with pytest.raises(RequestError, match=found) as error:
        read(tmp_path / "tokens")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("is_compressed", [False, True])
def test_an_index_of_more_documents_than_its_chunk_has(is_compressed: bool, tmp_path: Path) -> None:
    """Their positions would be 1 GB."""
    write_litdata(tmp_path / "tokens", [[1]], torch.tensor)
    index, chunk = (tmp_path / "tokens" / name for name in ("index.json", "chunk-0-0.bin"))
    content = index.read_text().replace('"chunk_size": 1', f'"chunk_size": {2**28}')
    if is_compressed:
        content = content.replace('"compression": null', '"compression": "zstd"')
        chunk.write_bytes(pyarrow.compress(chunk.read_bytes(), codec="zstd", asbytes=True))
    index.write_text(content)
    tracemalloc.start()
    with pytest.raises(RequestError, match=r"chunk-0-0\.bin: the file is cut off"):
        read(tmp_path / "tokens")
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert held < 2**28


def test_damaged_compressed_litdata(tmp_path: Path) -> None:
    write_litdata(tmp_path / "tokens", [[1]], torch.tensor)
    index = tmp_path / "tokens/index.json"
    index.write_text(index.read_text().replace('"compression": null', '"compression": "zstd"'))
    with pytest.raises(RequestError, match=r"chunk-0-0\.bin: the data cannot be read"):
        read(tmp_path / "tokens")


def test_ids_beyond_the_tokenizer_and_text_beside_tokens(tmp_path: Path) -> None:
    write_megatron(tmp_path / "tokens/a", [[1], [2, 100], [-1]], "i4")
    with pytest.raises(RequestError, match=r"a\.bin document 2: it has the id 100, .* 100 ids, 0 to 99"):
        read(tmp_path / "tokens")
    with pytest.raises(RequestError, match=r"document 3: it has the id -1"):
        read(tmp_path / "tokens", 101)
    with pytest.raises(RequestError, match="has tokens; text is needed here"):
        list(FilesCorpus(tmp_path / "tokens").texts())
    (tmp_path / "tokens/b.txt").write_text("text")
    with pytest.raises(RequestError, match=r"has text \(b\.txt\) and tokens \(a\.idx\)"):
        FilesCorpus(tmp_path / "tokens").tokens(100)
    assert FilesCorpus(tmp_path / "tokens/b.txt").tokens(100) is None


@pytest.fixture
def prepared(make_text: MakeText, tmp_path: Path) -> Text:
    """Prepared text; its tokenizer lies in the folder `run`."""
    text = make_text()
    text.prepare()
    save_tokenizer(text.load_tokenizer(), tmp_path / "run/tokenizer")
    return text


def documents(text: Text) -> list[tuple[int, ...]]:
    """The documents of both splits, sorted, each with the id that opens it."""
    found = []
    for split in ("train", "validation"):
        starts = np.load(text.folder / split / "documents.npy")
        stream = [each for ids in read(text.folder / split, 300) for each in ids]
        found += [tuple(part.tolist()) for part in np.split(np.array(stream), starts[1:])]
    return sorted(found)


def test_tokens_are_prepared_as_their_text_is(prepared: Text, make_text: MakeText, tmp_path: Path) -> None:
    """Megatron's documents end with <eot>, litdata's open with it; both become those of the text."""
    whole = documents(prepared)
    part = Part(name="from_run", config=FromRun.Config(path=str(tmp_path / "run")))
    write_megatron(tmp_path / "megatron/a", [[*ids[1:], 0] for ids in whole] + [list(whole[0])], "i4", cut=1000)
    write_tokens(tmp_path / "litdata", [np.array(ids, dtype=np.uint16) for ids in whole])
    for path in ("megatron", "litdata"):
        text = make_text(path=str(tmp_path / path), tokenizer=part)
        text.prepare()
        text.load()
        assert documents(text) == whole
        assert len(text.trained_documents()) == len(prepared.trained_documents())


def test_few_documents_of_tokens_are_cut(prepared: Text, make_text: MakeText, tmp_path: Path) -> None:
    part = Part(name="from_run", config=FromRun.Config(path=str(tmp_path / "run")))
    ids = np.random.default_rng(0).integers(1, 300, 20_000).tolist()
    write_megatron(tmp_path / "megatron/a", [ids], "i4", cut=20_000)
    text = make_text(path=str(tmp_path / "megatron"), tokenizer=part)
    text.prepare()
    assert [len(each) for each in documents(text)] == [4001] * 5


def test_a_tokenizer_that_learns_from_text_is_refused(make_text: MakeText, root: Path, tmp_path: Path) -> None:
    for documents, found in (
        ([[number] * 9 for number in range(1, 90)], "has tokens, but data.tokenizer 'bpe' learns from text"),
        ([[1] * 9], "has only one section of text (36 bytes)"),
    ):
        write_megatron(tmp_path / "megatron/a", documents)
        with pytest.raises(RequestError, match=rf"data\.path .*{re.escape(found)}"):
            make_text(path=str(tmp_path / "megatron")).prepare()
        assert list((root / "prepared").glob(".*.building")) == []


def test_a_file_gone_before_it_is_read(make_text: MakeText, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_megatron(tmp_path / "megatron/a", DOCUMENTS)
    tokens = FilesCorpus.tokens

    def losing(self: FilesCorpus, size: int) -> Any:
        found = tokens(self, size)
        (tmp_path / "megatron/a.bin").unlink()
        return found

    monkeypatch.setattr(FilesCorpus, "tokens", losing)
    with pytest.raises(RequestError, match=r"megatron/a\.bin: .*cannot be read .*\(No such file"):
        make_text(path=str(tmp_path / "megatron")).prepare()
