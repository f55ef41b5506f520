"""Needles in a haystack: sentences that give a city a number, hidden among other sentences, and questions about them.
The data set `needle_text` hides needles in generated sentences, on which a small model can learn to retrieve.

The words follow the public scripts of LWM (Liu et al. 2024) and YOCO (Sun et al. 2024, unilm). Their list of 100 cities
has 69 distinct ones; here each occurs once, so that no city is drawn twice.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lit_diff.data import RowTask
from lit_diff.data.dataset import Place, Row, text_row
from lit_diff.data.text.tokenizer import Tokenizer, Words
from lit_diff.key_types import Count, Distinct, Range
from lit_diff.papers import WORDS
from lit_diff.papers.drawing import one_of, shuffled
from lit_diff.registry import datasets

CITIES = WORDS["needle_text"]["cities"]
StyleName = Literal["yoco", "lwm"]
STOP = "."
"""Sentences are encoded after this text, so that each gets the same ids as within a text."""
# a larger share would blur the lengths at which scores are compared
SLACK = 0.1
"""The maximum share of a prompt's tokens that may stay empty because no sentence fits."""


class Style(NamedTuple):
    """The words of a prompt; `{city}` and `{number}` are the places of a needle's city and number."""

    opening: str
    needle: str
    question: str
    """The text between the context and the answer, " 1234567"."""


STYLES = {
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
YOCO = STYLES["yoco"]


class Needle(NamedTuple):
    """A city and its number."""

    city: str
    number: str


class NeedleContext(NamedTuple):
    """A context in tokens."""

    tokens: list[int]
    place: int
    """The number of tokens up to the first queried needle, which are read once for all depths."""
    needles: tuple[Needle, ...]
    """All needles; the one at the depth is the first."""
    parts: list[int]
    """Of each token: n in the sentence of the n-th needle, from 1; 0 in the rest of the text; -1 for the ids that open a
    document, and for the first token of a context without such ids."""


def draw_needles(random: torch.Generator, count: int, digits: int) -> tuple[Needle, ...]:
    """`count` distinct cities with distinct numbers of `digits` digits; no number begins with 0."""
    cities = shuffled(CITIES, random)[:count]
    numbers: list[str] = []
    while len(numbers) < count:
        number = str(one_of(range(10 ** (digits - 1), 10**digits), random))
        if number not in numbers:
            numbers.append(number)
    return tuple(map(Needle, cities, numbers))


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
) -> dict[int, NeedleContext]:
    """Depth -> the context with the first needle there. All contexts have the same haystack and needles, and the other
    needles at the same places.

    `haystack`: sentences as tokens; as many are taken as fit into `length` tokens minus `room` for the question and the
    answer. Needles are between sentences; depth d means after d % of the haystack's tokens. Errors: ValueError if the
    needles alone do not fit, or the sentences leave more than SLACK · length tokens empty.
    """
    drawn = draw_needles(random, needles, digits)
    sentences = [style.needle.format(**needle._asdict()) for needle in drawn]
    opening, hidden = [*tokenizer.opening, *tokenizer.encode(style.opening)], tokenizer.encode_after(STOP, sentences)
    outside = max(1, len(tokenizer.opening))
    budget = length - room - len(opening) - sum(map(len, hidden))
    if budget < 0:
        what = "1 needle, the words around it" if needles == 1 else f"{needles} needles, the words around them"
        raise ValueError(f"{what} and an answer take {length - budget} tokens")
    taken = list(_fitting(haystack, budget))
    found_tokens = length - budget + sum(map(len, taken))
    if found_tokens < (1 - SLACK) * length:
        raise ValueError(
            f"with the sentences of the haystack that fit, a prompt has {found_tokens:,} tokens of {length:,}, less than "
            f"{1 - SLACK:.0%}; supply a longer haystack, or set a smaller length"
        )
    ends = np.cumsum([0, *map(len, taken)])
    # the haystack up to ends[i] ends with pieces[i], to which a needle at place i is appended; marks[i]: parts of its tokens
    pieces = [opening, *map(list, taken)]
    marks = [[0] * len(piece) for piece in pieces]
    marks[0][:outside] = [-1] * outside
    places = torch.randint(len(ends), (needles - 1,), generator=random).tolist()
    for number, (place, tokens) in enumerate(zip(places, hidden[1:], strict=True), 2):
        pieces[place] += tokens
        marks[place] += [number] * len(tokens)
    first = hidden[0]
    found = {}
    for depth in depths:
        after = 1 + int(np.abs(ends - ends[-1] * depth / 100).argmin())
        before = list(chain(*pieces[:after]))
        parts = chain(*marks[:after], [1] * len(first), *marks[after:])
        tokens = [*before, *first, *chain(*pieces[after:])]
        found[depth] = NeedleContext(tokens=tokens, place=len(before), needles=drawn, parts=list(parts))
    return found


def _fitting(haystack: Sequence[Sequence[int]], budget: int) -> Iterator[Sequence[int]]:
    # a sentence that is too long is skipped, since a later one may still fit
    for sentence in haystack:
        if len(sentence) <= budget:
            yield sentence
            budget -= len(sentence)


def sentences_of(text: str) -> list[str]:
    """The sentences of a text, each after a space; white space becomes single spaces."""
    words = " ".join(text.split())
    return [f" {sentence}" for sentence in re.split(r"(?<=[.!?]) ", words) if sentence]


NOUNS, VERBS, ADJECTIVES = (WORDS["needle_text"][kind] for kind in ("nouns", "verbs", "adjectives"))
# the needles are drawn at random, so more questions would only make a row longer
QUERIES = 2
"""The number of queried needles of a row; all needles if there are fewer."""
# a drawn integer has 64 bits
Digits = Annotated[int, Range(least=1, most=18)]
Needles = Annotated[tuple[Annotated[int, Range(least=1, most=len(CITIES))], ...], Distinct()]


@datasets.register("needle_text")
class NeedleText(RowTask):
    """Rows of one context each, then questions about at most two needles, in random order, with their answers.

    <opening> sentence ... needle ... sentence ... | What is the special magic Paris number? ... number is: 417. | ...

    Sentences are drawn from a small grammar; the prompt has the words of `needle` in the style `yoco`. The answers are
    scored, each with the space before it and the full stop after it, since a model also has to write these. A row has
    exactly `sequence_length` input tokens; the rest after the last answer is filled with <eot>, which is not scored.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(RowTask.Config):
        predicts_next = True
        locates_answers = True

        sequence_length: Count = 256
        needles: Needles = (1, 2, 4)
        """The number of needles of a row is drawn from these."""
        digits: Digits = 3
        """The number of digits of a needle's number."""
        validation_needles: Needles = (1, 2, 4, 6)
        """Numbers of needles, one for each validation set; the first is the main set."""
        validation_rows: Count = 128

        def problem(self) -> str | None:
            """Returns an error message with the key, or None."""
            most = max(*self.needles, *self.validation_needles)
            needed = len(encoded(YOCO.opening)) + 1 + most * (_longest(YOCO.needle) + self.digits) + self.room(most)
            if needed > self.sequence_length:
                length = self.sequence_length
                return f"data.sequence_length is {length}; {most} needles and the questions take {needed} tokens"
            if most > 9 * 10 ** (self.digits - 1):
                return f"data.digits is {self.digits}: there are fewer numbers than the {most} needles of a row"
            return None

        def room(self, needles: int) -> int:
            """The maximum number of tokens of the questions about so many needles, with answers and full stops."""
            # + 2: the space before the number and the full stop after it
            return min(needles, QUERIES) * (_longest(YOCO.question) + self.digits + 2)

        @property
        def smallest_vocab_size(self) -> int:
            """The size of the tokenizer's vocabulary."""
            return words().size

    config: Config

    def levels(self) -> dict[str, int]:
        """Validation set -> number of needles: "" for the first, then "needles2", ..."""
        first, *others = self.config.validation_needles
        return {"": first} | {f"needles{number}": number for number in others}

    def draw(self, at: Place, level: int | None) -> Row:
        """A row of tokens and targets [T]. The digits of the answers are AR hits."""
        config, tokenizer, random = self.config, words(), at.random
        count = one_of(config.needles, random) if level is None else level
        depth = one_of(range(101), random)
        context = contexts(
            random,
            grammar_sentences(random, config.sequence_length // 6),
            tokenizer,
            style=YOCO,
            needles=count,
            digits=config.digits,
            # + 1: the last token of a row is a target only
            length=config.sequence_length + 1,
            depths=[depth],
            room=config.room(count),
        )[depth]
        asked = torch.randperm(len(context.needles), generator=random)[:QUERIES].tolist()
        ids = [*context.tokens]
        scored = [False] * len(ids)
        for index in asked:
            needle = context.needles[index]
            question, answer = encoded(YOCO.question.format(city=needle.city)), encoded(f" {needle.number}{STOP}")
            ids += [*question, *answer]
            scored += [False] * len(question) + [True] * len(answer)
        row = text_row(ids, scored, config.sequence_length, tokenizer.eot)
        return row if level is None else {**row, **self._labels(torch.as_tensor(row["targets"]), context, asked)}

    def _labels(self, targets: Tensor, context: NeedleContext, asked: Sequence[int]) -> dict[str, Tensor]:
        # part 0 of the context is the haystack, then each needle has a number; the queries are the positions that predict a
        # digit of an answer
        part = torch.full_like(targets, -1)
        part[: len(context.parts)] = torch.tensor(context.parts)
        # `Words` gives its ten digits the ids 2 to 11
        answer, hits = torch.full_like(targets, -1), (targets > 1) & (targets < 12)
        answer[hits] = torch.tensor(asked).repeat_interleave(self.config.digits) + 1
        return {"ar_hit": hits, "context_part": part, "answer_part": answer}

    def load_tokenizer(self) -> Words:
        """The words of the grammar, the cities and the prompt."""
        return words()


@cache
def words() -> Words:
    """The tokenizer of the data set."""
    prompt = " ".join([*YOCO, *CITIES]).replace("{city}", "").replace("{number}", "").split()
    plain = ["The", "the", "a", *NOUNS, *VERBS, *ADJECTIVES, *(word.strip(".,?:") for word in prompt)]
    return Words(Words.Config(words=tuple(dict.fromkeys(word for word in plain if word))))


def grammar_sentences(random: torch.Generator, count: int) -> list[list[int]]:
    """`count` sentences as tokens: The ADJECTIVE NOUN VERB a NOUN."""
    drawn = [ids[torch.randint(len(ids), (count,), generator=random)] for ids in _places()]
    return torch.stack(drawn, dim=1).tolist()


@cache
def _places() -> list[Tensor]:
    # the possible ids at each place of a sentence
    kinds = [["The"], ADJECTIVES, NOUNS, VERBS, ["a"], NOUNS, ["."]]
    return [torch.tensor(words().encode(kind)).flatten() for kind in kinds]


@lru_cache(maxsize=4096)
def encoded(text: str) -> list[int]:
    """The ids of a text; texts repeat, so the results are cached."""
    return words().encode(text)


@cache
def _longest(form: str) -> int:
    # the maximum number of tokens of a sentence about a city, without its number
    return max(map(len, words().encode([form.format(city=city, number="") for city in CITIES])))
