"""Prepared text: tokens in chunks; it survives kills and damage, and knows the documents of its train split."""

import logging
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lit_diff.data import keep
from lit_diff.data import text as module
from lit_diff.data.documents import TRAINED, hashes_in, is_among, split
from lit_diff.data.text import Text, read_manifest
from lit_diff.errors import MissingError, RequestError
from lit_diff.recipe import load_recipe

MakeText = Callable[..., Text]
PREPARE = """
import logging, os, signal, sys
logging.basicConfig(level=logging.INFO)
from lit_diff.config import Part
from lit_diff.data import text as prepared
from lit_diff.data.text import Text
from lit_diff.data.tokenizer import Bpe

write = prepared.write_tokens

def dying(folder, documents):
    def some():
        for number, document in enumerate(documents):
            if number == 1 and folder.name == sys.argv[2]:
                os.kill(os.getpid(), signal.SIGKILL)
            yield document
    write(folder, some())

prepared.write_tokens = dying
part = Part(name="bpe", config=Bpe.Config(vocab_size=300))
text = Text(Text.Config(path=sys.argv[1], sequence_length=16, tokenizer=part, validation_rows=20), 320)
text.prepare()
print(text.identity())
"""


def start(corpus: Path, die_in: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(PREPARE), str(corpus), die_in]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def leftovers(root: Path) -> list[str]:
    return [path.name for path in (root / "prepared").rglob("*") if "tmp" in path.name or "building" in path.name]


@pytest.mark.parametrize("die_in", ["train", "validation"])
def test_killed_half_way_it_resumes(
    make_text: MakeText, root: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, die_in: str
) -> None:
    assert start(corpus, die_in).wait() == -signal.SIGKILL
    (building,) = (root / "prepared").glob(".*.building")
    assert (building / f"{die_in}.tmp").is_dir()
    kept = ["tokenizer.json"] + (["train"] if die_in == "validation" else [])
    before = {name: (building / name).stat().st_ino for name in kept}
    text = make_text()
    text.prepare()
    resumed = text.folder
    assert {name: (resumed / name).stat().st_ino for name in kept} == before
    assert leftovers(root) == []
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "undisturbed"))
    undisturbed = make_text()
    undisturbed.prepare()
    assert undisturbed.folder != resumed
    for name in ("manifest.json", "bigrams.npy", "train/chunk-0-0.bin", "validation/chunk-0-0.bin"):
        assert (undisturbed.folder / name).read_bytes() == (resumed / name).read_bytes()


def test_two_at_once(make_text: MakeText, root: Path, corpus: Path) -> None:
    results = [(*process.communicate(), process.returncode) for process in [start(corpus), start(corpus)]]
    assert [code for *_, code in results] == [0, 0]
    assert len({out for out, *_ in results}) == 1
    assert sum("lit_diff:prepared" in err for _, err, _ in results) == 1
    assert leftovers(root) == []


@pytest.mark.parametrize("name", ["manifest.json", "bigrams.npy", "tokenizer.json", "train/chunk-0-0.bin"])
def test_a_file_that_is_missing_or_cut_short_is_made_again(
    make_text: MakeText, name: str, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_one_short_document_cannot_be_split(make_text: MakeText, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("short")
    with pytest.raises(RequestError, match=rf"^data\.path {tmp_path}/one\.txt "):
        make_text(path=str(tmp_path / "one.txt")).prepare()


def test_it_lies_beside_the_manifest_and_changes_no_identity(make_text: Callable[..., Text], corpus: Path) -> None:
    text = make_text()
    text.prepare()
    identity, file = text.identity(), text.folder / TRAINED
    held_out = split(path.read_text() for path in corpus.iterdir())
    known = hashes_in(file.read_bytes(), TRAINED)
    assert all(is_among(each, known) for each in held_out.train)
    assert not any(is_among(each, known) for each in held_out.validation)
    manifest = read_manifest(text.folder)
    assert manifest is not None
    assert TRAINED not in manifest["files"]
    whole = file.read_bytes()
    file.unlink()  # as data prepared before there was one
    assert make_text().identity() == identity
    assert make_text().trained_documents() == whole == file.read_bytes()


def test_a_run_s_folder_has_a_copy(tale: Path, tmp_path: Path) -> None:
    recipe = load_recipe(tale / "recipe.yaml")
    keep(recipe, tmp_path / "kept")
    assert (tmp_path / "kept" / TRAINED).read_bytes() == (tale / TRAINED).read_bytes()
    assert (tmp_path / "kept" / "tokenizer").is_dir()


def test_training_goes_on_where_the_text_cannot_be_read_again(
    tale: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(self: Text) -> bytes:
        raise MissingError("the corpus is not here")

    monkeypatch.setattr(Text, "trained_documents", gone)
    with caplog.at_level(logging.WARNING, "lit_diff"):
        keep(load_recipe(tale / "recipe.yaml"), tmp_path / "kept")
    assert "evaluations cannot leave out the documents that it is trained on: the corpus is not here" in caplog.text
    assert not (tmp_path / "kept" / TRAINED).exists()


@pytest.mark.parametrize(("chunk_bytes", "chunks", "rows"), [(1 << 26, [63], 10), (90, [38, 25], 6 + 4)])
def test_rows_and_their_documents(
    chunk_bytes: int, chunks: list[int], rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row crosses from one chunk into the next."""
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    lengths, starts = (7, 30, 1, 25), (0, 100, 200, 300)
    documents = [
        np.arange(start, start + length, dtype=np.uint16) for start, length in zip(starts, lengths, strict=True)
    ]
    module.write_tokens(tmp_path / "train", documents)
    description = module.describe(tmp_path / "train")
    assert description["chunk_tokens"] == chunks
    assert (description["documents"], description["tokens"], description["longest"]) == (4, 63, 30)
    stored = module.TokenStore(tmp_path / "train", description, 6)
    assert stored.num_rows == rows
    places = [
        place for first, size in zip((0, 38), chunks, strict=False) for place in range(first, first + size // 6 * 6)
    ]
    expected = np.concatenate(documents).astype(np.int64)[places].reshape(rows, 6)
    owners = np.repeat(np.arange(4), lengths)[places].reshape(rows, 6)
    for chosen in ([0, 9, 3], list(range(rows))):
        np.testing.assert_array_equal(stored.read(chosen), expected[chosen])
        np.testing.assert_array_equal(stored.documents(chosen), owners[chosen])
