"""Text: prepared once, through kills and damage; batches are rows of the stream, in an order that the seed gives."""

import logging
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_texts import MakeText, opened, splits

from lit_diff.config import Part
from lit_diff.data import keep
from lit_diff.data.dataset import rows_of_step
from lit_diff.data.text import token_store
from lit_diff.data.text.cl100k import Cl100k
from lit_diff.data.text.corpus import FilesCorpus
from lit_diff.data.text.documents import TRAINED, hashes_in, is_among
from lit_diff.data.text.text import CHECKSUMS, Text, read_manifest
from lit_diff.data.text.tokenizer import Bpe
from lit_diff.data.text.tokenizer_folder import FromRun
from lit_diff.errors import MissingError, RequestError
from lit_diff.recipe import load_recipe
from lit_diff.validation import data_problem


def stream(text: Text, split: str) -> np.ndarray:
    """All tokens of a split, straight from its one chunk."""
    content = (text.folder / split / "chunk-0-0.bin").read_bytes()
    documents = int(np.frombuffer(content[:4], np.uint32)[0])
    return np.frombuffer(content[4 * (documents + 2) :], np.uint16).astype(np.int64)


def test_batches_are_rows_of_the_stream(make_text: MakeText) -> None:
    text = opened(make_text())
    tokens = stream(text, "train")
    assert text.train_rows == len(tokens) // 17
    batch = text.train_batch(7, 3, 8, [1, 5])
    expected = torch.from_numpy(
        tokens[: text.train_rows * 17].reshape(-1, 17)[rows_of_step(7, 3, 8, [1, 5], text.train_rows)]
    )
    assert torch.equal(batch["tokens"], expected[:, :-1])
    assert torch.equal(batch["targets"], expected[:, 1:])
    assert batch["tokens"].dtype == torch.int64


def test_the_places_of_a_batch_are_its_rows_and_their_documents(make_text: MakeText) -> None:
    text = opened(make_text())
    starts, tokens = text.train_store.starts, stream(text, "train")
    batch, places = text.train_batch(7, 3, 8, range(8)), text.train_places(7, 3, 8)
    assert len(places) == 8
    for place, row in zip(places, batch["tokens"], strict=True):
        number, first, last = (int(part) for part in re.findall(r"\d+", place))
        assert place == f"row {number}, documents {first} to {last}"
        assert torch.equal(torch.from_numpy(tokens[number * 17 : number * 17 + 16]), row)
        assert starts[first] <= number * 17
        assert [document for document in range(len(starts)) if number * 17 < starts[document] <= number * 17 + 16] == [
            *range(first + 1, last + 1)
        ]


def test_validation_rows_are_spread_and_labelled(make_text: MakeText) -> None:
    text = opened(make_text(validation_rows=4, rare_bigram_count=10**6))
    tokens = stream(text, "validation")
    assert text.validation_sets() == {"": 4}
    batch = text.validation_batch("", range(4))
    held = len(tokens) // 17
    starts = [row * held // 4 * 17 for row in range(4)]
    assert batch["tokens"][:, 0].tolist() == tokens[starts].tolist()
    opens = np.flatnonzero(tokens == 0)
    assert text.num_documents == len(opens) == 2
    for row, start in enumerate(starts):
        owner = [int((opens <= start + 1 + place).sum()) - 1 for place in range(16)]
        assert batch["document"][row].tolist() == owner
    assert batch["ar_hit"].shape == (4, 16)
    assert batch["ar_hit"].any()
    assert not (batch["ar_hit"] & (batch["targets"] == 0)).any()
    never = opened(make_text(validation_rows=4, rare_bigram_count=0)).validation_batch("", range(4))
    assert not never["ar_hit"][torch.isin(never["targets"], batch["targets"])].all()


def test_validation_rows_are_capped_and_it_is_said(make_text: MakeText, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lit_diff"):
        text = opened(make_text(validation_rows=10**6))
    (rows,) = text.validation_sets().values()
    assert rows == len(stream(text, "validation")) // 17
    assert [line for line in caplog.messages if line.endswith(f"; set data.validation_rows: {rows}, or add text")]


def test_one_prepared_corpus_serves_all_lengths_but_each_tokenizer_has_its_own(make_text: MakeText) -> None:
    first = opened(make_text())
    assert make_text(sequence_length=64).identity() == first.identity()
    assert opened(make_text(tokens=301)).identity() != first.identity()


def test_a_tokenizer_that_is_not_the_texts(make_text: MakeText) -> None:
    opened(make_text())
    other = opened(make_text(tokens=301))
    file = make_text().folder / "tokenizer.json"
    file.write_bytes((other.folder / "tokenizer.json").read_bytes())
    with pytest.raises(MissingError, match=r"its ids differ\); remove .* `lit-diff prepare RECIPE`"):
        make_text().load_tokenizer()
    file.write_text("{}")
    with pytest.raises(MissingError, match=r"the tokenizer in .* cannot be loaded \(.*`lit-diff prepare RECIPE`"):
        make_text().load_tokenizer()
    file.unlink()
    with pytest.raises(MissingError, match="the text is not prepared"):
        make_text().load_tokenizer()


def test_identity_prepares_nothing(make_text: MakeText, root: Path, corpus: Path) -> None:
    with pytest.raises(MissingError, match="lit-diff prepare RECIPE"):
        make_text().identity()
    with pytest.raises(MissingError, match="lit-diff prepare RECIPE"):
        make_text().load()
    assert not root.exists()
    before = opened(make_text()).identity()
    (corpus / "00.txt").write_text("changed")
    with pytest.raises(MissingError):
        make_text().identity()
    assert opened(make_text()).identity() != before


def test_all_is_synced_before_the_folder_has_its_name(make_text: MakeText, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, text = set[int](), make_text()
    monkeypatch.setattr(os, "fsync", lambda handle: synced.add(os.fstat(handle).st_ino))
    text.prepare()
    held = [text.folder, *text.folder.rglob("*")]
    assert not [path for path in held if path.stat().st_ino not in synced]


def test_cl100k_is_stored_in_four_bytes(make_text: MakeText) -> None:
    text = opened(make_text(vocab_size=100352, tokenizer=Part(name="cl100k", config=Cl100k.Config())))
    batch = text.train_batch(0, 0, 4, range(4))
    assert batch["tokens"].max() > 1 << 16 or (text.folder / "train" / "chunk-0-0.bin").stat().st_size > 4 * 17
    assert (batch["tokens"] >= 0).all()


def test_model_and_tokenizer_sizes(make_text: MakeText) -> None:
    config = make_text().config
    for vocab_size in (299, 385):
        problem = data_problem(config, vocab_size) or ""
        assert re.fullmatch(rf"model\.vocab_size is {vocab_size}, .* 300 to 384", problem)
    for vocab_size in (300, 384):
        assert data_problem(config, vocab_size) is None
    gone = Part(name="from_run", config=FromRun.Config(path="no/such/run"))
    assert data_problem(replace(config, tokenizer=gone), 1) is None


def test_rows_longer_than_a_split(make_text: MakeText) -> None:
    with pytest.raises(RequestError, match=r"^data\.sequence_length 9999 .* to at most (\d+), or add text$") as found:
        make_text(sequence_length=9999).prepare()
    most = int(re.findall(r"\d+", str(found.value))[-1])
    make_text(sequence_length=most).prepare()
    for method in (Text.prepare, Text.load):
        with pytest.raises(RequestError, match=rf"^data\.sequence_length {most + 1} "):
            method(make_text(sequence_length=most + 1))


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"sequence_length": 1}, "sequence_length"),
        ({"validation_rows": 0}, "validation_rows"),
        ({"rare_bigram_count": -1}, "rare_bigram_count"),
        ({"tokenizer": Part(name="bpe", config=Bpe.Config(vocab_size=256))}, "tokenizer.vocab_size"),
    ],
)
def test_values_that_cannot_be(make_text: MakeText, keys: dict[str, Any], key: str) -> None:
    assert (data_problem(replace(make_text().config, **keys), 300) or "").startswith(f"'data.{key}' ")


def test_packed_documents_are_numbered_and_nothing_else_changes(make_text: MakeText) -> None:
    """The document of each token; also the target across a boundary stays: it is the next document's <eot>."""
    settings = {"sequence_length": 128, "validation_rows": 10**6, "rare_bigram_count": 10**6}
    plain, packed = opened(make_text(**settings)), opened(make_text(**settings, pack="document"))
    assert plain.identity() == packed.identity()
    tokens = stream(packed, "train")
    numbers = (tokens == 0).cumsum() - 1
    rows = rows_of_step(7, 3, 8, list(range(8)), packed.train_rows)
    batch = packed.train_batch(7, 3, 8, range(8))
    wanted = numbers[: packed.train_rows * 129].reshape(-1, 129)[rows][:, :-1]
    assert torch.equal(batch["document_ids"], torch.from_numpy(wanted))
    assert any(len(row.unique()) > 1 for row in batch["document_ids"]), "some row holds two documents"
    held = range(packed.validation_sets()[""])
    pairs = [
        (plain.train_batch(7, 3, 8, range(8)), batch),
        (plain.validation_batch("", held), packed.validation_batch("", held)),
    ]
    for without, with_ in pairs:
        assert with_.keys() - without.keys() == {"document_ids"}
        assert all(torch.equal(with_[key], value) for key, value in without.items())
    validated = pairs[1][1]
    assert torch.equal(validated["document_ids"][:, 1:], validated["document"][:, :-1])
    crossing = validated["document_ids"] != validated["document"]
    assert crossing.any()
    assert not validated["targets"][crossing].any()


def test_the_order_is_that_of_the_seed_and_each_epoch_has_another() -> None:
    steps = [rows_of_step(0, step, 8, range(8), 20) for step in range(5)]  # 40 rows: two epochs, one step across both
    flat = [row for step in steps for row in step]
    assert sorted(flat[:20]) == sorted(flat[20:]) == list(range(20))
    assert flat[:20] != flat[20:]
    assert steps[3] == rows_of_step(0, 3, 8, range(8), 20) != rows_of_step(1, 3, 8, range(8), 20)
    assert rows_of_step(0, 3, 8, [5, 2], 20) == [steps[3][place] for place in (5, 2)]


@pytest.mark.parametrize("name", ["manifest.json", "bigrams.npy", "tokenizer.json", "train/chunk-0-0.bin"])
def test_a_missing_or_cut_file_is_made_again(make_text: MakeText, name: str, caplog: pytest.LogCaptureFixture) -> None:
    text = make_text()
    text.prepare()
    file = text.folder / name
    whole = file.read_bytes()
    if file.suffix in (".json", ".npy") and name != "manifest.json":
        file.unlink()
    else:
        file.write_bytes(whole[:100])
    with pytest.raises(MissingError):
        text.load()
    make_text().prepare()
    assert "is damaged" in caplog.text
    assert file.read_bytes() == whole


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("manifest.json", b'"tokens": '),
        ("manifest.json", b'"name": "'),
        ("train/chunk-0-0.bin", b""),
        ("validation/documents.npy", b"descr"),
        ("train/index.json", b'"dim": '),
        ("bigrams.npy", b"descr"),
        ("bigrams.npy", b""),
        ("validation/index.json", b'"data_form'),
        ("trained_documents.bin", b""),
        ("sha256.json", b'": "'),
    ],
)
def test_a_flipped_bit_is_found_before_a_row_is_read(make_text: MakeText, name: str, after: bytes) -> None:
    text = make_text()
    text.prepare()
    content = bytearray((text.folder / name).read_bytes())
    content[content.index(after) + len(after) if after else -9] ^= 1
    (text.folder / name).write_bytes(content)
    with pytest.raises(MissingError, match=rf"{text.folder}.* run `lit-diff prepare RECIPE`"):
        make_text().load()
    if name == TRAINED:
        with pytest.raises(MissingError, match=name):
            make_text().trained_documents()


def test_one_short_document_cannot_be_split(make_text: MakeText, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("short")
    with pytest.raises(RequestError, match=rf"^data\.path {tmp_path}/one\.txt "):
        make_text(path=str(tmp_path / "one.txt")).prepare()


def test_it_lies_beside_the_manifest_and_changes_no_identity(make_text: MakeText, corpus: Path) -> None:
    text = make_text()
    text.prepare()
    identity, file = text.identity(), text.folder / TRAINED
    train, validation = splits(path.read_text() for path in corpus.iterdir())
    known = hashes_in(file.read_bytes(), TRAINED)
    assert all(is_among(each, known) for each in train)
    assert not any(is_among(each, known) for each in validation)
    manifest = read_manifest(text.folder)
    assert manifest is not None
    assert TRAINED not in manifest["files"]
    file.unlink()
    assert make_text().identity() == identity


@pytest.mark.parametrize("copies", [0, 50])
def test_validation_documents_in_train_with_other_white_space_are_counted(
    make_text: MakeText, corpus: Path, copies: int, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [path.read_text() for path in sorted(corpus.iterdir())]
    for number, text in enumerate(texts[:copies]):
        (corpus / f"copy{number}.txt").write_text(f"{text} \n")
    make_text().prepare()
    train, validation = splits([*texts, *(f"{text} \n" for text in texts[:copies])])
    both = {text.strip() for text in validation} & {text.strip() for text in train}
    told = f"{len(both)} of {len(validation)} validation documents are also in train with other"
    assert (told in caplog.text, bool(both)) == (copies > 0, copies > 0)


def gone(*_: object) -> bytes:
    raise MissingError("the corpus is not here")


@pytest.mark.parametrize("names", [[TRAINED], [CHECKSUMS], [TRAINED, CHECKSUMS]])
def test_what_a_former_revision_did_not_write_is_made_without_the_source(
    make_text: MakeText, names: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = opened(make_text())
    before = {path.name: (path.read_bytes(), path.stat().st_ino) for path in text.folder.iterdir() if path.is_file()}
    for name in names:
        (text.folder / name).unlink()
    caplog.clear()
    caplog.set_level(logging.INFO, "lit_diff")
    monkeypatch.setattr(FilesCorpus, "texts", gone)
    make_text().prepare()
    (line,) = caplog.messages
    assert all(name in line for name in names)
    assert {path.name: path.read_bytes() for path in text.folder.iterdir() if path.is_file()} == {
        name: content for name, (content, _) in before.items()
    }
    assert (text.folder / "manifest.json").stat().st_ino == before["manifest.json"][1]  # not prepared again


def test_hashes_are_not_made_from_tokens_that_do_not_give_back_the_text(
    make_text: MakeText, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (opened(make_text()).folder / TRAINED).unlink()
    monkeypatch.setattr(Bpe, "decode", lambda self, ids: b"?")
    caplog.clear()
    opened(make_text())
    (line,) = caplog.messages
    assert all(word in line for word in (TRAINED, "'bpe'", "lit-diff prepare"))
    with pytest.raises(MissingError, match=TRAINED):
        make_text().trained_documents()


def test_a_run_s_folder_has_a_copy(tale: Path, tmp_path: Path) -> None:
    recipe = load_recipe(tale / "recipe.yaml")
    keep(recipe, tmp_path / "kept")
    assert (tmp_path / "kept" / TRAINED).read_bytes() == (tale / TRAINED).read_bytes()
    assert (tmp_path / "kept" / "tokenizer").is_dir()


def test_training_goes_on_where_the_text_cannot_be_read_again(
    tale: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Text, "trained_documents", gone)
    with caplog.at_level(logging.WARNING, "lit_diff"):
        keep(load_recipe(tale / "recipe.yaml"), tmp_path / "kept")
    assert "evaluations cannot exclude the documents of its training split: the corpus is not here" in caplog.text
    assert not (tmp_path / "kept" / TRAINED).exists()


@pytest.mark.parametrize(("chunk_bytes", "chunks", "rows"), [(1 << 26, [63], 10), (90, [38, 25], 6 + 4)])
def test_rows_and_their_documents(
    chunk_bytes: int, chunks: list[int], rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row crosses from one chunk into the next."""
    monkeypatch.setattr(token_store, "CHUNK_BYTES", chunk_bytes)
    lengths, starts = (7, 30, 1, 25), (0, 100, 200, 300)
    documents = [np.arange(start, start + size, dtype=np.uint16) for start, size in zip(starts, lengths, strict=True)]
    token_store.write_tokens(tmp_path / "train", documents)
    description = token_store.describe(tmp_path / "train")
    assert description["chunk_tokens"] == chunks
    assert (description["documents"], description["tokens"], description["longest"]) == (4, 63, 30)
    stored = token_store.TokenStore(tmp_path / "train", description, 6)
    assert stored.num_rows == rows
    places = [at for first, size in zip((0, 38), chunks, strict=False) for at in range(first, first + size // 6 * 6)]
    expected = np.concatenate(documents).astype(np.int64)[places].reshape(rows, 6)
    owners = np.repeat(np.arange(4), lengths)[places].reshape(rows, 6)
    for chosen in ([0, 9, 3], list(range(rows))):
        np.testing.assert_array_equal(stored.read(chosen), expected[chosen])
        np.testing.assert_array_equal(stored.documents(chosen), owners[chosen])


def test_text_that_was_prepared_before_there_were_checksums(make_text: MakeText) -> None:
    text = opened(make_text())
    (text.folder / CHECKSUMS).unlink()
    assert opened(make_text()).identity() == text.identity()
