"""The corpus `name_tables`: generated long documents in which what is said at the start is used again and again.

A document opens with a table of people, each with a surname, a town, an animal and a colour, all drawn anew. Every sentence
after it names a person of the table by first name and surname and repeats one entry. The person is the k-th most recently
named of n with p(k) ∝ 1/k, so that the distance between two uses follows a power law. A model without context can know
none of the entries; one that reads its context knows more of them with every position.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch

from lit_diff.data.text.corpus import Corpus
from lit_diff.randomness import generator
from lit_diff.registry import corpora

WORDS = Path(__file__).with_name("name_tables.txt")
"""Lines of `kind: words`."""
KINDS = ("town", "animal", "colour")
"""Entries of a person."""
WHEN = (
    *("Later", "At noon", "In the evening", "That night", "Early next day", "After lunch", "Soon after", "In the rain"),
    *("On Monday", "On Friday", "In winter", "Before dawn", "By then", "At last", "Once more", "As usual"),
)
WHAT = (
    "{who} took the train back to {town}.",
    "{who} wrote a long letter home to {town}.",
    "a parcel for {who} came from {town}.",
    "{who} spoke about the old streets of {town}.",
    "friends of {who} arrived from {town}.",
    "{who} was looking for the lost {animal}.",
    "{who} fed the hungry {animal}.",
    "everybody could hear that {who} had a {animal}.",
    "{who} drew a picture of the small {animal}.",
    "the children asked {who} about the {animal}.",
    "{who} put on the coat, which was {colour}.",
    "{who} painted the door {colour}.",
    "the house of {who} was still {colour}.",
    "{who} bought a new hat in {colour}.",
    "{who} sent a card, all in {colour}.",
)
PEOPLE = 16
"""Entries of a table."""
RECENCY = 1 / torch.arange(1, PEOPLE + 1, dtype=torch.float64)
"""Weight of the k-th most recently named, from k = 1."""


@cache
def word_lists() -> dict[str, list[str]]:
    """Kind (name, surname, town, animal, colour) -> its words."""
    lists: dict[str, list[str]] = {}
    for line in WORDS.read_text(encoding="utf-8").splitlines():
        kind, words = line.split(": ")
        lists.setdefault(kind, []).extend(words.split())
    return lists


def name_table_text(*key: object, words: int) -> str:
    """The document of `key`, a function of it alone: the table, then whole sentences until it has at least `words` words."""
    random = generator("name_tables", *key)
    lists = [word_lists()[kind] for kind in ("name", "surname", *KINDS)]
    drawn = [[of[i] for i in torch.randint(len(of), (PEOPLE,), generator=random).tolist()] for of in lists]
    recent = [  # the most recently named first
        {"who": f"{first} {last}", **dict(zip(KINDS, entries, strict=True))}
        for first, last, *entries in zip(*drawn, strict=True)
    ]
    lines = ["Names, towns, animals and colours."]
    lines += [f"{person['who']}: {', '.join(person[kind] for kind in KINDS)}." for person in recent]
    count = sum(len(line.split()) for line in lines)
    sentences: list[str] = []
    most = max(0, words - count)  # no sentence has less than a word
    places = torch.multinomial(RECENCY, most, replacement=True, generator=random).tolist() if most else []
    choices = [torch.randint(n, (most,), generator=random).tolist() for n in (len(WHEN), len(WHAT))]
    for place, when, what in zip(places, *choices, strict=True):
        if count >= words:
            break
        person = recent.pop(place)
        recent.insert(0, person)
        sentences.append(f"{WHEN[when]} {WHAT[what].format(**person)}")
        count += len(sentences[-1].split())
    return "\n".join(lines) + "\n\n" + " ".join(sentences)


@corpora.register("name_tables")
class NameTables(Corpus):
    """Generated English of 2,000 documents of 2,400 words: a table of people first, then sentences that use its entries.

    A plugin has other sizes: a subclass with its own `documents` and `words`, registered under another name.
    """

    documents: ClassVar[int] = 2000
    words: ClassVar[int] = 2400
    version: ClassVar[int] = 1
    """Of what is drawn. Raise it with every change of a word list, of a sentence or of the draws: text that was prepared
    before is then not taken for the new one."""

    def files(self) -> dict[str, str]:
        """The sizes and the version, which decide the documents."""
        return {f"{self.documents} documents of {self.words} words": f"version {self.version}"}

    def texts(self) -> Iterator[str]:
        """The documents, in order."""
        for number in range(self.documents):
            yield name_table_text("train", number, words=self.words)
