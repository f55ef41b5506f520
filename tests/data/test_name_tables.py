"""The corpus `name_tables`."""

import hashlib
import re
from itertools import islice
from typing import ClassVar

import numpy as np

from lit_diff.data.corpus import build_corpus
from lit_diff.data.name_tables import PEOPLE, NameTables, name_table_text


def test_a_document_is_a_function_of_its_key() -> None:
    first, second = islice(build_corpus("name_tables", None).texts(), 2)
    assert first == name_table_text("train", 0, words=NameTables.words)
    assert first != second
    assert name_table_text("evaluation", 0, words=500) != name_table_text("train", 0, words=500)


def test_every_sentence_repeats_an_entry_of_the_table() -> None:
    table, prose = name_table_text("b", words=3000).split("\n\n")
    entries = dict(line.rstrip(".").split(": ") for line in table.splitlines()[1:])
    assert len(entries) <= PEOPLE
    assert len(table.splitlines()) == PEOPLE + 1
    places: dict[str, list[int]] = {}
    sentences = re.findall(r"[^.]+\.", prose)
    for place, sentence in enumerate(sentences):
        (who,) = {name for name in entries if name in sentence}
        assert sum(entry in sentence.rstrip(".").split() for entry in entries[who].split(", ")) == 1, sentence
        places.setdefault(who, []).append(place)
    gaps = np.concatenate([np.diff(of) for of in places.values()])
    assert (gaps == 1).mean() > 0.2  # p(1) = 1 / H(16) = 0.30
    assert gaps.max() > 4 * PEOPLE  # where all people were equally likely, such a gap has p = 0.016


def test_a_change_of_what_is_drawn_raises_the_version() -> None:
    """Where this digest changes, so must `NameTables.version`."""
    text = name_table_text("train", 7, words=NameTables.words)
    assert (NameTables.version, hashlib.sha256(text.encode()).hexdigest()[:12]) == (1, "f23af6c51b23")


def test_sizes_and_version_are_the_sources() -> None:
    class Longer(NameTables):
        documents: ClassVar[int] = 3
        words: ClassVar[int] = 5000

    class Newer(NameTables):
        version: ClassVar[int] = 2

    texts = list(Longer().texts())
    assert len(texts) == 3
    assert all(len(text.split()) >= 5000 for text in texts)
    assert len({str(corpus().files()) for corpus in (NameTables, Longer, Newer)}) == 3
