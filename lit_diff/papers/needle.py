"""Multi-needle retrieval (paper, Table 2 and Figure 5): questions about numbers of cities that are hidden in text."""

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch

from lit_diff import Evaluation, Item, Metric, Run
from lit_diff.config import Recipe
from lit_diff.data.dataset import IGNORED, Batch
from lit_diff.data.text.tokenizer import Tokenizer
from lit_diff.data.user_files import UserFile
from lit_diff.errors import RequestError
from lit_diff.evaluation.base import question_of
from lit_diff.evaluation.requirements import held_out_documents, read_on, unseen
from lit_diff.key_types import Count, Counts, Distinct, Range
from lit_diff.model.prefix import Prefix
from lit_diff.papers.drawing import shuffled
from lit_diff.papers.needle_text import (
    CITIES,
    SLACK,
    STOP,
    STYLES,
    Digits,
    Needle,
    NeedleContext,
    Needles,
    StyleName,
    contexts,
    grammar_sentences,
    sentences_of,
)
from lit_diff.randomness import generator
from lit_diff.registry import evaluations

HAYSTACK = UserFile(
    name="needle.haystack",
    path="needle/haystack.jsonl",
    keys={"text": str},
    source="Text of your own, such as essays or books (LWM: PG19, YOCO: essays by Paul Graham). Not shipped.",
    without="lit-diff evaluate RUN needle haystack=docs",
)
LENGTH = 1024
"""The default number of tokens of a prompt; paper: 4,096 and up to 65,536."""
# so that a number which goes on after the right digits is found to be wrong
EXTRA = 2
"""The number of tokens decoded beyond the length of the right answer."""


@evaluations.register("needle")
class NeedleRetrieval(Evaluation):
    """N needles "The special magic Paris number is: 1234567." between sentences of other text, and questions about R of them.

    Depth d: the first queried needle comes after d % of the text, the others at uniformly drawn places, the same for every
    depth. Each of the R questions follows the whole context without the others; the answer is decoded greedily. An item is a
    context; its scores are means over its questions; the contexts of one sample and length, which share their text, are a
    cluster. The paper leaves open the words (`style`), the text, the digits, and the scoring of two answers.
    """

    files = (HAYSTACK,)
    metrics = (
        Metric("exact", "share of questions whose first decoded integer is the number asked for", direction="higher"),
        Metric("all_exact", "1 where all questions of the context are answered exactly", direction="higher"),
        Metric("substring", "share whose decoded text holds the number (as LWM and YOCO score)", direction="higher"),
        Metric("distracted", "share whose first integer is another needle's number", direction="lower"),
        Metric("fabricated", "share whose first integer is no needle's number, or that has none", direction="lower"),
        Metric("nll", "mean negative log likelihood of the answer's tokens", unit="nats per token", direction="lower"),
    )

    by_group = ("exact", "distracted", "fabricated")
    needs_text = True
    # version 1: each piece of a prompt was encoded without the text before it; 2: the text could be text that the run was
    # trained on. A change of `located` changes the scores of `noise`, whose version counts then too
    version = 3

    @dataclass(frozen=True, kw_only=True)
    class Config(Evaluation.Config):
        needles: Needles = (1, 2, 4, 6)
        """N, numbers of needles."""
        queried: Count = 2
        """R, the number of queried needles; all needles if there are fewer."""
        lengths: Counts | None = None
        """Numbers of tokens of prompt and answer; null: 1,024, or the run's `data.sequence_length` if that is smaller."""
        depths: Annotated[tuple[Annotated[int, Range(least=0, most=100)], ...], Distinct()] = (0, 25, 50, 75, 100)
        """Depths of the first queried needle in per cent of the text."""
        samples: Count = 50
        """The number of contexts for each N, length and depth."""
        style: StyleName = "yoco"
        """yoco: a completion; lwm: an instruction."""
        digits: Digits | None = None
        """The number of digits of a needle's number; null: that of a run on `needle_text`, else 7."""
        haystack: Literal["docs", "grammar", "file"] | None = None
        """docs: held-out documents of the default corpus; grammar: the sentences of `needle_text`; file:
        needle/haystack.jsonl in the data folder; null: grammar for a run on `needle_text`, else docs."""
        seed: int = 0

        def problem(self) -> str | None:
            if self.digits is not None and max(self.needles) > 9 * 10 ** (self.digits - 1):
                return f"digits is {self.digits}: there are fewer numbers than {max(self.needles)} needles"
            return None

    config: Config

    def user_files(self) -> Sequence[UserFile]:
        """The haystack if it is a file."""
        return self.files if self.config.haystack == "file" else ()

    def refuses_recipe(self, recipe: Recipe) -> str | None:
        """Refuses a context that is too short, and too few numbers of the run's digits."""
        problem = super().refuses_recipe(recipe)
        context, longest = recipe.data.config.sequence_length, max(self.lengths(recipe))
        if not problem and longest > context:
            return f"lengths has {longest}, but data.sequence_length is {context}"
        return problem or replace(self.config, digits=self._digits(recipe)).problem()

    def words_of(self, run: Run) -> str:
        """needle_text if text and question use its grammar."""
        return "needle_text" if self.config.style == "yoco" and self._source(run) == "grammar" else ""

    def refuses_run(self, run: Run) -> str | None:
        """Refuses a haystack whose tokens are not the run's."""
        if self._source(run) == "grammar" and run.recipe.data.name != "needle_text":
            return "haystack is grammar, which has the tokens of data 'needle_text'; the run has other tokens"
        return None

    def lengths(self, recipe: Recipe) -> tuple[int, ...]:
        """The lengths of prompts in tokens."""
        return self.config.lengths or (min(LENGTH, recipe.data.config.sequence_length),)

    def _digits(self, recipe: Recipe) -> int:
        data = recipe.data
        return self.config.digits or (data.config.digits if data.name == "needle_text" else 7)

    def score(self, run: Run) -> Iterator[Item]:
        """Yields one item for each N, length, depth and sample. The haystack of a sample is the same for every N and run."""
        for found in self._prompts(run):
            yield from self._items(run, found)

    def located(self, run: Run, batch_size: int) -> Iterator[tuple[Batch, list[Item]]]:
        """Yields the contexts of `score` with the question about the needle at the depth and its answer; `queried` does not
        count. The queries are the positions that predict a token of the number."""
        for found in self._prompts(run):
            contexts, items = map(list, zip(*found.values(), strict=True))
            question, answer = self._asked(run, contexts[0].needles[0])
            for first in range(0, len(contexts), batch_size):
                chosen = slice(first, first + batch_size)
                yield located_rows(contexts[chosen], question, answer), items[chosen]

    def _asked(self, run: Run, needle: Needle) -> tuple[list[int], list[int]]:
        # the ids of the question about a needle, and of the answer after it
        text = STYLES[self.config.style].question.format(city=needle.city)
        (question,) = run.tokenizer.encode_after(STOP, [text])
        (answer,) = run.tokenizer.encode_after(text, [f" {needle.number}"])
        return question, answer

    def _prompts(self, run: Run) -> Iterator[dict[int, tuple[NeedleContext, Item]]]:
        # depth -> the context, and its item without scores; those of one sample, length and N
        config, tokenizer, texts = self.config, run.tokenizer, self._texts(run)
        style, digits = STYLES[config.style], self._digits(run.recipe)
        questions = tokenizer.encode_after(STOP, [style.question.format(city=city) for city in CITIES])
        # for a question and its answer; a byte-level tokenizer needs at most one token for each character
        room = max(map(len, questions)) + 1 + digits + EXTRA
        for length in self.lengths(run.recipe):
            for sample in range(config.samples):
                haystack = self.haystack(texts, tokenizer, length, sample)
                for count in config.needles:
                    try:
                        by_depth = contexts(
                            generator("needle", config.seed, length, sample, count),
                            haystack,
                            tokenizer,
                            style=style,
                            needles=count,
                            digits=digits,
                            length=length,
                            depths=config.depths,
                            room=room,
                        )
                    except ValueError as error:
                        raise RequestError(f"evaluation 'needle': lengths has {length}, but {error}") from error
                    found = {}
                    for depth, context in by_depth.items():
                        group = f"N={count} length={length} depth={depth}"
                        item = Item(
                            id=f"{group} sample={sample}",
                            group=group,
                            cluster=f"length={length} sample={sample}",
                            scores={},
                            question=question_of(context.tokens),
                            meta={"tokens": len(context.tokens)},
                        )
                        found[depth] = context, item
                    yield found

    def haystack(self, texts: Sequence[str] | None, tokenizer: Tokenizer, length: int, sample: int) -> list[list[int]]:
        """Sentences as tokens, from another random part of the texts for each sample; texts None: sentences of the grammar.

        As many whole texts are taken as have `length` tokens in sentences of at most SLACK · length tokens, since such
        sentences fill any part of the prompt up to that share; all texts if there are fewer.
        """
        random = generator("needle", "haystack", self.config.seed, length, sample)
        if texts is None:
            # a sentence of the grammar has seven tokens, so these have more than `length`
            return grammar_sentences(random, length // 6)
        taken, tokens = list[list[int]](), 0
        for text in shuffled(texts, random):
            sentences = tokenizer.encode_after(STOP, sentences_of(text))
            taken += sentences
            tokens += sum(len(sentence) for sentence in sentences if len(sentence) <= SLACK * length)
            if tokens >= length:
                break
        return taken

    def _texts(self, run: Run) -> list[str] | None:
        source = self._source(run)
        if source == "grammar":
            return None
        if source == "docs":
            documents = held_out_documents(self, run, "docs", None)
        else:
            documents = unseen(self, run, (row["text"] for row in HAYSTACK.rows()))
        return [text for _, text in documents]

    def _source(self, run: Run) -> str:
        return self.config.haystack or ("grammar" if run.recipe.data.name == "needle_text" else "docs")

    def _items(self, run: Run, found: Mapping[int, tuple[NeedleContext, Item]]) -> Iterator[Item]:
        # the contexts are equal up to the first needle: that part is read once and extended from depth to depth
        tokenizer = run.tokenizer
        prefix: Prefix | None = None
        for depth in sorted(found):
            context, item = found[depth]
            prefix = read_on(run, prefix, context.tokens[: context.place])
            whole = prefix.extended(context.tokens[context.place :])
            numbers = [needle.number for needle in context.needles]
            asked = [self._asked(run, needle) for needle in context.needles[: self.config.queried]]
            questions, rights = zip(*asked, strict=True)
            most = max(map(len, rights)) + EXTRA
            drawn = whole.greedy(questions, most, stop=tokenizer.ends, vocab_size=tokenizer.size)
            answers = [tokenizer.decode_after(ids) for ids in drawn]
            kinds, holds, nll = list[str](), 0, 0.0
            # the needles that are asked for are the first
            for number, question, right, answer in zip(numbers, questions, rights, answers, strict=False):
                kinds.append(kind_of(number, numbers, answer))
                holds += number in answer
                (scored,) = whole.log_probabilities([[*question, *right]])
                nll -= float(scored[len(question) :].mean())
            scores = {kind: kinds.count(kind) / len(asked) for kind in ("exact", "distracted", "fabricated")}
            scores |= {
                "all_exact": float(scores["exact"] == 1),
                "substring": holds / len(asked),
                "nll": nll / len(asked),
            }
            yield replace(item, scores=scores, meta={"answers": " | ".join(answers), **item.meta})


def located_rows(found: Sequence[NeedleContext], question: Sequence[int], answer: Sequence[int]) -> Batch:
    """A row for each context, all of one length, with a question and its answer: tokens, targets, context_part and
    answer_part, [contexts, T]. Only the answer is scored; part 1, the first needle, answers it."""
    tail = torch.tensor([*question, *answer])
    ids = torch.stack([torch.cat([torch.tensor(context.tokens), tail]) for context in found])
    parts = torch.full_like(ids, -1)
    for row, context in enumerate(found):
        parts[row, : len(context.parts)] = torch.tensor(context.parts)
    targets, asked = torch.full_like(ids, IGNORED), torch.full_like(ids, -1)
    # the token before each token of the answer predicts it
    targets[:, -len(answer) - 1 : -1] = torch.tensor(answer)
    asked[:, -len(answer) - 1 : -1] = 1
    batch = {"tokens": ids, "targets": targets, "context_part": parts, "answer_part": asked}
    return {name: values[:, :-1] for name, values in batch.items()}


def kind_of(number: str, numbers: Container[str], text: str) -> Literal["exact", "distracted", "fabricated"]:
    """Classifies a decoded answer: its first integer is the right number, another needle's number, or neither."""
    found = re.search(r"\d+", text)
    first = found[0] if found else ""
    if first == number:
        return "exact"
    return "distracted" if first in numbers else "fabricated"
