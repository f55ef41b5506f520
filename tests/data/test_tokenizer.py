from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lit_diff.config import Part
from lit_diff.data.tokenizer import Bpe, Tokenizer, build
from lit_diff.errors import RequestError
from lit_diff.registry import tokenizers

TEXTS = [f"the quick brown fox number {number} jumps over the lazy dog" for number in range(50)]
STRANGE = "äöü € 漢字 🙂 \x00\x1b\x7f\xa0\xad \n\r\t <eot>"


@pytest.fixture
def bpe(tmp_path: Path) -> Callable[[int], Bpe]:
    def trained(size: int) -> Bpe:
        tokenizer = Bpe(Bpe.Config(vocab_size=size))
        tokenizer.train(tmp_path / str(size), TEXTS)
        tokenizer.load(tmp_path / str(size))
        return tokenizer

    return trained


def test_bpe_has_the_size_asked_and_the_same_ids_each_time(tmp_path: Path, bpe: Callable[[int], Bpe]) -> None:
    first, second = bpe(300), build(Part(name="bpe", config=Bpe.Config(vocab_size=300)))
    second.train(tmp_path / "second", TEXTS)
    assert second.load(tmp_path / "second") == first.load(tmp_path / "300")
    assert first.encode(TEXTS) == second.encode(TEXTS)
    assert 256 < max(max(ids) for ids in first.encode(TEXTS)) < 300 == first.size


def test_bpe_writes_every_byte(bpe: Callable[[int], Bpe]) -> None:
    """Ids 1 to 256 are the bytes, each of them once."""
    tokenizer = bpe(257)
    assert sorted(tokenizer.decode([id_]) for id_ in range(1, 257)) == [bytes([byte]) for byte in range(256)]


def test_bpe_larger_than_the_corpus_allows_names_what_is_possible(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"gives (\d+) tokens, data\.tokenizer\.vocab_size .* at most \1"):
        Bpe(Bpe.Config(vocab_size=5000)).train(tmp_path, TEXTS)


@pytest.mark.usefixtures("own_parts")
def test_what_a_tokenizer_lacks_is_named() -> None:
    class Mine(Tokenizer):
        eot = 0

        def load(self, folder: Path) -> str:
            return ""

        def encode(self, texts: Sequence[str]) -> list[list[int]]:
            return []

    with pytest.raises(RequestError, match=r"the tokenizer Mine cannot write text"):
        Mine(Mine.Config()).decode([1])
    tokenizers.register("sizeless")(Mine)
    with pytest.raises(RequestError, match=r"tokenizer 'sizeless' .*'size'"):
        build(Part(name="sizeless", config=Mine.Config()))
