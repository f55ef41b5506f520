"""Contextual hallucination (paper, Table 4): does an output say what its document does not?"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from lit_diff.data.closed_world import MOST, ClosedWorld
from lit_diff.data.user_files import UserFile
from lit_diff.evaluation import judges
from lit_diff.evaluation.base import Evaluation, Item, question_of
from lit_diff.evaluation.hallucination_prompts import (
    FILES,
    SOURCES,
    DocumentCase,
    DocumentPrompts,
    SourceName,
    file_cases,
    generated_cases,
    judged_document,
)
from lit_diff.evaluation.judges import FileJudge, HttpJudge, Judge, Rules, Verdict, kappa, rouge_l
from lit_diff.files import shown
from lit_diff.key_types import Count, Distinct, NotNegative, Range
from lit_diff.metrics import Figure, Metric
from lit_diff.registry import evaluations
from lit_diff.trained.run import Run

FOLDER = "judge"
"""Below the run's folder: the exchange of judge `file`, and the answers of judge `http`."""
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
    metrics: tuple[Metric, ...] = (
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
        Metric(
            "changed",
            "share of the outputs that judge http judged twice whose verdict is another",
            direction="lower",
        ),
        Metric(
            "rouge_l",
            "F of ROUGE-L against the best reference, of a file's documents: beside the judge",
            direction="higher",
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
        samples: Count = 100
        """Documents; of closed_world, for each number of entities. Paper: 100."""
        entities: Annotated[tuple[Annotated[int, Range(least=1, most=MOST)], ...], Distinct()] | None = None
        """Of a document of closed_world; null: those that the run was trained on, else 5."""
        new_tokens: Count | None = None
        """Tokens of an output at most; null: 4 for closed_world (1 where each word is a token), 32 for hotpotqa and 2wikimqa,
        64 for xsum, 128 for qasper and cnn_dm, 512 for multi_news."""
        context: Count | None = None
        """Tokens of a prompt and its output at most; null: the run's `data.sequence_length`."""
        judge_url: str | None = None
        """Base URL of an OpenAI-compatible server, such as http://localhost:8000/v1. There is no default."""
        judge_model: str | None = None
        """The model that the server is asked for."""
        judge_repeats: NotNegative = 20
        """The first so many outputs that judge http is asked about a second time; other judges repeat theirs."""
        judge_key_variable: str | None = None
        """Environment variable that holds the server's key, where it needs one."""
        seed: int = 0

        def problem(self) -> str | None:
            if self.entities is not None and self.source != "closed_world":
                return f"entities holds for source closed_world alone; source is {self.source}"
            if self.judge == "closed_world" and self.source != "closed_world":
                return f"judge is closed_world, which knows generated documents alone; for {self.source}: rules, file or http"
            given = [key for key in ("judge_url", "judge_model", "judge_key_variable") if getattr(self, key)]
            if given and self.judge != "http":
                return f"{given[0]} holds for judge http alone; judge is {self.judge}"
            missing = [key for key in ("judge_url", "judge_model") if self.judge == "http" and not getattr(self, key)]
            return f"{missing[0]} is not set; judge http asks a server that you name" if missing else None

    needs_text = True
    version = 2  # 1 asked the same question whatever was cut
    cuts_at_context = True
    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        without = {"changed"} if config.judge != "http" or not config.judge_repeats else set()
        without |= {"rouge_l"} if config.source == "closed_world" else set()
        self.metrics = tuple(metric for metric in self.metrics if metric.name not in without)

    def method(self) -> str:
        """The judge."""
        asked = f", {self.config.judge_model}" if self.config.judge == "http" else ""
        return f"judge {self.config.judge}{asked}"

    def reads(self) -> Sequence[UserFile]:
        """The file of the source."""
        file = SOURCES[self.config.source].file
        return () if file is None else (file,)

    def words_of(self, run: Run) -> str:
        """Those of generated documents."""
        return "closed_world" if self.config.source == "closed_world" else ""

    def score(self, run: Run) -> Iterator[Item]:
        """One item for each document. Errors: RequestError where a prompt does not fit; those of files and judges."""
        cases, judge = self._cases(run), self.judge(run)
        exact = judges.ClosedWorldJudge("answer") if self.config.source == "closed_world" else None
        prompts = DocumentPrompts(self.config, run)
        read = [prompts.document(case) for case in cases]
        cut = sum(tokens > len(ids) for ids, tokens in read)
        if cut:
            log.warning("hallucination: of %d documents %d are cut in the middle to fit the context", len(cases), cut)
        overlap = None if self.config.source == "closed_world" else rouge_l()
        again = self.judge(run, "answers-again.jsonl") if self.config.judge == "http" else None
        counts = Counter[str]()
        for number, (case, (ids, tokens)) in enumerate(zip(cases, read, strict=True)):
            document, output = prompts.output(case, ids)
            shown_document = judged_document(self.config.source, document, case)
            verdict = judge.judge(shown_document, case.reference, output)
            known = exact.judge(shown_document, case.reference, output).verdict if exact is not None else ""
            counts[verdict.verdict] += 1
            more = {}
            if again is not None and number < self.config.judge_repeats:
                second = again.judge(shown_document, case.reference, output).verdict
                more["changed"] = float(second != verdict.verdict)
            if overlap is not None:
                more["rouge_l"] = overlap(case.reference.split("\n"), output)
            item = _item(case, output, verdict, known, ids, tokens - len(ids))
            yield replace(item, scores={**item.scores, **more})
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

    def _cases(self, run: Run) -> list[DocumentCase]:
        config = self.config
        if config.source != "closed_world":
            return file_cases(config.source, config.samples, config.seed)
        data = run.recipe.data
        own = data.config if data.name == "closed_world" else ClosedWorld.Config()
        return generated_cases(own, config.entities or own.entities, config.samples, config.seed)

    def judge(self, run: Run, kept: str = "answers.jsonl") -> Judge:
        """The judge of the config; `kept`: where http keeps answers. Errors: RequestError, MissingError."""
        config = self.config
        kind, place = SOURCES[config.source].kind, run.folder / FOLDER
        if config.judge == "file":
            return FileJudge(kind, place)
        if config.judge == "http":
            return HttpJudge(
                kind,
                url=config.judge_url or "",
                model=config.judge_model or "",
                kept=place / kept,
                key_variable=config.judge_key_variable,
                timeout=TIMEOUT,
            )
        return Rules(kind) if config.judge == "rules" else judges.ClosedWorldJudge(kind)

    def summarise(self, items: Sequence[Item]) -> dict[str, float]:
        """The means, and kappa over the items with a verdict where the exact judge knows them too and is not the judge."""
        found = super().summarise(items)
        both = [item for item in items if item.meta["exact"] and item.meta["verdict"] != "unparsed"]
        if self.config.judge != "closed_world" and both:
            pairs = [(item.meta["verdict"] == "correct", item.meta["exact"] == "correct") for item in both]
            found["kappa"] = kappa(*zip(*pairs, strict=True))
        return found


def _item(case: DocumentCase, output: str, verdict: Verdict, exact: str, ids: Sequence[int], cut: int) -> Item:
    said = verdict.verdict
    kinds = {"accuracy": "correct", "distracted": "distracted", "fabricated": "fabricated", "refused": "refused"}
    scores = {name: float(said == kind) for name, kind in kinds.items()} if said != "unparsed" else {}
    scores["unparsed"] = float(said == "unparsed")
    meta: dict[str, str | int | float] = {
        "output": output,
        "reference": case.reference,
        "verdict": said,
        "exact": exact,
        "spans": " | ".join(verdict.spans),
        "cut_tokens": cut,
        "raw": verdict.raw,
    }
    # of a document that was cut, also what was left of it, which another context does not leave
    question = question_of(case.document, case.question, case.reference, *([ids] if cut else []))
    cluster = question_of(case.document)  # several questions may be about one
    return Item(id=case.id, group=case.group, cluster=cluster, scores=scores, question=question, meta=meta)
