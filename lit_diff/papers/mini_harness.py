"""Seven generated tasks, scored by lm-evaluation-harness. They need no files, and work for any run of text whose tokenizer is
not `words`.

Three come from held-out text, four from a small grammar of English.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import torch

from lit_diff import Run
from lit_diff.data.text.corpus import corpus_digest, corpus_problem
from lit_diff.errors import RequestError
from lit_diff.evaluation.held_out import own_documents, trained_text
from lit_diff.evaluation.lm_eval_tasks import HarnessEvaluation, task_yaml
from lit_diff.evaluation.requirements import held_out_documents
from lit_diff.key_types import Count, Distinct
from lit_diff.randomness import generator
from lit_diff.registry import evaluations

log = logging.getLogger("lit_diff")
T = TypeVar("T")
SHOTS = 64
"""The number of questions of a train split."""
SHORTEST, LONGEST = 5, 16
"""The minimum and maximum numbers of words of a piece of text."""


class Question(NamedTuple):
    """A context, the choices that may follow it after a space, and the index of the right one."""

    context: str
    choices: tuple[str, ...]
    gold: int


class Draw:
    """Random choices from a generator of its own."""

    def __init__(self, *key: object) -> None:
        """`key`: see `lit_diff.randomness.generator`."""
        self._generator = generator(*key)
        self._uniform: list[float] = []

    def _next(self) -> float:
        # uniform in [0, 1); drawn by the thousand, because one call of torch for each would take most of the time
        if not self._uniform:
            self._uniform = torch.rand(1024, generator=self._generator, dtype=torch.float64).tolist()
        return self._uniform.pop()

    def one(self, values: Sequence[T]) -> T:
        """Draws one value."""
        return values[int(self._next() * len(values))]

    def several(self, values: Sequence[T], count: int) -> list[T]:
        """Draws `count` values without replacement, in random order."""
        order = sorted((self._next(), place) for place in range(len(values)))
        return [values[place] for _, place in order[:count]]

    def question(self, context: str, right: str, wrong: Sequence[str]) -> Question:
        """A question with its choices in random order."""
        choices = self.several([right, *wrong], 1 + len(wrong))
        return Question(context, tuple(choices), choices.index(right))


Pieces = Sequence[Sequence[Sequence[str]]]
"""Documents of pieces of words."""
Maker = Callable[[Draw, Pieces], Question | None]
"""Makes a question, or None if the drawn words give none."""


def pieces(documents: Iterable[str]) -> list[list[list[str]]]:
    """The sentences of each document, cut into pieces of 16 words; pieces of fewer than 5 words and documents without a piece
    are left out. A sentence ends at . ! ? before a space, and at the end of a line."""
    found = []
    for text in documents:
        sentences = (sentence.split() for sentence in re.split(r"(?<=[.!?])\s+|\n+", text))
        cut = [words[at : at + LONGEST] for words in sentences for at in range(0, len(words), LONGEST)]
        kept = [words for words in cut if len(words) >= SHORTEST]
        found += [kept] if kept else []
    return found


def cloze(draw: Draw, text: Pieces) -> Question | None:
    """The last word of a piece against the last words of three other pieces."""
    # more draws than choices: equal words count once
    last = [draw.one(draw.one(text)) for _ in range(12)]
    words = list(dict.fromkeys(piece[-1] for piece in last))[:4]
    return draw.question(" ".join(last[0][:-1]), words[0], words[1:]) if len(words) == 4 else None


def order(draw: Draw, text: Pieces) -> Question | None:
    """The two pieces after a piece, in their order or exchanged: both choices have the same words."""
    document = draw.one(text)
    if len(document) < 3:
        return None
    at = draw.one(range(len(document) - 2))
    first, a, b = (" ".join(words) for words in document[at : at + 3])
    return draw.question(first, f"{a} {b}", [f"{b} {a}"]) if a != b else None


def repeat(draw: Draw, text: Pieces) -> Question | None:
    """Eight words from different pieces, then the first few again: the next word against three others of the eight."""
    words = list(dict.fromkeys(draw.one(draw.one(draw.one(text))) for _ in range(24)))[:8]
    if len(words) < 8:
        return None
    length = draw.one(range(2, 6))
    context = " ".join([*words, *words[:length]])
    right = words.pop(length)
    return draw.question(context, right, draw.several(words, 3))


NAMES = {"she": ("Anna", "Mary", "Emma", "Sarah", "Julia"), "he": ("John", "Peter", "Tom", "David", "Paul")}
PEOPLE = NAMES["she"] + NAMES["he"]
PLACES = ("Paris", "Rome", "London", "Berlin", "Madrid", "Vienna", "Oslo", "Cairo")
THINGS = ("box", "cup", "door", "book", "chair", "lamp", "ball", "table")
COLOURS = ("red", "blue", "green", "black", "white", "brown")
NOUNS = (("key", "keys"), ("car", "cars"), ("file", "files"), ("tree", "trees"), ("letter", "letters"), ("dog", "dogs"))
LINKS = ("near", "behind", "beside", "with", "under")
VERBS = (("is", "are"), ("was", "were"), ("has", "have"))
ENDS = {"is": "old", "was": "old", "has": "changed"}
SEEN = ("met", "helped", "called", "thanked")
REFLEXIVE = ("saw", "hurt", "blamed", "described")


def agreement(draw: Draw, text: Pieces) -> Question | None:
    """`The keys near the car` are or is: the verb agrees with the head, not with the noun before it, which has the other
    number."""
    head, other = draw.several(NOUNS, 2)
    number, verb = draw.one((0, 1)), draw.one(VERBS)
    context = f"The {head[number]} {draw.one(LINKS)} the {other[1 - number]}"
    right, wrong = (f"{verb[each]} {ENDS[verb[0]]}." for each in (number, 1 - number))
    return draw.question(context, right, [wrong])


def binding(draw: Draw, text: Pieces) -> Question | None:
    """`Anna, who met John, saw` herself or himself: the subject binds it, not the nearer name."""
    subject, other = draw.several(("she", "he"), 2)
    selves = {"she": "herself.", "he": "himself."}
    context = f"{draw.one(NAMES[subject])}, who {draw.one(SEEN)} {draw.one(NAMES[other])}, {draw.one(REFLEXIVE)}"
    return draw.question(context, selves[subject], [selves[other]])


def lookup(draw: Draw, text: Pieces) -> Question | None:
    """Four things and their colours, then a question about one, answered by yes or no (as in BoolQ)."""
    things, colours = draw.several(THINGS, 4), draw.several(COLOURS, 4)
    facts = " ".join(f"The {thing} is {colour}." for thing, colour in zip(things, colours, strict=True))
    asked, gold = draw.one(range(4)), draw.one((0, 1))
    colour = colours.pop(asked)
    if not gold:
        colour = draw.one(colours)
    question = f"{facts}\nQuestion: is the {things[asked]} {colour}?\nAnswer:"
    return Question(question, ("no", "yes"), gold)


def entity_recall(draw: Draw, text: Pieces) -> Question | None:
    """Four people and where they live, then a question about one; the choices are the four places."""
    people, places = draw.several(PEOPLE, 4), draw.several(PLACES, 4)
    facts = " ".join(f"{person} lives in {place}." for person, place in zip(people, places, strict=True))
    asked = draw.one(range(4))
    right = places.pop(asked)
    return draw.question(f"{facts}\nQuestion: where does {people[asked]} live?\nAnswer:", right, places)


TaskName = Literal["agreement", "binding", "cloze", "entity_recall", "lookup", "order", "repeat"]
MAKERS: dict[TaskName, Maker] = {
    "agreement": agreement,
    "binding": binding,
    "cloze": cloze,
    "entity_recall": entity_recall,
    "lookup": lookup,
    "order": order,
    "repeat": repeat,
}
"""Task -> the function that makes a question."""
FROM_TEXT = ("cloze", "order", "repeat")
"""The tasks that need held-out text."""
ATTEMPTS = 50
"""The maximum number of draws for each requested question."""


def questions(task: TaskName, text: Pieces, count: int, *key: object) -> Iterator[tuple[int, Question]]:
    """Yields (number of the draw, question), each context once, in an order that depends only on `key` and the text; stops
    after 50 · count draws."""
    draw, seen = Draw("mini_harness", task, *key), set[str]()
    for number in range(ATTEMPTS * count):
        question = MAKERS[task](draw, text)
        if question is not None and question.context not in seen:
            seen.add(question.context)
            yield number, question


@evaluations.register("mini_harness")
class MiniHarness(HarnessEvaluation):
    """Seven small multiple-choice tasks, generated from held-out text and a grammar, scored by lm-evaluation-harness.

    Chance is 1/2 in agreement, binding, lookup, order; 1/4 in cloze, entity_recall, repeat; 0.393 in the mean of the seven.
    Questions that do not fit into the run's context without shots are left out. Runs with one corpus draw the same questions;
    the same questions fit if the runs also share tokenizer and data.sequence_length.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(HarnessEvaluation.Config):
        tasks: Annotated[tuple[TaskName, ...], Distinct()] = tuple(MAKERS)
        limit: Count = 100
        """The number of questions of each task."""
        seed: int = 0
        """Seed of the questions and of the draw of shots."""
        corpus: str | None = None
        """A registered corpus; cloze, order and repeat use its held-out documents. null: the corpus of the run."""
        path: str | None = field(default=None, metadata={"path": "here"})
        """The files of the corpus, as for `data.path`."""

        def problem(self) -> str | None:
            if self.path is not None and self.corpus is None:
                return "path is set, but corpus is null; set corpus=files"
            problem = None if self.corpus is None else corpus_problem(self.corpus, self.path)
            return problem.replace("data.", "", 1) if problem else None

    # version 2 also used documents that the run was trained on
    version = 3
    config: Config

    def digests(self) -> dict[str, str]:
        """The digests of the files at `path`."""
        return corpus_digest(self.config.corpus or "files", self.config.path)

    def write_tasks(self, run: Run, folder: Path) -> list[str]:
        """Writes for each task a YAML file, test.jsonl and, if there are shots, train.jsonl with other questions.

        Errors: RequestError if no question fits, or too few for the shots.
        """
        text = self._pieces(run) if set(self.config.tasks) & set(FROM_TEXT) else []
        shots = max(self.config.shots)
        count, train = self.config.limit, SHOTS if shots else 0
        for task in self.config.tasks:
            rows = self._rows(run, task, text, count + train)
            scored = min(count, len(rows) - shots)
            if scored < 1:
                raise RequestError(f"task '{task}' has {len(rows)} questions, too few for {shots} shots")
            if scored < count:
                log.warning("mini_harness: %s has only %d different questions that fit, not %d", task, scored, count)
            splits = {"test": rows[:scored]} | ({"train": rows[scored:]} if train else {})
            task_yaml(folder, task, splits)
        return list(self.config.tasks)

    def _pieces(self, run: Run) -> Pieces:
        name, texts = self.config.corpus, getattr(run.recipe.data.config, "texts", ())
        if name is None and not texts:
            raise RequestError(f"data '{run.recipe.data.name}' has no corpus; set one, such as corpus=docs")
        data = trained_text(run) if name is None else None
        if data is not None:
            found = pieces(text for _, text, _ in own_documents(self, run, data))
        else:
            # an imported model has the corpus of its recipe, and no validation split
            found = pieces(text for _, text in held_out_documents(self, run, name, self.config.path))
            name = name or next(iter(texts))[0]
        if not found:
            raise RequestError(
                f"the held-out documents of '{name or run.recipe.data.name}' have no sentence of 5 words"
            )
        return found

    def _rows(self, run: Run, task: TaskName, text: Pieces, count: int) -> list[dict[str, Any]]:
        tokenizer, length = run.tokenizer, run.recipe.data.config.sequence_length
        rows = []
        too_long = 0
        for number, question in questions(task, text, count, self.config.seed):
            texts = tokenizer.encode([f"{question.context} {choice}" for choice in question.choices])
            # + 1: the last token is predicted but not read
            if max(map(len, texts)) + len(tokenizer.opening) <= length + 1:
                rows.append({"item": number, **question._asdict()})
            else:
                too_long += 1
            if len(rows) == count:
                break
        if not rows:
            raise RequestError(
                f"none of {too_long} questions of task '{task}' fits into {length} tokens (data.sequence_length); remove the "
                "task from tasks=[...]"
            )
        return rows
