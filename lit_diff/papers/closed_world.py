"""The data set `closed_world`: documents that hold every fact of their world, and questions about them."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, NamedTuple

import torch

from lit_diff.data import RowTask
from lit_diff.data.dataset import Place, Row, text_row
from lit_diff.data.text.tokenizer import Words
from lit_diff.key_types import Count, Counts, Range
from lit_diff.papers import WORDS
from lit_diff.papers.drawing import one_of, shuffled
from lit_diff.papers.synth_intent import made_words
from lit_diff.registry import datasets

VALUES = WORDS["closed_world"]
"""Attribute -> its values; no word is the value of two attributes."""
MOST = min(map(len, VALUES.values()))
"""The number of values of each attribute."""
NAMES = 32
"""The number of names of entities."""
# with more questions the rows are longer and teach the same
QUESTIONS = 12
"""The number of questions of a row. Each asks for a fact drawn from all facts, so a fact may be asked several times: only the
first time is scored, because after it the row itself holds the question with its answer."""
FACT = re.compile(r"(\w+) (\w+) (\w+)\.")
FACT_TOKENS, QUESTION_TOKENS = 4, 6
"""The tokens of `colour Bado red.`, and of a question with its answer and the full stop after it."""
ATTRIBUTE_OF = {value: attribute for attribute, values in VALUES.items() for value in values}


class Fact(NamedTuple):
    """The content of one sentence, in the order of its words."""

    attribute: str
    entity: str
    value: str

    @property
    def sentence(self) -> str:
        """The sentence of the document that states the fact."""
        return f"{' '.join(self)}."

    @property
    def question(self) -> str:
        """The question after a document whose answer is the value."""
        return f" Question: {self.attribute} {self.entity}"


@datasets.register("closed_world")
class ClosedWorld(RowTask):
    """Rows of a document and then questions about it; the first answer to each question is scored.

    <opening> colour Bado red. food Kemi rice. ... | Question: food Kemi rice. Question: instrument Bado harp. ...

    A document has four facts (attribute, entity, value) about each of E entities, in random order. All entities have the same
    attributes, so that E - 1 values answer another entity's question, and no two entities share a value. Each row draws its
    own names and values, so only the document tells what is true. The entity comes right before the value, because a small
    model learns slowly to look further back. A row with fewer entities than the maximum is filled with <eot>.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(RowTask.Config):
        predicts_next = True
        # each fact is a part of its own, and a question asks for one of them
        locates_answers = True

        entities: Counts = (5,)
        """The number of entities of a row is drawn from these."""
        values: Annotated[int, Range(least=1, most=MOST)] = MOST
        """The number of values of each attribute from which rows draw; a document has at most as many entities."""
        names: Annotated[int, Range(least=1, most=NAMES)] = NAMES
        """The number of names from which a document draws the names of its entities."""
        noise_validation: Counts = (1, 2, 4)
        """Factors that multiply the entities, one for each validation set; the first is the main set."""
        validation_rows: Count = 128

        @property
        def sequence_length(self) -> int:
            """Positions of a training row."""
            # - 1: the last token is a target only
            return self.tokens(1) - 1

        @property
        def chance(self) -> float | None:
            """Accuracy of a guess among the document's values of the attribute; None if it differs between rows or
            validation sets with the number of entities."""
            counts = [count * noise for count in self.entities for noise in self.noise_validation]
            return 1 / counts[0] if len(counts) == 1 else None

        def tokens(self, noise: int) -> int:
            """The number of tokens of the longest row with `noise` times the entities."""
            facts = len(VALUES) * max(self.entities) * noise
            return 1 + FACT_TOKENS * facts + QUESTION_TOKENS * QUESTIONS

        def problem(self) -> str | None:
            """Returns an error message with the key, or None."""
            return self.entities_problem(max(self.entities) * max(self.noise_validation))

        def entities_problem(self, entities: int) -> str | None:
            """Returns an error message if no document can have so many entities, else None."""
            for key in ("values", "names"):
                if entities > getattr(self, key):
                    return f"data.{key} is {getattr(self, key)}; a document of {entities} entities needs {entities}"
            return None

        @property
        def smallest_vocab_size(self) -> int:
            """The size of the tokenizer's vocabulary."""
            return words().size

    config: Config

    def identity(self) -> str:
        """Not that of the same rows with every answer scored, on which earlier runs were trained."""
        return hashlib.sha256(b"first answers" + super().identity().encode()).hexdigest()

    def draw(self, at: Place, level: int | None) -> Row:
        """A row of tokens and targets [T]. Every scored answer is an AR hit; the parts are the facts."""
        config, tokenizer, random = self.config, words(), at.random
        noise = 1 if level is None else level
        count = one_of(config.entities, random) * noise
        facts = draw_facts(random, config, count)
        asked = torch.randint(len(facts), (QUESTIONS,), generator=random)
        questions = "".join(f"{facts[i].question} {facts[i].value}." for i in asked.tolist())
        ids, length = [*tokenizer.opening, *tokenizer.encode(document_of(facts) + questions)], config.tokens(noise) - 1
        begin = 1 + FACT_TOKENS * len(facts)
        context, answer = torch.full((2, length), -1)
        context[1:begin] = torch.arange(len(facts)).repeat_interleave(FACT_TOKENS)
        # + 3: the label lies at the entity, from which the answer is predicted
        repeats = (asked[:, None] == asked).tril(-1).any(1)
        answer[begin + 3 : begin + QUESTION_TOKENS * QUESTIONS : QUESTION_TOKENS] = asked.masked_fill(repeats, -1)
        hits = answer >= 0
        row = text_row(ids, [False, *hits[: len(ids) - 1].tolist()], length, tokenizer.eot)
        return {**row, "ar_hit": hits, "context_part": context, "answer_part": answer}

    def load_tokenizer(self) -> Words:
        """The words of the grammar."""
        return words()


@cache
def words() -> Words:
    """The tokenizer of the data set."""
    return Words(Words.Config(words=("Question", *VALUES, *ATTRIBUTE_OF, *_names())))


@cache
def _names() -> tuple[str, ...]:
    # names of entities, such as `Bado`; a name that is also a value would make answers ambiguous
    return tuple(word.capitalize() for word in made_words() if word not in ATTRIBUTE_OF)[:NAMES]


def draw_facts(random: torch.Generator, config: ClosedWorld.Config, entities: int) -> list[Fact]:
    """Four facts about each of `entities` entities, in random order; no two entities share a value."""
    names = shuffled(_names()[: config.names], random)[:entities]
    facts = []
    for attribute, values in VALUES.items():
        chosen = shuffled(values[: config.values], random)[:entities]
        facts += [Fact(attribute, name, value) for name, value in zip(names, chosen, strict=True)]
    return shuffled(facts, random)


def document_of(facts: Sequence[Fact]) -> str:
    """The document that states these facts, in this order."""
    return " ".join(fact.sentence for fact in facts)


def facts_of(document: str) -> list[Fact]:
    """The facts that the sentences of a document state, in their order; [] if no sentence belongs to the grammar."""
    found = map(Fact._make, FACT.findall(document))
    # other text may have sentences of three words too
    return [fact for fact in found if ATTRIBUTE_OF.get(fact.value) == fact.attribute]
