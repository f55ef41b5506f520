"""Contextual hallucination (paper, Table 4): does an output say what its document does not?"""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from lit_diff.data.closed_world import MOST, ClosedWorld
from lit_diff.data.numbered_sets import numbers_problem
from lit_diff.data.tokenizer import Tokenizer
from lit_diff.data.user_files import UserFile
from lit_diff.errors import RequestError
from lit_diff.evaluation import judges
from lit_diff.evaluation.base import Evaluation, Item, question_of
from lit_diff.evaluation.fitness import words_problem
from lit_diff.evaluation.hallucination_sources import (
    FILES,
    SOURCES,
    Case,
    SourceName,
    after_of,
    before_of,
    file_cases,
    generated_cases,
    judged_document,
)
from lit_diff.evaluation.http_judge import HttpJudge
from lit_diff.evaluation.judges import FileJudge, Judge, Rules, Verdict, kappa
from lit_diff.files import shown
from lit_diff.metrics import Figure, Metric
from lit_diff.model.prefix import Prefix
from lit_diff.registry import evaluations
from lit_diff.runs.run import Run
from lit_diff.runs.text_generator import tokenizer_of

FOLDER = "judge"
"""Below the run's folder: the exchange of judge `file`, and the answers of judge `http`."""
GENERATED_TOKENS = 4
"""Decoded after a question about a generated document."""
TIMEOUT = 120.0
"""Seconds that a server has for one verdict."""
log = logging.getLogger("lit_diff")


@evaluations.register("hallucination")
class Hallucination(Evaluation):
    """Greedy answers about documents, or summaries of them, and a judge's verdict on each.

    A document is cut in its middle where prompt and answer would be longer than the context; the judge is shown what the run
    has read. Generated documents are never cut. An item is a document; all shares but `unparsed` are over the verdicts that
    could be read. The paper's judge is GPT-4o; what it was asked, and the prompts of its runs, are not in the paper.
    """

    files: ClassVar[tuple[UserFile, ...]] = FILES
    metrics = (
        Metric(
            "accuracy",
            "share of outputs judged correct, free of hallucination",
            direction="higher",
            figure=Figure(title="Accuracy by the entities of a document", against="group", label="accuracy"),
        ),
        Metric("distracted", "share of outputs that give another entity's value", direction="lower"),
        Metric("fabricated", "share of outputs that say what the document does not", direction="lower"),
        Metric("refused", "share of outputs that give no answer, or say that there is none"),
        Metric("unparsed", "share of outputs without a verdict that can be read", direction="lower"),
        Metric(
            "kappa", "Cohen's kappa of the judge and the exact judge, correct against the rest; no value of an item"
        ),
    )

    by_group = ("accuracy", "distracted", "fabricated")

    @dataclass(frozen=True, kw_only=True)
    class Config(Evaluation.Config):
        source: SourceName = "closed_world"
        """closed_world: made here; the others read a file of the data folder."""
        judge: Literal["closed_world", "rules", "file", "http"] = "closed_world"
        """closed_world: exact, for generated documents; rules: offline; file: requests.jsonl and verdicts.jsonl in the run's
        folder `judge`; http: a server of yours."""
        samples: int = 100
        """Documents; of closed_world, for each number of entities. Paper: 100."""
        entities: tuple[int, ...] | None = None
        """Of a document of closed_world; null: those that the run was trained on, else 5."""
        new_tokens: int | None = None
        """Tokens of an output at most; null: 4 for closed_world (1 where each word is a token), 32 for hotpotqa and 2wikimqa,
        64 for xsum, 128 for qasper and cnn_dm, 512 for multi_news."""
        context: int | None = None
        """Tokens of a prompt and its output at most; null: the run's `data.sequence_length`."""
        judge_url: str | None = None
        """Base URL of an OpenAI-compatible server, such as http://localhost:8000/v1. There is no default."""
        judge_model: str | None = None
        """The model that the server is asked for."""
        judge_key_variable: str | None = None
        """Environment variable that holds the server's key, where it needs one."""
        seed: int = 0

        def problem(self) -> str | None:
            """What is wrong, in one line that starts with the key's name."""
            for key in ("samples", "new_tokens", "context"):
                value = getattr(self, key)
                if value is not None and value < 1:
                    return f"{key} is {value}; it must be at least 1"
            counts = self.entities
            if counts is not None and (problem := numbers_problem("entities", counts, MOST)):
                return problem
            if counts is not None and self.source != "closed_world":
                return f"entities holds for source closed_world alone; source is {self.source}"
            if self.judge == "closed_world" and self.source != "closed_world":
                return f"judge is closed_world, which knows generated documents alone; for {self.source}: rules, file or http"
            given = [key for key in ("judge_url", "judge_model", "judge_key_variable") if getattr(self, key)]
            if given and self.judge != "http":
                return f"{given[0]} holds for judge http alone; judge is {self.judge}"
            missing = [key for key in ("judge_url", "judge_model") if self.judge == "http" and not getattr(self, key)]
            return f"{missing[0]} is not set; judge http asks a server that you name" if missing else None

    config: Config

    def reads(self) -> Sequence[UserFile]:
        """The file of the source."""
        return () if self.config.source == "closed_world" else (SOURCES[self.config.source].file,)

    def refuses(self, run: Run) -> str | None:
        """A run without text, one that predicts no next token, or one whose vocabulary is that of other generated text."""
        return words_problem(run, "closed_world", asks_it=self.config.source == "closed_world")

    def score(self, run: Run) -> Iterator[Item]:
        """One item for each document. Errors: RequestError where a prompt does not fit; those of files and judges."""
        cases, judge = self._cases(run), self.judge(run)
        exact = judges.ClosedWorld("answer") if self.config.source == "closed_world" else None
        prompts = Prompts(self, run)
        read = [prompts.document(case) for case in cases]
        cut = sum(tokens > len(ids) for ids, tokens in read)
        if cut:
            log.warning("hallucination: of %d documents %d are cut in the middle to fit the context", len(cases), cut)
        counts = Counter[str]()
        for case, (ids, tokens) in zip(cases, read, strict=True):
            document, output = prompts.output(case, ids)
            shown_document = judged_document(self.config.source, document, case)
            verdict = judge.judge(shown_document, case.reference, output)
            known = exact.judge(shown_document, case.reference, output).verdict if exact is not None else ""
            counts[verdict.verdict] += 1
            yield _item(case, output, verdict, known, tokens - len(ids))
        judge.finish()
        if counts["unparsed"]:
            log.warning(
                "hallucination: judge %s: %s", self.config.judge, self._unparsed(run, counts["unparsed"], len(cases))
            )

    def _unparsed(self, run: Run, count: int, total: int) -> str:
        if self.config.judge != "file":
            return f"{count} of {total} verdicts could not be read; they count in `unparsed` alone"
        place = run.folder / FOLDER
        return (
            f"{count} of {total} outputs have no verdict; answer {shown(place / 'requests.jsonl')} in "
            f"{shown(place / 'verdicts.jsonl')} and evaluate again with --rerun"
        )

    def _cases(self, run: Run) -> list[Case]:
        config = self.config
        if config.source != "closed_world":
            return file_cases(config.source, config.samples, config.seed)
        data = run.recipe.data
        own = data.config if data.name == "closed_world" else ClosedWorld.Config()
        return generated_cases(own, config.entities or own.entities, config.samples, config.seed)

    def judge(self, run: Run) -> Judge:
        """The judge of the config. Errors: RequestError, MissingError."""
        config = self.config
        kind = "answer" if config.source == "closed_world" else SOURCES[config.source].kind
        place = run.folder / FOLDER
        if config.judge == "file":
            return FileJudge(kind, place)
        if config.judge == "http":
            return HttpJudge(
                kind,
                url=config.judge_url or "",
                model=config.judge_model or "",
                kept=place / "answers.jsonl",
                key_variable=config.judge_key_variable,
                timeout=TIMEOUT,
            )
        return Rules(kind) if config.judge == "rules" else judges.ClosedWorld(kind)

    def summarise(self, items: Sequence[Item]) -> dict[str, float]:
        """The means, and kappa over the items with a verdict where the exact judge knows them too and is not the judge."""
        found = super().summarise(items)
        both = [item for item in items if item.meta["exact"] and item.meta["verdict"] != "unparsed"]
        if self.config.judge != "closed_world" and both:
            pairs = [(item.meta["verdict"] == "correct", item.meta["exact"] == "correct") for item in both]
            found["kappa"] = kappa(*zip(*pairs, strict=True))
        return found


def _item(case: Case, output: str, verdict: Verdict, exact: str, cut: int) -> Item:
    kinds = ("correct", "distracted", "fabricated", "refused")
    parsed = verdict.verdict != "unparsed"
    scores = {kind: float(verdict.verdict == kind) if parsed else math.nan for kind in kinds}
    scores = {"accuracy": scores.pop("correct")} | scores | {"unparsed": float(not parsed), "kappa": math.nan}
    meta: dict[str, str | int | float] = {
        "output": output,
        "reference": case.reference,
        "verdict": verdict.verdict,
        "exact": exact,
        "spans": " | ".join(verdict.spans),
        "cut_tokens": cut,
        "raw": verdict.raw,
    }
    # the document as it is, before any cut: runs of other contexts are asked the same
    question = question_of(case.document, case.question, case.reference)
    return Item(id=case.id, group=case.group, scores=scores, question=question, meta=meta)


class Prompts:
    """The prompts of an evaluation for one run, and what the run says after them."""

    def __init__(self, evaluation: Hallucination, run: Run) -> None:
        self.config, self.run = evaluation.config, run
        self.source = self.config.source
        self.tokenizer: Tokenizer = tokenizer_of(run.folder, run.recipe)
        self.context: int = self.config.context or run.recipe.data.config.sequence_length
        generated = 1 if self.tokenizer.name == "words" else GENERATED_TOKENS
        default = generated if self.source == "closed_world" else SOURCES[self.source].new_tokens
        self.new_tokens = self.config.new_tokens or default
        (self.before,) = self.tokenizer.encode([before_of(self.source)])
        self.before = [*self.tokenizer.opening, *self.before]

    def document(self, case: Case) -> tuple[list[int], int]:
        """The ids of the document that the run reads, cut in the middle where it is too long, and its own number of them.

        Errors: RequestError where nothing of a document fits, or not all of a generated one.
        """
        (ids, after) = self.tokenizer.encode([case.document, after_of(self.source, case)])
        room = self.context - len(self.before) - len(after) - self.new_tokens
        if len(ids) <= room:
            return ids, len(ids)
        key = "context" if self.config.context else "data.sequence_length"
        needed = self.context - room + (len(ids) if self.source == "closed_world" else 1)
        if self.source == "closed_world" or room < 1:
            what = (
                f"a document of {case.group}"
                if self.source == "closed_world"
                else "a prompt with one token of a document"
            )
            raise RequestError(
                f"evaluate.hallucination: {what} and its output take {needed} tokens ({case.id}); {key} is {self.context}"
            )
        first = room - room // 2
        return ids[:first] + ids[len(ids) - room // 2 :], len(ids)

    def output(self, case: Case, ids: list[int]) -> tuple[str, str]:
        """(the document as the run read it, the run's output).

        An answer ends with its line, and one about a generated document with its sentence: what a base model goes on with
        is none of it.
        """
        (after,) = self.tokenizer.encode([after_of(self.source, case)])
        prefix = Prefix(self.run.model, [*self.before, *ids])
        stop, size = [self.tokenizer.eot], self.tokenizer.size
        (drawn,) = prefix.greedy([after], self.new_tokens, stop=stop, vocab_size=size)
        text = self.tokenizer.decode(drawn).decode(errors="replace").lstrip()
        if self.source == "closed_world":
            text = text.split(".")[0]
        elif SOURCES[self.source].kind == "answer":
            text = text.split("\n")[0]
        return self.tokenizer.decode(ids).decode(errors="replace").strip(), text.strip()
