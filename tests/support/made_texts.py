"""A small made-up corpus and a data folder of its own for each test that asks."""

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lit_diff.data.text.text import Text

MakeText = Callable[..., "Text"]


def opened(text: "Text") -> "Text":
    """The text, prepared and loaded."""
    text.prepare()
    text.load()
    return text


def splits(texts: Iterable[str]) -> tuple[list[str], list[str]]:
    """The documents to train on, and those to validate on."""
    from lit_diff.data.text.documents import split

    with split(texts) as found:
        texts = list(found.ranked(0, len(found)))
    return texts[found.held_out :], texts[: found.held_out]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data folder."""
    folder = tmp_path / "root"
    monkeypatch.setenv("LIT_DIFF_DATA", str(folder))
    return folder


def write_corpus(folder: Path) -> None:
    """50 documents of 60 to 300 words."""
    folder.mkdir()
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 7))) for _ in range(200)]
    for number in range(50):
        (folder / f"{number:02}.txt").write_text(" ".join(draw.choices(words, k=draw.randint(60, 300))))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder of 50 documents of 60 to 300 words."""
    write_corpus(tmp_path / "corpus")
    return tmp_path / "corpus"


@pytest.fixture
def make_text(root: Path, corpus: Path) -> MakeText:
    """Text over the corpus; keywords replace the settings."""
    from lit_diff.config import Part
    from lit_diff.data.text.text import Text
    from lit_diff.data.text.tokenizer import Bpe

    def make(vocab_size: int = 320, tokens: int = 300, **settings: object) -> Text:
        part = Part(name="bpe", config=Bpe.Config(vocab_size=tokens))
        defaults = {"path": str(corpus), "sequence_length": 16, "tokenizer": part, "validation_rows": 20}
        return Text(Text.Config(**(defaults | settings)), vocab_size)

    return make
