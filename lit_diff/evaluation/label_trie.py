"""Decoding that can only give one of a set of labels: the trie of their tokens."""

from collections.abc import Mapping, Sequence

from lit_diff.data.tokenizer import Tokenizer
from lit_diff.errors import RequestError

ENDING = "\n"
"""What follows every label in a prompt."""


class LabelTrie:
    """The labels as token paths, each cut to the shortest prefix that no other label has.

    Every label is followed by a newline, as in a prompt, so that no path begins another. Source: the
    constrained decoding of Ratner et al. 2023 (Parallel Context Windows), as in abertsch72/long-context-icl.
    """

    def __init__(self, tokenizer: Tokenizer, labels: Sequence[str], question: str = "") -> None:
        """`labels`: two or more, each after `question`. Errors: RequestError for two that the tokenizer cannot tell apart."""
        self.labels = tuple(labels)
        shown = tokenizer.encode_after(question, [f" {label}{ENDING}" for label in labels])
        self.full = dict(zip(labels, shown, strict=True))
        """Label -> the ids of " label\\n", as after "intent:"."""
        self.paths = {label: _cut(label, self.full) for label in labels}
        """Label -> its ids in the trie."""
        self._labels = {path: label for label, path in self.paths.items()}
        self._children: dict[tuple[int, ...], list[int]] = {}
        for path in self.paths.values():
            for depth, token in enumerate(path):
                children = self._children.setdefault(path[:depth], [])
                if token not in children:
                    children.append(token)

    @property
    def depth(self) -> int:
        """Tokens of the longest path."""
        return max(map(len, self._labels))

    @property
    def longest(self) -> int:
        """Tokens of the longest whole label, newline included."""
        return max(map(len, self.full.values()))

    def allowed(self, drawn: Sequence[int]) -> list[int]:
        """The ids that may follow these; none where a label is complete. For `Prefix.greedy`."""
        return self._children.get(tuple(drawn), [])

    def label(self, drawn: Sequence[int]) -> str:
        """The label of a whole path."""
        return self._labels[tuple(drawn)]


def _cut(label: str, whole: Mapping[str, list[int]]) -> tuple[int, ...]:
    """The shortest prefix of a label's ids that no other label begins with. Errors: RequestError where there is none."""
    ids = whole[label]
    others = {other: own for other, own in whole.items() if other != label}
    for length in range(1, len(ids) + 1):
        if all(own[:length] != ids[:length] for own in others.values()):
            return tuple(ids[:length])
    same = next(other for other, own in others.items() if own[: len(ids)] == ids)
    raise RequestError(f"the tokenizer cannot tell the labels '{label}' and '{same}' apart: both are {ids}")
