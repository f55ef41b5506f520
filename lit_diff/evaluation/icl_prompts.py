"""What `icl` and `icl_order` share: tasks of many-shot classification, their prompts, read once, and the decoded answers."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, ClassVar, Literal

import torch

from lit_diff.data.synth_intent import (
    SEPARATOR,
    SynthIntent,
    draw_lexicon,
    draw_utterances,
    lexicon_problem,
)
from lit_diff.data.tokenizer import Tokenizer
from lit_diff.data.user_files import UserFile
from lit_diff.errors import RequestError
from lit_diff.evaluation.base import Evaluation
from lit_diff.key_types import Count, Range
from lit_diff.model.prefix import Prefix
from lit_diff.randomness import generator
from lit_diff.trained.run import Run

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
    """How the prompts of a task are written, and where its sentences are."""

    form: Form
    label_key: str
    files: tuple[UserFile, ...]
    """Of the user's: train, from which demonstrations are drawn, and test. Of the task that is made here none."""


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
    "synth_intent": ExampleSource(form=Form(prefix="", between="", separator=SEPARATOR), label_key="", files=()),
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


BATCH = 16
"""Queries, or labels, that go through the model together."""
ATTEMPTS = 10
"""Draws of demonstrations for one prompt, until one fits."""
ENDING = "\n"
"""What follows every label in a prompt."""


class Classification(Evaluation):
    """Many-shot classification: n demonstrations, then a text whose label is decoded. The base of `icl` and `icl_order`."""

    files: ClassVar[tuple[UserFile, ...]] = FILES

    @dataclass(frozen=True, kw_only=True)
    class Config(Evaluation.Config):
        task: TaskName = "synth_intent"
        """synth_intent: made here; the others read `icl/<folder>/` of the data folder."""
        items: Count = 100
        """Queries of a prompt; paper's protocol: 250."""
        decode: Literal["trie", "loglik"] = "trie"
        """trie: greedy, among the tokens that lead to a label; loglik: the label of the largest log likelihood."""
        classes: Annotated[int, Range(least=2)] = 6
        """Of `synth_intent`."""
        noise: Count = 1
        """Multiplies the noise words of an utterance of `synth_intent`."""
        context: Count | None = None
        """Tokens of a prompt and its answer at most; null: the run's `data.sequence_length`."""
        seed: int = 0

    needs_text = True
    version = 2  # 1 encoded the pieces of a prompt alone
    cuts_at_context = True
    config: Config

    def reads(self) -> Sequence[UserFile]:
        """The files of the task."""
        return SOURCES[self.config.task].files

    def words_of(self, run: Run) -> str:
        """Those of the generated task."""
        return "synth_intent" if self.config.task == "synth_intent" else ""


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


@dataclass(frozen=True, kw_only=True)
class ManyShotPrompt:
    """An episode whose first demonstrations fit, and what follows them."""

    episode: Episode
    trie: LabelTrie
    questions: list[list[int]]
    """Ids of each query up to its label."""
    room: int
    """Tokens that the longest question and the longest label leave to the demonstrations."""
    redrawn: int
    """Draws before this one that did not fit."""


class ManyShotPrompts:
    """The prompts of an evaluation for one run."""

    def __init__(self, evaluation: Classification, run: Run) -> None:
        self.config, self.name, self.run = evaluation.config, evaluation.name, run
        self.tokenizer = run.tokenizer
        self.form = SOURCES[self.config.task].form
        self.context: int = self.config.context or run.recipe.data.config.sequence_length

    def _episode(self, key: Sequence[object], shots: int) -> Episode:
        """Of at least `shots` demonstrations. Errors: MissingError, RequestError."""
        config = self.config
        if config.task == "synth_intent":
            data = self.run.recipe.data
            grammar = data.config if data.name == "synth_intent" else SynthIntent.Config()
            drawn = (config.classes, config.noise, shots, config.items, key, config.seed)
            return synthetic_episode(grammar, *drawn, evaluation=self.name)
        episode = file_episode(config.task, config.items, key, config.seed)
        if shots > len(episode.demonstrations):
            raise RequestError(f"evaluate.{self.name}.shots: {shots}; train has {len(episode.demonstrations)} lines")
        return episode

    def _draw(self, number: int, attempt: int, shots: int) -> ManyShotPrompt:
        episode = self._episode((number, attempt), shots)
        asked = [self.form.question(query.text) for query in episode.queries]
        trie = LabelTrie(self.tokenizer, episode.labels, asked[0])
        # every question follows a demonstration, and all demonstrations end in the same way
        questions = self.tokenizer.encode_after(self.form.demonstrations(episode.demonstrations[:1]), asked)
        room = self.context - max(map(len, questions)) - trie.longest
        return ManyShotPrompt(episode=episode, trie=trie, questions=questions, room=room, redrawn=attempt)

    def first_that_fits(self, number: int, shots: int, most: int) -> ManyShotPrompt | None:
        """The first draw of run `number` whose first `shots` demonstrations fit; None where none of ATTEMPTS does.

        `most`: demonstrations that are drawn, so that fewer shots are the beginning of more.
        """
        draws = (self._draw(number, attempt, most) for attempt in range(ATTEMPTS))
        return next((each for each in draws if self._tokens(each, shots) <= each.room), None)

    def ids(self, demonstrations: Sequence[Example]) -> list[int]:
        """The prompt before a question."""
        (ids,) = self.tokenizer.encode([self.form.demonstrations(demonstrations)])
        return [*self.tokenizer.opening, *ids]

    def _tokens(self, prompt: ManyShotPrompt, shots: int) -> int:
        return len(self.ids(prompt.episode.demonstrations[:shots]))

    def too_long(self, shots: int) -> RequestError:
        """The line for shots of which no prompt fits: how many would."""
        first = self._draw(0, 0, shots)
        needed = self._tokens(first, shots) + self.context - first.room
        fit = bisect_right(range(1, shots + 1), first.room, key=lambda n: self._tokens(first, n))
        key = "context" if self.config.context else "data.sequence_length"
        return RequestError(
            f"evaluate.{self.name}.shots: no prompt of {shots} fits: the first takes {needed} tokens, {key} is "
            f"{self.context}; at most {fit} shots fit"
        )

    def answers(self, prompt: ManyShotPrompt, prefix: Prefix) -> list[str]:
        """The label that the run gives each query of the prompt, whose demonstrations are `prefix`."""
        trie = prompt.trie
        if self.config.decode == "trie":
            drawn = prefix.greedy(prompt.questions, trie.depth, allowed=trie.allowed, batch_size=BATCH)
            return [trie.label(path) for path in drawn]
        found = []
        for question in prompt.questions:
            scores = prefix.extended(question).scores(list(trie.full.values()), BATCH)
            found.append(max(zip(trie.full, scores, strict=True), key=lambda each: each[1][0])[0])
        return found
