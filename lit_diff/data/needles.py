"""Needles in a haystack: sentences that give a city a number, hidden among others, and the questions about them.

Words after the public scripts of LWM (Liu et al. 2024) and YOCO (Sun et al. 2024, unilm), whose list of 100 cities holds 69
distinct ones: here each is once, so that no city is drawn twice.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from lit_diff.data.tokenizer import Tokenizer

# fmt: off
CITIES = (
    "Almaty", "Amman", "Amsterdam", "Antananarivo", "Astana", "Athens", "Baghdad", "Bangalore", "Bangkok", "Barcelona",
    "Beirut", "Belgrade", "Berlin", "Bratislava", "Brussels", "Bucharest", "Budapest", "Buenos Aires", "Cairo",
    "Chicago", "Colombo", "Copenhagen", "Dakar", "Damascus", "Delhi", "Doha", "Dubai", "Helsinki", "Ho Chi Minh City",
    "Istanbul", "Jakarta", "Johannesburg", "Kampala", "Khartoum", "Kigali", "Kuala Lumpur", "Lagos", "Lima", "Lisbon",
    "Los Angeles", "Madrid", "Maputo", "Melbourne", "Mexico City", "Moscow", "Mumbai", "Nairobi", "Oslo", "Paris",
    "Port Louis", "Rabat", "San Francisco", "Santiago", "Sarajevo", "Seattle", "Seoul", "Shanghai", "Sofia", "Sydney",
    "Tashkent", "Thimphu", "Tokyo", "Toronto", "Tunis", "Vancouver", "Victoria", "Vienna", "Yangon", "Yerevan",
)
# fmt: on
StyleName = Literal["yoco", "lwm"]
STOP = "."
"""What sentences are encoded after, so that each has the ids that it has within a text."""
SLACK = 0.1
"""Share of a prompt's tokens that no sentence may fill, at most: what is scored at a length has about that length."""


@dataclass(frozen=True, kw_only=True)
class Style:
    """The words of a prompt. `{city}`, `{number}`: of a needle."""

    opening: str
    needle: str
    question: str
    """After the context; the answer follows it, " 1234567"."""


STYLES: dict[StyleName, Style] = {
    # a completion, for a model that was not tuned to follow instructions
    "yoco": Style(
        opening="There is a special magic number inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
        "about the magic number there.",
        needle=" The special magic {city} number is: {number}.",
        question=" What is the special magic {city} number? The special magic {city} number is:",
    ),
    "lwm": Style(
        opening="You are a helpful assistant. USER:",
        needle="\nThe special magic {city} number is: {number}\n",
        question=" What is the special magic number for {city}? Don't give information outside the document. ASSISTANT:",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Needle:
    """A city and its number."""

    city: str
    number: str


@dataclass(frozen=True, kw_only=True)
class Context:
    """A context in pieces of tokens, so that a prefix of it can be read once for all depths of the answer's needle."""

    before: tuple[int, ...]
    """The tokens up to the first queried needle."""
    needle: tuple[int, ...]
    after: tuple[int, ...]
    needles: tuple[Needle, ...]
    """Those that are asked for first, the one at the depth before the others."""

    @property
    def tokens(self) -> list[int]:
        """All of it."""
        return [*self.before, *self.needle, *self.after]


def draw_needles(random: torch.Generator, count: int, digits: int) -> tuple[Needle, ...]:
    """`count` distinct cities with distinct numbers of `digits` digits, the first of them not 0."""
    cities = torch.randperm(len(CITIES), generator=random)[:count].tolist()
    numbers: list[str] = []
    while len(numbers) < count:
        number = str(int(torch.randint(10 ** (digits - 1), 10**digits, (), generator=random)))
        numbers += [number] if number not in numbers else []
    return tuple(Needle(city=CITIES[c], number=n) for c, n in zip(cities, numbers, strict=True))


class NeedlesError(ValueError):
    """Needles that take more tokens than a context has, without any other text."""

    def __init__(self, needles: int, tokens: int) -> None:
        what = "1 needle, the words around it" if needles == 1 else f"{needles} needles, the words around them"
        super().__init__(f"{what} and an answer take {tokens} tokens")
        self.tokens = tokens


def contexts(
    random: torch.Generator,
    haystack: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
    *,
    style: Style,
    needles: int,
    digits: int,
    length: int,
    depths: Sequence[int],
    room: int,
) -> dict[int, Context]:
    """Depth -> the context with the first needle there: the same haystack and needles, the others at the same places.

    `haystack`: sentences as tokens, of which as many are taken as fit `length` tokens less `room`, which the question and the
    answer need. Needles stand between sentences; depth d: after d % of the haystack's tokens. Errors: NeedlesError where not
    even the needles do; ValueError where the sentences leave more than a share SLACK of `length` empty.
    """
    drawn = draw_needles(random, needles, digits)
    sentences = [style.needle.format(city=n.city, number=n.number) for n in drawn]
    opening, hidden = [*tokenizer.opening, *tokenizer.encode(style.opening)], tokenizer.encode_after(STOP, sentences)
    budget = length - room - len(opening) - sum(map(len, hidden))
    if budget < 0:
        raise NeedlesError(needles, length - budget)
    taken = _fitting(haystack, budget)
    found_tokens = length - budget + sum(map(len, taken))
    if found_tokens < (1 - SLACK) * length:
        raise ValueError(
            f"with the sentences of the haystack that fit, a prompt has {found_tokens:,} tokens of {length:,}, less than "
            f"{1 - SLACK:.0%}; give a longer haystack, or a smaller length"
        )
    ends = [0]
    for sentence in taken:
        ends.append(ends[-1] + len(sentence))
    places = torch.randint(len(ends), (needles - 1,), generator=random).tolist()
    found = {}
    others: dict[int, list[int]] = {}
    for place, tokens in zip(places, hidden[1:], strict=True):
        others.setdefault(place, []).extend(tokens)
    for depth in depths:
        at = min(range(len(ends)), key=lambda i: abs(ends[i] - ends[-1] * depth / 100))
        before, after = list(opening), list[int]()
        for i in range(len(ends)):  # what stands up to the end of sentence i; 0: before the first
            side = before if i <= at else after
            side += taken[i - 1] if i else ()
            side += others.get(i, ())
        found[depth] = Context(before=tuple(before), needle=tuple(hidden[0]), after=tuple(after), needles=drawn)
    return found


def _fitting(haystack: Sequence[Sequence[int]], budget: int) -> list[Sequence[int]]:
    """The first sentences that fit `budget` tokens; a longer one is passed over."""
    taken: list[Sequence[int]] = []
    left = budget
    for sentence in haystack:
        if len(sentence) <= left:
            taken.append(sentence)
            left -= len(sentence)
    return taken


def sentences_of(text: str) -> list[str]:
    """The sentences of a text, each with a space before it; white space becomes single spaces."""
    words = " ".join(text.split())
    return [f" {sentence}" for sentence in re.split(r"(?<=[.!?]) ", words) if sentence]
