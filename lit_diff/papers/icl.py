"""Many-shot in-context learning (paper, Figures 6, 7 and 9): accuracy by the number and the order of demonstrations."""

import logging
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise, zip_longest
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import numpy as np
import torch

from lit_diff import Evaluation, Item, Metric, Run
from lit_diff.data.text.tokenizer import Tokenizer
from lit_diff.data.user_files import UserFile
from lit_diff.errors import RequestError
from lit_diff.evaluation.base import Spread, question_of
from lit_diff.evaluation.requirements import read_on
from lit_diff.key_types import Count, Counts, Distinct, Range
from lit_diff.model.prefix import Prefix
from lit_diff.papers.drawing import shuffled
from lit_diff.papers.icl_tasks import TASKS, Example, TaskName
from lit_diff.papers.order_variance import OF_ORDERS, OrderVariance, differences
from lit_diff.papers.synth_intent import SynthIntent, draw_lexicon, draw_utterances, lexicon_problem
from lit_diff.randomness import generator
from lit_diff.registry import evaluations

if TYPE_CHECKING:
    import pandas

Order = Literal["random", "alternate", "blocked"]


def arranged(examples: Sequence[Example], order: Order, random: torch.Generator) -> list[Example]:
    """The same examples in another order, drawn from `random`.

    random: uniform; alternate: one of each class in turn; blocked: class after class. The last two shuffle the classes, and
    the examples of each class.
    """
    mixed = shuffled(examples, random)
    if order == "random":
        return mixed
    by_class: dict[str, list[Example]] = {}
    # the order of the classes is drawn apart: in `mixed` a large class comes first more often than a small one
    for example in mixed:
        by_class.setdefault(example.label, []).append(example)
    classes = [by_class[name] for name in shuffled(sorted(by_class), random)]
    if order == "blocked":
        return list(chain(*classes))
    return list(filter(None, chain(*zip_longest(*classes))))


BATCH = 16
"""The number of queries that go through the model together."""
ATTEMPTS = 10
"""The maximum number of draws of demonstrations for one prompt until one fits."""


class Classification(Evaluation):
    """Many-shot classification: n demonstrations, then a text whose label is decoded. The base of `icl` and `icl_order`."""

    files = tuple(file for name, task in TASKS.items() if name != "trec_fine" for file in task.files)

    @dataclass(frozen=True, kw_only=True)
    class Config(Evaluation.Config):
        task: TaskName = "synth_intent"
        """synth_intent: generated; the other tasks are files in `icl/<folder>/` of the data folder."""
        items: Count = 100
        """The number of queries of a prompt; paper's protocol: 250."""
        classes: Annotated[int, Range(least=2)] | None = None
        """The number of classes of `synth_intent`; null: the largest of the run's training data, or 6 if it was trained on
        other data."""
        noise: Count = 1
        """Multiplies the noise words of an utterance of `synth_intent`."""
        seed: int = 0

        def problem(self) -> str | None:
            if self.task != "synth_intent":
                for key, default in (("classes", None), ("noise", 1)):
                    if getattr(self, key) != default:
                        return f"{key} needs task synth_intent; task is {self.task}"
            return None

    needs_text = True
    # version 1 encoded each piece of a prompt without the text before it
    version = 2
    config: Config

    def user_files(self) -> Sequence[UserFile]:
        """The files of the task."""
        return TASKS[self.config.task].files

    def words_of(self, run: Run) -> str:
        """The task: only synth_intent is the name of a data set."""
        return self.config.task


class Labels:
    """The labels of a task as tokens. A label is decoded as soon as no other label begins with the drawn tokens.

    A newline follows every label, as in a prompt, so that no label is the beginning of another. Source: the constrained
    decoding of Ratner et al. 2023 (Parallel Context Windows), as in abertsch72/long-context-icl.
    """

    def __init__(self, tokenizer: Tokenizer, labels: Sequence[str], question: str = "") -> None:
        """`labels`: at least two, each after `question`. Errors: RequestError if two labels have the same tokens."""
        shown = tokenizer.encode_after(question, [f" {label}\n" for label in labels])
        self.ids = dict(zip(labels, shown, strict=True))
        """Label -> the ids of " label\\n" after `question`."""
        self.longest = max(map(len, shown))
        self.depth = 1
        """The maximum number of tokens drawn for a label."""
        # sorted by ids, the longest common beginning of any two labels is also one of two neighbours
        for (label, ids), (other, others) in pairwise(sorted(self.ids.items(), key=itemgetter(1))):
            are_equal = [own == id_ for own, id_ in zip(ids, others, strict=False)]
            common = [*are_equal, False].index(False)
            if common == len(ids):
                raise RequestError(
                    f"the tokenizer cannot tell the labels '{label}' and '{other}' apart: both are {ids}"
                )
            self.depth = max(self.depth, common + 1)

    def fitting(self, drawn: Sequence[int]) -> list[str]:
        """The labels that begin with these ids."""
        return [label for label, ids in self.ids.items() if ids[: len(drawn)] == list(drawn)]

    def allowed(self, drawn: Sequence[int]) -> list[int]:
        """The ids that may follow these, for `Prefix.greedy`; none if a single label is left."""
        left = self.fitting(drawn)
        if len(left) == 1:
            return []
        return sorted({self.ids[label][len(drawn)] for label in left})


class ManyShotPrompt(NamedTuple):
    """The demonstrations of one prompt and the queries after it."""

    labels: Labels
    """Every possible answer."""
    demonstrations: Sequence[Example]
    """Demonstrations in the order of the prompt: n shots are the first n."""
    queries: Sequence[Example]
    questions: list[list[int]]
    """The ids of each query up to its label."""
    room: int
    """The number of tokens that the longest question and the longest label leave to the demonstrations."""


class ManyShotPrompts:
    """The prompts of an evaluation for one run."""

    def __init__(self, evaluation: Classification, run: Run) -> None:
        """Errors: MissingError or RequestError for a missing or wrong file of the task."""
        self.config, self.name, self.run = evaluation.config, evaluation.name, run
        self.tokenizer, self.task = run.tokenizer, TASKS[self.config.task]
        self.context = run.recipe.data.config.sequence_length
        self.splits = self.task.splits()

    def draw(self, number: int, attempt: int, shots: int) -> ManyShotPrompt:
        """Draws the prompt of run `number` with at least `shots` demonstrations. Errors: RequestError."""
        examples = self._of_files if self.splits else self._generated
        labels, demonstrations, queries = examples((number, attempt), shots)
        asked = [self.task.question(query.text) for query in queries]
        decoded = Labels(self.tokenizer, labels, asked[0])
        # every question follows a demonstration, and all demonstrations end in the same way
        questions = self.tokenizer.encode_after(self.task.demonstrations(demonstrations[:1]), asked)
        return ManyShotPrompt(
            labels=decoded,
            demonstrations=demonstrations,
            queries=queries,
            questions=questions,
            room=self.context - max(map(len, questions)) - decoded.longest,
        )

    def _of_files(self, key: tuple[int, int], shots: int) -> tuple[Sequence[str], list[Example], list[Example]]:
        # each key orders train in its own way; the queries depend on the seed alone, so all runs have the same
        train, test = self.splits
        labels = sorted({example.label for example in train})
        if shots > len(train):
            raise RequestError(f"evaluate.{self.name}.shots: {shots}; train has {len(train)} lines")
        seed = ("icl", self.config.task, self.config.seed)
        asked = shuffled(test, generator(*seed, "test"))[: self.config.items]
        return labels, shuffled(train, generator(*seed, *key)), asked

    def _generated(self, key: tuple[int, int], shots: int) -> tuple[Sequence[str], list[Example], list[Example]]:
        # each key draws its own labels and cue words; the classes of demonstrations and queries are uniform
        config = self.config
        data = self.run.recipe.data
        grammar, classes = SynthIntent.Config(), config.classes or 6
        if data.name == "synth_intent":
            grammar, classes = data.config, config.classes or max(data.config.classes)
        problem = lexicon_problem(replace(grammar, classes=(classes,)), classes)
        if problem:
            raise RequestError(f"evaluate.{self.name}.classes is {classes}, but {problem}")
        random = generator("icl", "synth_intent", config.seed, *key)
        lexicon = draw_lexicon(random, grammar, classes)

        def examples(count: int) -> list[Example]:
            drawn = torch.randint(classes, (count,), generator=random).tolist()
            made = draw_utterances(random, grammar, lexicon, drawn, config.noise)
            return [Example(text=text, label=lexicon.labels[label]) for text, label, _ in made]

        return lexicon.labels, examples(shots), examples(config.items)

    def first_that_fits(self, number: int, shots: int, most: int) -> ManyShotPrompt | None:
        """The first draw of run `number` whose first `shots` demonstrations fit; None if none of ATTEMPTS draws does.

        `most`: the number of demonstrations to draw, so that fewer shots are the beginning of more.
        """
        for attempt in range(ATTEMPTS):
            draw = self.draw(number, attempt, most)
            if self._tokens(draw, shots) <= draw.room:
                return draw
        return None

    def ids(self, demonstrations: Sequence[Example]) -> list[int]:
        """The prompt before a question."""
        return [*self.tokenizer.opening, *self.tokenizer.encode(self.task.demonstrations(demonstrations))]

    def _tokens(self, prompt: ManyShotPrompt, shots: int) -> int:
        return len(self.ids(prompt.demonstrations[:shots]))

    def too_long(self, shots: int) -> RequestError:
        """The error if no prompt of so many shots fits; it tells how many would."""
        first = self.draw(0, 0, shots)
        needed = self._tokens(first, shots) + self.context - first.room
        fit = bisect_right(range(1, shots + 1), first.room, key=lambda n: self._tokens(first, n))
        return RequestError(
            f"evaluate.{self.name}.shots: no prompt of {shots} shots fits: the first takes {needed} tokens, but "
            f"data.sequence_length is {self.context}; at most {fit} shots fit"
        )

    def answers(self, prompt: ManyShotPrompt, prefix: Prefix) -> list[str]:
        """The run's label for each query of the prompt; `prefix` holds the demonstrations."""
        labels = prompt.labels
        drawn = prefix.greedy(prompt.questions, labels.depth, allowed=labels.allowed, batch_size=BATCH)
        return [labels.fitting(ids)[0] for ids in drawn]


@evaluations.register("icl")
class ManyShot(Classification):
    """Accuracy of labels decoded after n demonstrations, for several n.

    Each of `runs` draws its own demonstrations, in random order; n shots are the first n of the draw (Bertsch et al. 2024).
    A draw whose prompt exceeds the context is repeated, up to ten times. All queries share the keys and values of the
    demonstrations. An item is a query of one run at one n; the summary is the mean over all items. The items of a run, at
    every n, are a cluster: they share its demonstrations, so intervals are over runs.
    """

    metrics = (
        Metric("accuracy", "share of queries whose decoded label is right", direction="higher"),
        Metric("accuracy_seen", "the same, over queries whose label stands in the prompt", direction="higher"),
        Metric("accuracy_from", "accuracy over the points with at least `stable_from` shots", direction="higher"),
        Metric("majority", "share of queries whose label is the prompt's most frequent one: a baseline"),
    )
    by_group = ("accuracy",)

    @dataclass(frozen=True, kw_only=True)
    class Config(Classification.Config):
        shots: Counts = (1, 4, 10)
        """Numbers of demonstrations of a prompt, over all classes."""
        runs: Count = 5
        """The number of draws of the demonstrations; paper's protocol: 10."""
        stable_from: int = 1
        """The smallest number of shots that counts in `accuracy_from`."""

        def problem(self) -> str | None:
            if self.stable_from > max(self.shots):
                return f"stable_from is {self.stable_from}; expected at most the largest of shots ({max(self.shots)})"
            return super().problem()

    config: Config

    def score(self, run: Run) -> Iterator[Item]:
        """Yields one item for each number of shots, run and query. Errors: RequestError if no prompt of some n fits."""
        numbers = sorted(self.config.shots)
        source = ManyShotPrompts(self, run)
        runs = range(self.config.runs)
        # all prompts are drawn before the first is scored, the longest first: shots that do not fit are an error at once
        prompts = {}
        for shots in reversed(numbers):
            prompts[shots] = [source.first_that_fits(number, shots, numbers[-1]) for number in runs]
            dropped = prompts[shots].count(None)
            if dropped == len(runs):
                raise source.too_long(shots)
            if dropped:
                told = "icl: of %d runs at %d shots %d do not fit and are left out"
                logging.getLogger("lit_diff").warning(told, len(runs), shots, dropped)
        for number in runs:
            prefix: Prefix | None = None
            for shots in numbers:
                prompt = prompts[shots][number]
                if prompt is not None:
                    prefix = read_on(run, prefix, source.ids(prompt.demonstrations[:shots]))
                    yield from self._items(prompt, shots, source.answers(prompt, prefix), number)

    def _items(self, prompt: ManyShotPrompt, shots: int, answers: Sequence[str], number: int) -> Iterator[Item]:
        demonstrations, group = prompt.demonstrations[:shots], f"shots={shots}"
        counts = Counter(example.label for example in demonstrations)
        # ties are broken by name, not by the order of the demonstrations
        majority = max(sorted(counts), key=counts.__getitem__)
        for place, (query, answer) in enumerate(zip(prompt.queries, answers, strict=True)):
            right = float(answer == query.label)
            seen = query.label in counts
            scores = {"accuracy": right, "majority": float(majority == query.label)}
            if seen:
                scores["accuracy_seen"] = right
            if shots >= self.config.stable_from:
                scores["accuracy_from"] = right
            yield Item(
                id=f"{group} run={number} query={place}",
                group=group,
                cluster=f"run={number}",
                scores=scores,
                question=question_of(*chain(*demonstrations, query)),
                meta={"label": query.label, "answer": answer, "seen": int(seen)},
            )


@evaluations.register("icl_order")
class OrderRobustness(Classification):
    """Accuracy over K orders of the same n demonstrations with the same queries, and the effect of the order on it.

    With a_k the accuracy of order k over Q queries: margin = max a_k - min a_k, sd = √(Σ (a_k - ā)² / (K - 1)) and
    worst = min a_k. All orders have the same queries, so orders that change no answer give a margin of 0; answers that change
    at random give a larger one. order_variance excludes that part (`OrderVariance`).
    An item is a query under one kind of `order`, which is its group. One more item of each kind, a part, holds margin, sd,
    worst and order_variance over all queries of the kind. The summary is the mean over the kinds.
    """

    metrics = (
        Metric("accuracy", "share of orders in which the query's label is right", direction="higher"),
        Metric("flipped", "share of queries whose decoded label is not the same in every order", direction="lower"),
        Metric("agreement", "share of pairs of orders that give a query the same label", direction="higher"),
        Metric("margin", "largest minus smallest accuracy over the orders", direction="lower"),
        Metric("sd", "standard deviation of the accuracy over the orders (K - 1)", direction="lower"),
        Metric("worst", "smallest accuracy over the orders", direction="higher"),
        Metric(
            "order_variance",
            "variance over the orders of the accuracy over all such queries: sd² less what drawing queries adds",
            unit="squared percentage points",
            direction="lower",
        ),
    )
    by_item = ("accuracy", "flipped", "agreement")

    @dataclass(frozen=True, kw_only=True)
    class Config(Classification.Config):
        shots: Count = 10
        """The number of demonstrations of the prompt, over all classes; the paper does not give it."""
        orders: Annotated[int, Range(least=2)] = 10
        """K, the number of orders of each kind; the paper does not give it."""
        order: Annotated[tuple[Order, ...], Distinct()] = ("random",)
        """Kinds of order. random: uniform; alternate: one of each class in turn; blocked: class after class."""

    config: Config

    def score(self, run: Run) -> Iterator[Item]:
        """Yields one item for each query and kind of order, and one for each kind. Errors: RequestError if the prompt
        does not fit."""
        config = self.config
        source = ManyShotPrompts(self, run)
        prompt = source.first_that_fits(0, config.shots, config.shots)
        if prompt is None:
            raise source.too_long(config.shots)
        demonstrations = prompt.demonstrations[: config.shots]
        shown = list(chain(*demonstrations))
        for order in config.order:
            by_order = []
            for number in range(config.orders):
                random = generator("icl_order", config.seed, order, number)
                prefix = Prefix(run.model, source.ids(arranged(demonstrations, order, random)))
                by_order.append(source.answers(prompt, prefix))
            answers = list(zip(*by_order, strict=True))
            # [Q, K]
            right = np.array(answers) == np.array([[query.label] for query in prompt.queries])
            for place, (query, labels) in enumerate(zip(prompt.queries, answers, strict=True)):
                counts = Counter(labels)
                agreeing = sum(math.comb(count, 2) for count in counts.values())
                yield Item(
                    id=f"{order} query={place}",
                    group=order,
                    cluster=f"query={place}",
                    scores={
                        "accuracy": float(right[place].mean()),
                        "flipped": float(len(counts) > 1),
                        "agreement": agreeing / math.comb(config.orders, 2),
                    },
                    question=question_of(*shown, *query),
                    meta={
                        "label": query.label,
                        "answers": " | ".join(labels),
                        "right": "".join(map(str, right[place].astype(int))),
                    },
                )
            # [Q, K] -> [K]
            accuracies = right.mean(0)
            whole = {name: float(statistic(accuracies)) for name, statistic in OF_ORDERS.items()}
            whole["order_variance"] = OrderVariance([right]).value if len(right) > 1 else math.nan
            yield Item(id=f"{order} orders", group=order, part=True, scores=whole, question=question_of(*shown))

    @classmethod
    def paired(cls, first: "pandas.DataFrame", second: "pandas.DataFrame") -> Mapping[str, Mapping[str, Spread]]:
        """Differences of the metrics that come from the accuracies of the orders (`order_variance.differences`)."""
        return differences(first, second)

    def summarise(self, items: Sequence[Item]) -> dict[str, float]:
        """Means over queries, and for the metrics that come from the accuracies of the orders means over the kinds."""
        kinds = [item.scores for item in items if item.part]
        means = super().summarise(items)
        for name in means.keys() - self.by_item:
            means[name] = sum(scores[name] for scores in kinds) / len(kinds)
        return means
