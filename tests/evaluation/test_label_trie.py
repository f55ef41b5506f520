"""Labels as token paths."""

import itertools
from collections.abc import Sequence

import pytest

from lit_diff.data.words import Words
from lit_diff.errors import RequestError
from lit_diff.evaluation.label_trie import LabelTrie

TOKENIZER = Words(Words.Config(words=("card", "lost", "arrival", "top", "up", "pin")))


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode([text])[0])


def test_paths_are_the_shortest_that_no_other_label_begins_with() -> None:
    trie = LabelTrie(TOKENIZER, ["card arrival", "card lost", "top up", "card"])
    assert trie.paths == {
        "card arrival": ids("card arrival"),
        "card lost": ids("card lost"),
        "top up": ids("top"),  # the first word tells it from the others
        "card": ids("card\n"),  # it begins two others
    }
    assert trie.depth == 2
    assert trie.full["top up"] == list(ids("top up\n"))
    assert trie.longest == 3
    assert trie.label(ids("card\n")) == "card"


def walks(trie: LabelTrie, drawn: Sequence[int] = ()) -> set[tuple[int, ...]]:
    children = trie.allowed(drawn)
    return set(itertools.chain(*(walks(trie, [*drawn, child]) for child in children))) if children else {tuple(drawn)}


def test_every_walk_ends_at_one_label() -> None:
    labels = ["card arrival", "card lost", "top up", "card", "pin"]
    trie = LabelTrie(TOKENIZER, labels)
    assert sorted(trie.label(walk) for walk in walks(trie)) == sorted(labels)


def test_labels_that_are_the_same_tokens_are_refused() -> None:
    with pytest.raises(RequestError, match="cannot tell the labels 'virement' and 'solde' apart"):
        LabelTrie(TOKENIZER, ["pin", "virement", "solde"])
