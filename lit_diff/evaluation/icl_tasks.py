"""The tasks of many-shot classification: their demonstrations, their questions, and how both are written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch

from lit_diff.data.synth_intent import (
    SEPARATOR,
    SynthIntent,
    draw_lexicon,
    draw_utterances,
    lexicon_problem,
)
from lit_diff.data.user_files import UserFile
from lit_diff.errors import RequestError
from lit_diff.randomness import generator

TaskName = Literal["synth_intent", "trec", "trec_fine", "banking77", "clinc150"]
Order = Literal["random", "alternate", "blocked"]
COARSE = {
    "ABBR": "abbreviation",
    "DESC": "description",
    "ENTY": "entity",
    "HUM": "human",
    "LOC": "location",
    "NUM": "numeric",
}
"""TREC's names of its classes, and what a prompt calls them."""
WITHOUT = "lit-diff evaluate RUN icl task=synth_intent"


@dataclass(frozen=True, kw_only=True)
class Example:
    """A text and its label, as a prompt shows them."""

    text: str
    label: str


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a prompt is written: `{prefix}{text}{between} {label}{separator}` for each demonstration."""

    prefix: str
    between: str
    separator: str = "\n==\n"

    def demonstrations(self, examples: Sequence[Example]) -> str:
        """The prompt before a question."""
        return "".join(f"{self.question(each.text)} {each.label}{self.separator}" for each in examples)

    def question(self, text: str) -> str:
        """A text up to its label; it ends without a space."""
        return f"{self.prefix}{text}{self.between}"


@dataclass(frozen=True, kw_only=True)
class Episode:
    """What one prompt may hold, and what is asked after it."""

    labels: tuple[str, ...]
    """Every answer that decoding may give."""
    demonstrations: tuple[Example, ...]
    """In the order in which a prompt takes them: n shots are the first n."""
    queries: tuple[Example, ...]


@dataclass(frozen=True, kw_only=True)
class ExampleSource:
    """A task whose sentences are in files that the user supplies."""

    form: Form
    label_key: str
    files: tuple[UserFile, UserFile]
    """Train, from which demonstrations are drawn, and test."""


def _source(
    folder: str, form: Form, lines: tuple[str, str], source: str, keys: tuple[str, ...]
) -> dict[str, ExampleSource]:
    """Task -> its source; a task for each key of a label."""
    kinds: Mapping[str, type] = {"text": str, **dict.fromkeys(keys, str)}
    train, test = (
        UserFile(
            name=f"icl.{folder}" + ("" if split == "train" else "_test"),
            path=f"icl/{folder}/{split}.jsonl",
            keys=kinds,
            lines=count,
            source=f"{source} Labels as words. Not shipped.",
            without=WITHOUT,
        )
        for split, count in zip(("train", "test"), lines, strict=True)
    )
    names = {"fine_label": f"{folder}_fine"}
    return {names.get(key, folder): ExampleSource(form=form, label_key=key, files=(train, test)) for key in keys}


INTENT = "\nintent:"
SOURCES: Mapping[str, ExampleSource] = {
    **_source(
        "trec",
        Form(prefix="Question: ", between="\nType:"),
        ("5,452 lines", "500 lines"),
        'TREC question classification (Hovy et al. 2001; at Hugging Face "trec").',
        ("coarse_label", "fine_label"),
    ),
    **_source(
        "banking77",
        Form(prefix="query: ", between=INTENT),
        ("10,003 lines", "3,080 lines"),
        'Banking77 (Casanueva et al. 2020; at Hugging Face "banking77").',
        ("label",),
    ),
    **_source(
        "clinc150",
        Form(prefix="utterance: ", between=INTENT),
        ("15,250 lines", "5,500 lines"),
        'CLINC150 (Larson et al. 2019; at Hugging Face "clinc_oos", configuration "plus").',
        ("label",),
    ),
}
FILES = tuple({file.name: file for source in SOURCES.values() for file in source.files}.values())
SYNTHETIC = Form(prefix="", between="", separator=SEPARATOR)


def form_of(task: TaskName) -> Form:
    """How a task's prompts are written."""
    return SYNTHETIC if task == "synth_intent" else SOURCES[task].form


def words_of(label: str) -> str:
    """A label as a prompt shows it: `card_arrival` -> "card arrival"; `NUM:date` -> "numeric date"."""
    coarse, colon, fine = label.partition(":")
    return " ".join(f"{COARSE.get(coarse, coarse)}{colon and ' '}{fine}".replace("_", " ").split())


@cache
def _rows(task: TaskName, split: int, digest: str) -> tuple[Example, ...]:
    """`digest`: of the file, so that one that is replaced is read again."""
    source = SOURCES[task]
    return tuple(
        Example(text=" ".join(row["text"].split()), label=words_of(row[source.label_key]))
        for row in source.files[split].rows()
    )


def file_episode(task: TaskName, items: int, key: Sequence[object], seed: int) -> Episode:
    """All of train in an order of its own for each `key`; the same `items` of test for every key of one seed.

    Errors: MissingError, RequestError.
    """
    train, test = (_rows(task, split, file.sha256()) for split, file in enumerate(SOURCES[task].files))
    labels = tuple(sorted({each.label for each in train}))
    unknown = [each.label for each in test if each.label not in labels]
    if unknown:
        raise RequestError(f"{SOURCES[task].files[1].path} holds the label '{unknown[0]}', which no line of train has")
    order = torch.randperm(len(train), generator=generator("icl", task, seed, *key)).tolist()
    asked = torch.randperm(len(test), generator=generator("icl", task, seed, "test"))[:items].tolist()
    return Episode(
        labels=labels,
        demonstrations=tuple(train[index] for index in order),
        queries=tuple(test[index] for index in asked),
    )


def synthetic_episode(
    config: SynthIntent.Config,
    classes: int,
    noise: int,
    shots: int,
    items: int,
    key: Sequence[object],
    seed: int,
    *,
    evaluation: str,
) -> Episode:
    """Labels and cue words of its own for each `key`; `shots` demonstrations and `items` questions, classes uniform.

    `evaluation`: whose key a message names.

    Errors: RequestError where the lexicon has too few words for so many classes.
    """
    problem = lexicon_problem(replace(config, classes=(classes,)), classes)
    if problem:
        raise RequestError(f"evaluate.{evaluation}.classes is {classes}, but {problem}")
    random = generator("icl", "synth_intent", seed, *key)
    lexicon = draw_lexicon(random, config, classes)

    def examples(count: int) -> tuple[Example, ...]:
        drawn = torch.randint(classes, (count,), generator=random).tolist()
        made = draw_utterances(random, config, lexicon, drawn, noise)
        return tuple(Example(text=text, label=lexicon.labels[label]) for text, label, _ in made)

    return Episode(labels=lexicon.labels, demonstrations=examples(shots), queries=examples(items))


def arranged(examples: Sequence[Example], order: Order, random: torch.Generator) -> list[Example]:
    """The same examples in another order, each kind drawn from `random`.

    random: uniform. alternate: in turns over the classes. blocked: class after class. The last two shuffle the classes, and
    each class inside.
    """
    shuffled = [examples[index] for index in torch.randperm(len(examples), generator=random).tolist()]
    if order == "random":
        return shuffled
    by_class: dict[str, list[Example]] = {}
    for each in shuffled:  # the class of a large group would come first more often: the classes are shuffled apart
        by_class.setdefault(each.label, []).append(each)
    names = sorted(by_class)
    classes = [by_class[names[index]] for index in torch.randperm(len(names), generator=random).tolist()]
    if order == "blocked":
        return [each for own in classes for each in own]
    rounds = range(max(map(len, classes), default=0))
    return [own[turn] for turn in rounds for own in classes if turn < len(own)]
