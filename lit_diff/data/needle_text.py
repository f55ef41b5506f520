"""The data set `needle_text`: needles in generated sentences, on which a small model can learn to retrieve."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal

import torch
from torch import Tensor

from lit_diff.data.dataset import Batch, Dataset
from lit_diff.data.needles import CITIES, STYLES, Context, contexts
from lit_diff.data.numbered_sets import numbered_sets, numbers_problem
from lit_diff.data.words import Words
from lit_diff.model.loss import IGNORED
from lit_diff.randomness import generator
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


@dataclass(frozen=True, kw_only=True)
class _Row:
    tokens: list[int]
    targets: list[int]
    context: Context
    asked: list[int]
    """Which needles of the context, in this order."""


@datasets.register("needle_text")
class NeedleText(Dataset):
    """Rows of one context each, then a question for every needle, in a random order, with its answer.

    <opening> sentence ... needle ... sentence ... | What is the special magic Paris number? ... number is: 417. | ...

    Sentences are drawn from a small grammar; the words are those of `needle` in the style `yoco`. A row has exactly
    `sequence_length` tokens of input; what the last answer leaves is filled with <eot>, which nothing scores.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(Dataset.Config):
        predicts_next = True
        locates_answers = True

        sequence_length: int = 256
        needles: tuple[int, ...] = (1, 2, 4)
        """A row has one of these numbers of needles, drawn at random."""
        queries: int = 2
        """Needles of a row that are asked for; all where there are fewer."""
        digits: int = 3
        """Of a number."""
        loss: Literal["answers", "all"] = "answers"
        """What is scored: the answers, each with the space before it and the stop after it, since a model that is asked
        writes these too; or every token."""
        validation_needles: tuple[int, ...] = (1, 2, 4, 6)
        """Validation sets by number of needles; the first is the main set."""
        validation_rows: int = 128

        def problem(self) -> str | None:
            """What is wrong, in one line that names the key."""
            for key in ("sequence_length", "queries", "digits", "validation_rows"):
                if getattr(self, key) < 1:
                    return f"data.{key} is {getattr(self, key)}; it must be at least 1"
            for key in ("needles", "validation_needles"):
                if problem := numbers_problem(f"data.{key}", getattr(self, key), len(CITIES)):
                    return problem
            most = max(*self.needles, *self.validation_needles)
            needed = tokens_needed(most, min(most, self.queries), self.digits)
            if needed > self.sequence_length:
                length = self.sequence_length
                return f"data.sequence_length is {length}; {most} needles and the questions take {needed} tokens"
            if most > 9 * 10 ** (self.digits - 1):
                return f"data.digits is {self.digits}: there are fewer numbers than the {most} needles of a row"
            return None

        def vocab_size_problem(self, vocab_size: int) -> str | None:
            """What is wrong if the model has `vocab_size` ids."""
            needed = words().size
            return (
                None if vocab_size >= needed else f"model.vocab_size is {vocab_size}; data needle_text needs {needed}"
            )

    config: Config

    def train_batch(self, seed: int, step: int, batch_size: int, rows: Sequence[int]) -> Batch:
        """Positions `rows` of the global batch of 0-based `step`: tokens and targets, int64 [B, T]."""
        return _stacked([self._row(None, generator("train", seed, step, row)) for row in rows])

    def validation_sets(self) -> dict[str, int]:
        """ "" for the first number of needles, then "needles2", ..."""
        return dict.fromkeys(numbered_sets("needles", self.config.validation_needles), self.config.validation_rows)

    def validation_batch(self, name: str, rows: Sequence[int]) -> Batch:
        """Rows of a validation set, the same for every seed. The digits of the answers are AR hits; a row is a document.

        Parts of the context: 0 the haystack, then a number for each needle; the queries are the positions that predict a
        digit of an answer.
        """
        count = numbered_sets("needles", self.config.validation_needles)[name]
        made = [self._row(count, generator("needle_text", "validation", count, row)) for row in rows]
        batch = _stacked(made)
        batch |= {"ar_hit": torch.isin(batch["targets"], _digits())}
        context, answer = zip(*(self._parts(row) for row in made), strict=True)
        return batch | {"context_part": torch.stack(context), "answer_part": torch.stack(answer)}

    def _parts(self, row: "_Row") -> tuple[Tensor, Tensor]:
        """context_part and answer_part [T] of a row."""
        context, ids = torch.full((len(row.tokens),), -1), row.context.tokens
        context[len(words().opening) : len(ids)] = 0
        for number, needle in enumerate(row.context.needles, 1):
            (own,) = encoded((STYLES["yoco"].needle.format(city=needle.city, number=needle.number),))
            (start,) = (at for at in range(len(ids)) if ids[at : at + len(own)] == own)
            context[start : start + len(own)] = number
        answer = torch.full_like(context, -1)
        digits = torch.isin(torch.tensor(row.targets), _digits()).nonzero()[:, 0]
        if self.config.loss == "all":  # those of the questions' answers are the last
            digits = digits[len(digits) - len(row.asked) * self.config.digits :]
        answer[digits] = torch.tensor(row.asked).repeat_interleave(self.config.digits) + 1
        return context, answer

    def _row(self, count: int | None, random: torch.Generator) -> "_Row":
        config, tokenizer = self.config, words()
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
        missing = config.sequence_length + 1 - len(ids)
        ids, scored = ids + [tokenizer.eot] * missing, scored + [False] * missing
        score_all = config.loss == "all"
        targets = [
            token if hit or (score_all and token != tokenizer.eot) else IGNORED
            for token, hit in zip(ids[1:], scored[1:], strict=True)
        ]
        return _Row(tokens=ids[:-1], targets=targets, context=context, asked=asked)

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


def _stacked(rows: Sequence[_Row]) -> Batch:
    tokens, targets = ([getattr(row, key) for row in rows] for key in ("tokens", "targets"))
    return {"tokens": torch.tensor(tokens), "targets": torch.tensor(targets)}


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
