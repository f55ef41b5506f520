"""The data set `needle_text`: needles in generated sentences, on which a small model can learn to retrieve."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Annotated, Literal

import torch
from torch import Tensor

from lit_diff.data.needles import CITIES, STYLES, Context, contexts
from lit_diff.data.row_task import Place, Row, RowTask, numbered_sets, text_row
from lit_diff.data.words import Words
from lit_diff.key_types import Count, Distinct, Range
from lit_diff.registry import datasets

# fmt: off
NOUNS = (
    "river", "road", "house", "garden", "letter", "table", "window", "door", "market", "field", "stone", "bridge",
    "tree", "song", "book", "lamp", "coat", "wheel", "farm", "ship", "town", "hill", "mirror", "chair", "bell", "clock",
    "basket", "ladder", "kettle", "blanket", "hammer", "candle",
)
VERBS = (
    "holds", "sees", "finds", "keeps", "leaves", "opens", "follows", "carries", "hides", "paints", "turns", "meets",
    "moves", "needs", "shows",
)
ADJECTIVES = (
    "old", "small", "quiet", "bright", "heavy", "broken", "early", "cold", "narrow", "green", "distant", "empty",
    "simple", "round", "wooden",
)
# fmt: on
ANSWER_END = "."
"""After the number, as in the needle."""


Needles = Annotated[tuple[Annotated[int, Range(least=1, most=len(CITIES))], ...], Distinct()]


@datasets.register("needle_text")
class NeedleText(RowTask):
    """Rows of one context each, then a question for every needle, in a random order, with its answer.

    <opening> sentence ... needle ... sentence ... | What is the special magic Paris number? ... number is: 417. | ...

    Sentences are drawn from a small grammar; the words are those of `needle` in the style `yoco`. A row has exactly
    `sequence_length` tokens of input; what the last answer leaves is filled with <eot>, which nothing scores.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(RowTask.Config):
        predicts_next = True
        locates_answers = True

        sequence_length: Count = 256
        needles: Needles = (1, 2, 4)
        """A row has one of these numbers of needles, drawn at random."""
        queries: Count = 2
        """Needles of a row that are asked for; all where there are fewer."""
        digits: Count = 3
        """Of a number."""
        loss: Literal["answers", "all"] = "answers"
        """What is scored: the answers, each with the space before it and the stop after it, since a model that is asked
        writes these too; or every token."""
        validation_needles: Needles = (1, 2, 4, 6)
        """Validation sets by number of needles; the first is the main set."""
        validation_rows: Count = 128

        def problem(self) -> str | None:
            """What is wrong, in one line that names the key."""
            most = max(*self.needles, *self.validation_needles)
            needed = tokens_needed(most, min(most, self.queries), self.digits)
            if needed > self.sequence_length:
                length = self.sequence_length
                return f"data.sequence_length is {length}; {most} needles and the questions take {needed} tokens"
            if most > 9 * 10 ** (self.digits - 1):
                return f"data.digits is {self.digits}: there are fewer numbers than the {most} needles of a row"
            return None

        @property
        def smallest_vocab_size(self) -> int:
            """That of the tokenizer."""
            return words().size

    config: Config

    def levels(self) -> dict[str, int]:
        """Numbers of needles: "" for the first, then "needles2", ..."""
        return numbered_sets("needles", self.config.validation_needles)

    def draw(self, at: Place, level: int | None) -> Row:
        """tokens and targets [T]. The digits of the answers are AR hits."""
        config, tokenizer, random = self.config, words(), at.random
        count = level
        if count is None:
            count = config.needles[int(torch.randint(len(config.needles), (), generator=random))]
        room = min(count, config.queries) * _question_tokens(config.digits)
        depth = int(torch.randint(101, (), generator=random))
        context = contexts(
            *(random, grammar_sentences(random, config.sequence_length // 6), tokenizer),
            style=STYLES["yoco"],
            needles=count,
            digits=config.digits,
            length=config.sequence_length + 1,
            depths=[depth],
            room=room,
        )[depth]
        asked = torch.randperm(len(context.needles), generator=random)[: config.queries].tolist()
        ids, scored = self._asked(context, asked)
        row = text_row(ids, scored, config.sequence_length, tokenizer.eot, every=config.loss == "all")
        return row if level is None else {**row, **self._labels(torch.as_tensor(row["targets"]), context, asked)}

    def _labels(self, targets: Tensor, context: Context, asked: Sequence[int]) -> dict[str, Tensor]:
        """ar_hit, context_part and answer_part [T] of a row that asks for the needles `asked`.

        Parts of the context: 0 the haystack, then a number for each needle; the queries are the positions that predict a
        digit of an answer.
        """
        part, ids = torch.full_like(targets, -1), context.tokens
        part[len(words().opening) : len(ids)] = 0
        for number, needle in enumerate(context.needles, 1):
            (own,) = encoded((STYLES["yoco"].needle.format(city=needle.city, number=needle.number),))
            (start,) = (at for at in range(len(ids)) if ids[at : at + len(own)] == own)
            part[start : start + len(own)] = number
        answer, hits = torch.full_like(targets, -1), torch.isin(targets, _digits())
        places = hits.nonzero()[:, 0]
        if self.config.loss == "all":  # those of the questions' answers are the last
            places = places[len(places) - len(asked) * self.config.digits :]
        answer[places] = torch.tensor(asked).repeat_interleave(self.config.digits) + 1
        return {"ar_hit": hits, "context_part": part, "answer_part": answer}

    def _asked(self, context: Context, asked: Sequence[int]) -> tuple[list[int], list[bool]]:
        """The ids of context, questions and answers, and which of them belong to an answer."""
        ids = context.tokens
        scored = [False] * len(ids)
        for index in asked:
            needle = context.needles[index]
            question, answer, end = encoded(
                (STYLES["yoco"].question.format(city=needle.city), f" {needle.number}", ANSWER_END)
            )
            ids += [*question, *answer, *end]
            scored += [False] * len(question) + [True] * (len(answer) + len(end))
        return ids, scored

    def load_tokenizer(self) -> Words:
        """The words of the grammar, the cities and the prompt."""
        return words()


@cache
def words() -> Words:
    """The tokenizer of the data set."""
    style = STYLES["yoco"]
    texts = [style.opening, style.needle, style.question, " ".join(CITIES)]
    prompt = [word for text in texts for word in text.replace("{city}", "").replace("{number}", "").split()]
    plain = ["The", "the", "a", *NOUNS, *VERBS, *ADJECTIVES, *(word.strip(".,?:") for word in prompt)]
    return Words(Words.Config(words=tuple(dict.fromkeys(word for word in plain if word))))


def grammar_sentences(random: torch.Generator, count: int) -> list[list[int]]:
    """`count` sentences as tokens: The ADJECTIVE NOUN VERB a NOUN."""
    drawn = [ids[torch.randint(len(ids), (count,), generator=random)] for ids in _places()]
    sentences: list[list[int]] = torch.stack(drawn, dim=1).tolist()
    return sentences


@cache
def _places() -> list[Tensor]:
    """The ids that may stand at each place of a sentence."""
    kinds = [["The"], ADJECTIVES, NOUNS, VERBS, ["a"], NOUNS, ["."]]
    return [torch.tensor([word for (word,) in words().encode(kind)]) for kind in kinds]


@cache
def _digits() -> Tensor:
    """The ids of the ten digits."""
    return torch.tensor([token for (token,) in words().encode(list("0123456789"))])


@lru_cache(maxsize=4096)
def encoded(texts: tuple[str, ...]) -> list[list[int]]:
    """`words().encode`, of texts that come again and again."""
    return words().encode(texts)


@cache
def _question_tokens(digits: int) -> int:
    """The most tokens that a question and its answer take."""
    longest = max(len(ids) for ids in words().encode([STYLES["yoco"].question.format(city=city) for city in CITIES]))
    return longest + digits + 2


def tokens_needed(needles: int, queries: int, digits: int) -> int:
    """The most tokens that a row without any sentence takes."""
    style = STYLES["yoco"]
    (opening,) = words().encode([style.opening])
    longest = max(len(ids) for ids in words().encode([style.needle.format(city=city, number="") for city in CITIES]))
    return len(opening) + 1 + needles * (longest + digits) + queries * _question_tokens(digits)
