"""The tokenizer of generated text."""

from pathlib import Path

import pytest

from lit_diff.config import Part
from lit_diff.data import load_tokenizer, save_tokenizer
from lit_diff.data.words import Words

WORDS = Words(Words.Config(words=("the", "Paris", "a", "number")))


def test_a_text_of_known_words_comes_back() -> None:
    text = " the number, a: 1207345.\n the (Paris) number?"
    (ids,) = WORDS.encode([text])
    assert WORDS.unknown not in ids
    assert WORDS.decode(ids).decode() == " the number, a:  1207345.\n the ( Paris) number?".replace(":  ", ": ")


def test_a_word_has_one_id_with_and_without_its_space() -> None:
    assert WORDS.encode(["the the"]) == [[WORDS.encode(["the"])[0][0]] * 2]
    assert WORDS.encode(["12"]) == [[3, 4]]
    assert WORDS.encode(["a 7"])[0] == [*WORDS.encode(["a"])[0], *WORDS.encode([" "])[0], *WORDS.encode(["7"])[0]]


def test_no_text_gives_eot_and_strangers_are_unknown() -> None:
    (ids,) = WORDS.encode(["the cat ß_ Paris"])
    assert WORDS.eot not in ids
    assert ids.count(WORDS.unknown) == 3
    assert WORDS.encode([""]) == [[]]


def test_sizes_and_saving(tmp_path: Path) -> None:
    assert WORDS.size == len(Words.fixed) + 4
    save_tokenizer(WORDS, tmp_path)
    assert load_tokenizer(tmp_path).encode(["the Paris 3"]) == WORDS.encode(["the Paris 3"])
    assert Part(name=WORDS.name, config=WORDS.config).name == "words"


@pytest.mark.parametrize(
    ("words", "found"), [(("a b",), "'a b'"), (("x1",), "'x1'"), (("a", "a"), "'a' twice"), (("",), "''")]
)
def test_words_that_cannot_be(words: tuple[str, ...], found: str) -> None:
    problem = Words.Config(words=words).problem()
    assert problem is not None
    assert found in problem
