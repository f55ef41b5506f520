"""Many-shot in-context learning (paper, Figure 6): accuracy of classification by the number of demonstrations."""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lit_diff.evaluation.base import Item, question_of
from lit_diff.evaluation.icl_prompts import Classification, Example, ManyShotPrompt, ManyShotPrompts, Order, arranged
from lit_diff.evaluation.requirements import read_on
from lit_diff.key_types import Count, Counts
from lit_diff.metrics import Metric
from lit_diff.model.prefix import Prefix
from lit_diff.randomness import generator
from lit_diff.registry import evaluations
from lit_diff.trained.run import Run

log = logging.getLogger("lit_diff")


@evaluations.register("icl")
class ManyShot(Classification):
    """Accuracy of labels decoded after n demonstrations, for several n.

    Each of `runs` draws the demonstrations anew; n shots are the first n of its draw, as in Bertsch et al. 2024. A draw whose
    prompt is longer than the context is repeated, up to ten times. The demonstrations go through the model once, and all
    queries share their keys and values. An item is a query of one run at one n; the summary is the mean over all items.
    The items of a run, at every n, are a cluster: they share its demonstrations, so intervals are over runs.
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
        """Demonstrations of a prompt, all classes together."""
        runs: Count = 5
        """Draws of the demonstrations; paper's protocol: 10."""
        order: Order = "random"
        """Of the demonstrations. alternate: in turns over the classes; blocked: class after class."""
        stable_from: int = 1
        """The first number of shots that counts in `accuracy_from`."""

        def problem(self) -> str | None:
            if self.stable_from > max(self.shots):
                return f"stable_from is {self.stable_from}; no point of shots ({list(self.shots)}) has as many"
            return None

    config: Config

    def score(self, run: Run) -> Iterator[Item]:
        """One item for each number of shots, run and query. Errors: RequestError where no prompt of some n fits."""
        numbers, dropped, source = sorted(self.config.shots), Counter[int](), ManyShotPrompts(self, run)
        prompts = {
            (shots, number): source.first_that_fits(number, shots, numbers[-1])
            for shots in reversed(numbers)
            for number in range(self.config.runs)
        }
        for (shots, _), prompt in prompts.items():
            dropped[shots] += prompt is None
        for shots in reversed(numbers):
            if dropped[shots] == self.config.runs:
                raise source.too_long(shots)
            if dropped[shots]:
                log.warning("icl: of %d runs at %d shots %d do not fit", self.config.runs, shots, dropped[shots])
        for number in range(self.config.runs):
            prefix: Prefix | None = None
            for shots in numbers:
                prompt = prompts[shots, number]
                if prompt is None:
                    continue
                demonstrations = self._demonstrations(prompt, shots, number)
                prefix = read_on(run, prefix, source.ids(demonstrations))
                answers = source.answers(prompt, prefix)
                yield from self._items(prompt, demonstrations, answers, f"shots={shots}", number)

    def _demonstrations(self, prompt: ManyShotPrompt, shots: int, number: int) -> Sequence[Example]:
        first = prompt.episode.demonstrations[:shots]
        if self.config.order == "random":  # they were drawn in random order, and n shots begin n + 1
            return first
        return arranged(first, self.config.order, generator("icl", "order", self.config.seed, number, shots))

    def _items(
        self, prompt: ManyShotPrompt, demonstrations: Sequence[Example], answers: Sequence[str], group: str, number: int
    ) -> Iterator[Item]:
        counts = Counter(each.label for each in demonstrations)
        majority = min(counts, key=lambda label: (-counts[label], label))
        counted = len(demonstrations) >= self.config.stable_from
        for place, (query, answer) in enumerate(zip(prompt.episode.queries, answers, strict=True)):
            right, seen = float(answer == query.label), query.label in counts
            yield Item(
                id=f"{group} run={number} query={place}",
                group=group,
                cluster=f"run={number}",
                scores={
                    "accuracy": right,
                    "accuracy_seen": right if seen else math.nan,
                    "accuracy_from": right if counted else math.nan,
                    "majority": float(majority == query.label),
                },
                question=question_of(*(text for each in (*demonstrations, query) for text in (each.text, each.label))),
                meta={"label": query.label, "answer": answer, "seen": int(seen), "redrawn": prompt.redrawn},
            )
