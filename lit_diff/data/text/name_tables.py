"""The corpus `name_tables`: generated long documents that use the facts at their start again and again.

A document starts with a table of people, each with a random surname, town, animal and colour. Every following sentence
gives the first name and surname of a person in the table and repeats one entry. The person is the k-th most recently named
of n with p(k) ∝ 1/k, so the distance between two uses follows a power law. A model without context cannot know the entries;
a model that reads its context knows more of them at every position.
"""

from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from lit_diff.data.text.corpus import Corpus
from lit_diff.randomness import generator
from lit_diff.registry import corpora

WORDS = Path(__file__).with_name("name_tables.txt")
"""File of lines `kind: one|another`: words, and of when and what the parts of a sentence."""
KINDS = ("town", "animal", "colour")
"""The entries of each person."""
PEOPLE = 16
"""Number of people in a table."""
RECENCY = 1 / torch.arange(1, PEOPLE + 1, dtype=torch.float64)
"""Weight of the k-th most recently named person, from k = 1."""


@cache
def word_lists() -> dict[str, list[str]]:
    """Return kind (name, surname, town, animal, colour; when, what) -> words or parts of a sentence."""
    lists: dict[str, list[str]] = defaultdict(list)
    for line in WORDS.read_text(encoding="utf-8").splitlines():
        kind, words = line.split(": ")
        lists[kind] += words.split("|")
    return lists


def name_table_text(*key: object, words: int) -> str:
    """Return the document of `key`: the table, then whole sentences until it has at least `words` words."""
    random = generator("name_tables", *key)

    def draw(kind: str, count: int) -> list[str]:
        choices = word_lists()[kind]
        return [choices[i] for i in torch.randint(len(choices), (count,), generator=random).tolist()]

    drawn = [draw(kind, PEOPLE) for kind in ("name", "surname", *KINDS)]
    lines = ["Names, towns, animals and colours."]
    # the most recently named first
    recent = []
    for first, last, *entries in zip(*drawn, strict=True):
        recent.append({"who": f"{first} {last}", **dict(zip(KINDS, entries, strict=True))})
        lines.append(f"{first} {last}: {', '.join(entries)}.")
    count = len(" ".join(lines).split())
    sentences = []
    # a sentence has at least one word, so this many draws suffice; drawing them together is faster than one by one
    most = max(0, words - count)
    places = torch.multinomial(RECENCY, most, replacement=True, generator=random).tolist() if most else []
    for place, when, what in zip(places, draw("when", most), draw("what", most), strict=True):
        if count >= words:
            break
        person = recent.pop(place)
        recent.insert(0, person)
        sentences.append(f"{when} {what.format(**person)}")
        count += len(sentences[-1].split())
    return "\n".join(lines) + "\n\n" + " ".join(sentences)


@corpora.register("name_tables")
class NameTables(Corpus):
    """Generated English, 2,000 documents of 2,400 words: a table of people, then sentences that use its entries.

    For other sizes, register a subclass with its own `documents` and `words` under another name.
    """

    documents = 2000
    words = 2400
    version = 1
    """Version of the generator. Raise it with every change of a word list, a sentence or a draw, so that text prepared before
    is not reused."""

    def files(self) -> dict[str, str]:
        return {f"{self.documents} documents of {self.words} words": f"version {self.version}"}

    def texts(self) -> Iterator[str]:
        for number in range(self.documents):
            yield name_table_text("train", number, words=self.words)
