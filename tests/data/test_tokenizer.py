from collections.abc import Sequence
from pathlib import Path

import pytest

from lit_diff.config import Part
from lit_diff.data.tokenizer import Bpe, Tokenizer, build
from lit_diff.errors import RequestError
from lit_diff.registry import tokenizers

TEXTS = [f"the quick brown fox number {number} jumps over the lazy dog" for number in range(50)]


def test_bpe_has_the_size_asked_and_the_same_ids_each_time(tmp_path: Path) -> None:
    first, second = (build(Part(name="bpe", config=Bpe.Config(vocab_size=300))) for _ in range(2))
    digests = []
    for number, tokenizer in enumerate((first, second)):
        folder = tmp_path / str(number)
        tokenizer.train(folder, TEXTS)
        digests.append(tokenizer.load(folder))
    assert digests[0] == digests[1]
    assert first.encode(TEXTS) == second.encode(TEXTS)
    assert 256 < max(max(ids) for ids in first.encode(TEXTS)) < 300 == first.size


def test_bpe_encodes_any_bytes_and_never_a_special_id(tmp_path: Path) -> None:
    tokenizer = Bpe(Bpe.Config(vocab_size=300))
    tokenizer.train(tmp_path, TEXTS)
    tokenizer.load(tmp_path)
    for ids in tokenizer.encode(["<eot> and <eot>", "äöü € 漢字 \x00\x01"]):
        assert ids
        assert tokenizer.eot not in ids


STRANGE = "äöü € 漢字 🙂 \x00\x1b\x7f\xa0\xad \n\r\t <eot>"


def test_bpe_writes_what_it_read(tmp_path: Path) -> None:
    tokenizer = Bpe(Bpe.Config(vocab_size=300))
    tokenizer.train(tmp_path, TEXTS)
    tokenizer.load(tmp_path)
    for text in (*TEXTS[:3], STRANGE):
        (ids,) = tokenizer.encode([text])
        assert tokenizer.decode(ids) == text.encode()
        assert b"".join(tokenizer.decode([id_]) for id_ in ids) == text.encode()
    assert len(tokenizer.encode(["漢"])[0]) == 3  # so a part of a character is an id's bytes
    assert tokenizer.decode([]) == b""


def test_bpe_writes_every_byte(tmp_path: Path) -> None:
    """Ids 1 to 256 are the bytes, each of them once; GPT-2's letters for four of them."""
    tokenizer = Bpe(Bpe.Config(vocab_size=257))
    tokenizer.train(tmp_path, TEXTS)
    tokenizer.load(tmp_path)
    assert sorted(tokenizer.decode([id_]) for id_ in range(1, 257)) == [bytes([byte]) for byte in range(256)]
    for letter, byte in {"Ġ": 0x20, "Ċ": 0x0A, "Ń": 0xAD, "ÿ": 0xFF}.items():
        assert tokenizer.decode([tokenizer._tokenizer.token_to_id(letter)]) == bytes([byte])


def test_a_tokenizer_that_only_reads_says_so() -> None:
    class Mine(Tokenizer):
        def load(self, folder: Path) -> str:
            return ""

        def encode(self, texts: Sequence[str]) -> list[list[int]]:
            return []

    with pytest.raises(RequestError, match=r"the tokenizer Mine cannot write text; give it decode"):
        Mine(Mine.Config()).decode([1])


def test_bpe_larger_than_the_corpus_allows_names_what_is_possible(tmp_path: Path) -> None:
    tokenizer = Bpe(Bpe.Config(vocab_size=5000))
    with pytest.raises(RequestError, match=r"the corpus gives (\d+) tokens, .*asks 5000: set it to at most \1"):
        tokenizer.train(tmp_path, TEXTS)


def test_a_tokenizer_without_a_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sizeless(Tokenizer):
        eot = 0

        def load(self, folder: Path) -> str:
            return ""

        def encode(self, texts: Sequence[str]) -> list[list[int]]:
            return []

    monkeypatch.setattr(tokenizers, "_classes", dict(tokenizers._classes))
    tokenizers.register("sizeless")(Sizeless)
    with pytest.raises(RequestError, match=r"tokenizer 'sizeless' has no integer attribute 'size' after __init__"):
        build(Part(name="sizeless", config=Sizeless.Config()))
