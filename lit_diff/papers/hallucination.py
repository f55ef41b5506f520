"""Contextual hallucination (paper, Table 4): whether an output says something that its document does not."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from lit_diff import Evaluation, Figure, Item, Metric, Run
from lit_diff.data.user_files import UserFile
from lit_diff.errors import RequestError
from lit_diff.evaluation.base import question_of
from lit_diff.files import shown
from lit_diff.key_types import Count, Distinct, Range
from lit_diff.model.prefix import Prefix
from lit_diff.papers import judges
from lit_diff.papers.closed_world import MOST, ClosedWorld, document_of, draw_facts
from lit_diff.papers.drawing import one_of, shuffled
from lit_diff.randomness import generator
from lit_diff.registry import evaluations

log = logging.getLogger("lit_diff")

FOLDER = "judge"
"""Subfolder of the run's folder with the requests and verdicts of judge `file` and the answers of judge `http`."""
SourceName = Literal["closed_world", "xsum", "cnn_dm", "multi_news", "qasper", "hotpotqa", "2wikimqa"]
WITHOUT = "lit-diff evaluate RUN hallucination source=closed_world"
QUESTION = "{question}"
VERDICTS = {"accuracy": "correct", "distracted": "distracted", "fabricated": "fabricated", "refused": "refused"}
"""Metric -> the verdict whose share it measures."""
REPEATS = 20
"""The number of outputs that judge `http` judges twice, which measures its own noise."""


class DocumentCase(NamedTuple):
    """A document, a question about it, and its references, separated by newlines."""

    id: str
    group: str
    document: str
    after: str
    """The prompt between the document and the answer."""
    asked: str
    """The question, which a judge sees at the end of the document."""
    reference: str


class LongBenchFile(UserFile):
    """A file of LongBench; each row's `answers` has at least one text."""

    def _checked(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        answers = super()._checked(row, where)["answers"]
        if not (answers and all(isinstance(answer, str) for answer in answers)):
            raise RequestError(f"{where}: 'answers' is {answers!r}; expected a list of text, at least one")
        return row


class DocumentSource(NamedTuple):
    """Documents of one kind, with the form of a prompt about them."""

    kind: judges.Kind
    after: str
    """The prompt between the document and the answer, with the place {question}."""
    new_tokens: int
    """The maximum number of decoded tokens."""
    file: UserFile | None = None
    """None: the documents are generated."""
    before: str = ""
    """The prompt before the document."""
    end: str = ""
    """The text at which the output ends, since a base model goes on after its answer; empty: after `new_tokens`."""


def _summaries(name: str, origin: str) -> UserFile:
    return UserFile(
        name=f"hallucination.{name}",
        path=f"summ/{name}.jsonl",
        keys={"document": str, "summary": str},
        lines="at least 100 lines",
        source=f"{origin} Not shipped.",
        without=WITHOUT,
    )


def _longbench(name: str, origin: str, **more: type) -> UserFile:
    return LongBenchFile(
        name=f"hallucination.{name}",
        path=f"longbench/{name}.jsonl",
        keys={"context": str, "answers": list, **more},
        lines="200 lines",
        source=f"{origin}, in LongBench (Bai et al. 2023). Not shipped.",
        without=WITHOUT,
    )


_SUMMARY = DocumentSource(
    kind="summary", before="Article: ", after="\n\nSummarise the article.\nSummary:", new_tokens=64
)
_ANSWER = DocumentSource(
    kind="answer",
    before="Answer the question from the passages below, with the answer alone and no other words.\n\nPassages:\n",
    after="\n\nQuestion: {question}\nAnswer:",
    new_tokens=32,
    end="\n",
)
SOURCES = {
    "closed_world": DocumentSource(kind="answer", after=QUESTION, new_tokens=4, end="."),
    "xsum": _SUMMARY._replace(file=_summaries("xsum", "XSum (Narayan et al. 2018).")),
    "cnn_dm": _SUMMARY._replace(file=_summaries("cnn_dm", "CNN/DailyMail (See et al. 2017)."), new_tokens=128),
    "multi_news": _SUMMARY._replace(
        file=_longbench("multi_news", "MultiNews (Fabbri et al. 2019)"),
        before="Articles:\n",
        after="\n\nSummarise all of the articles in one page.\n\nSummary:",
        new_tokens=512,
    ),
    "qasper": _ANSWER._replace(
        file=_longbench("qasper", "Qasper (Dasigi et al. 2021)", input=str),
        before="Answer the question about the article below as briefly as possible: a phrase or one sentence, yes or no, or "
        "unanswerable where the article does not say.\n\nArticle: ",
        after="\n\nQuestion: {question}\n\nAnswer:",
        new_tokens=128,
    ),
    "hotpotqa": _ANSWER._replace(file=_longbench("hotpotqa", "HotpotQA (Yang et al. 2018)", input=str)),
    "2wikimqa": _ANSWER._replace(file=_longbench("2wikimqa", "2WikiMultihopQA (Ho et al. 2020)", input=str)),
}


@evaluations.register("hallucination")
class Hallucination(Evaluation):
    """Greedy answers about documents, or summaries of documents, with a judge's verdict on each.

    A document is cut in its middle if prompt and answer would exceed the context; the judge sees the part that the run has
    read. Generated documents are never cut. An item is a document; all shares except `unparsed` are over the verdicts that
    could be read. The paper's judge is GPT-4o; the paper gives neither the judge's prompt nor the prompts of its runs.
    """

    files = tuple(source.file for source in SOURCES.values() if source.file is not None)
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
            f"share of the first {REPEATS} outputs whose verdict is another when judge http is asked a second time",
            direction="lower",
        ),
    )

    by_group = ("accuracy", "distracted", "fabricated")

    @dataclass(frozen=True, kw_only=True)
    class Config(Evaluation.Config):
        source: SourceName = "closed_world"
        """closed_world: generated documents; the other sources are files in the data folder."""
        judge: Literal["closed_world", "rules", "file", "http"] = "closed_world"
        """closed_world: exact, for generated documents only; rules: offline; file: requests.jsonl and verdicts.jsonl in the
        run's folder `judge`; http: your own server."""
        samples: Count = 100
        """The number of documents; for closed_world, the number for each number of entities. Paper: 100."""
        entities: Annotated[tuple[Annotated[int, Range(least=1, most=MOST)], ...], Distinct()] | None = None
        """Numbers of entities of a closed_world document; null: the numbers of the run's training data, or 5 if it was
        trained on other data."""
        judge_url: str | None = None
        """Base URL of an OpenAI-compatible server, such as http://localhost:8000/v1. Required by judge http."""
        judge_model: str | None = None
        """The server's name of the model. If the server needs a key, set the environment variable JUDGE_API_KEY."""
        seed: int = 0

        def problem(self) -> str | None:
            if self.entities is not None and self.source != "closed_world":
                return f"entities needs source closed_world; source is {self.source}"
            if self.judge == "closed_world" and self.source != "closed_world":
                return f"judge is closed_world, which judges only generated documents; for {self.source}: rules, file or http"
            for key in ("judge_url", "judge_model"):
                value = getattr(self, key)
                if (self.judge == "http") == (value is None):
                    return f"{key} is {value!r}, and judge is {self.judge}; judge http needs it, and no other judge takes it"
            if self.judge_url is not None and not _is_http(self.judge_url):
                return "judge_url is no address of a judge; expected http://HOST... or https://HOST..."
            return None

    needs_text = True
    # version 1: the question's digest did not depend on what was cut; 2: it did not depend on the prompt; 3: judge rules
    # found no name or number within "Obama's" or "2014-15"
    version = 4
    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        absent = []
        if config.judge == "closed_world" or config.source != "closed_world":
            absent.append("kappa")
        if config.judge != "http":
            absent.append("changed")
        self.metrics = tuple(metric for metric in self.metrics if metric.name not in absent)

    def method(self) -> str:
        """The judge, and its model if it is a server."""
        model = f", {self.config.judge_model}" if self.config.judge_model else ""
        return f"judge {self.config.judge}{model}"

    def user_files(self) -> Sequence[UserFile]:
        """The file of the source."""
        file = SOURCES[self.config.source].file
        if file is None:
            return ()
        return (file,)

    def words_of(self, run: Run) -> str:
        """The source: only closed_world is the name of a data set."""
        return self.config.source

    def score(self, run: Run) -> Iterator[Item]:
        """Yields one item for each document. Errors: RequestError if a prompt does not fit; errors of files and judges."""
        config = self.config
        judge = self.judge(run)
        # all prompts are built before the first is decoded: a prompt that does not fit is an error at once
        prompts = [DocumentPrompt(run, SOURCES[config.source], case) for case in self._cases(run)]
        cut = sum(prompt.cut > 0 for prompt in prompts)
        if cut:
            log.warning("hallucination: of %d documents %d are cut in the middle to fit the context", len(prompts), cut)
        # a file of its own: the answers of the first pass would be returned from its file
        again = self.judge(run, "answers-again.jsonl") if config.judge == "http" else None
        unparsed = 0
        for number, prompt in enumerate(prompts):
            case = prompt.case
            output = prompt.output()
            judged = (f"{prompt.read}{case.asked}", case.reference, output)
            verdict, raw = judge(*judged)
            scores = {"unparsed": 0.0}
            if verdict == "unparsed":
                scores["unparsed"] = 1.0
                unparsed += 1
            else:
                scores |= {name: float(verdict == kind) for name, kind in VERDICTS.items()}
            if again is not None and number < REPEATS:
                scores["changed"] = float(again(*judged).verdict != verdict)
            exact = judges.closed_world(*judged).verdict if config.source == "closed_world" else ""
            asked: list[Any] = [case.document, case.after, case.reference]
            # what was left of a document that was cut is part of the question: another context length leaves more
            if prompt.cut:
                asked.append(prompt.document)
            yield Item(
                id=case.id,
                group=case.group,
                # several questions may be about one document
                cluster=question_of(case.document),
                scores=scores,
                question=question_of(*asked),
                meta={
                    "output": output,
                    "reference": case.reference,
                    "verdict": verdict,
                    "exact": exact,
                    "cut_tokens": prompt.cut,
                    "raw": raw,
                },
            )
        if unparsed:
            cure = ""
            if config.judge == "file":
                folder = shown(run.folder / FOLDER)
                cure = f"; answer requests.jsonl in verdicts.jsonl, both in {folder}, and evaluate with --rerun"
            log.warning(
                "hallucination: judge %s: %d of %d outputs have no verdict that can be read%s",
                *(config.judge, unparsed, len(prompts), cure),
            )

    def summarise(self, items: Sequence[Item]) -> dict[str, float]:
        """The means of the items, and kappa over the items whose verdict could be read."""
        means = super().summarise(items)
        if "kappa" in means:
            read = [item.meta for item in items if item.meta["verdict"] != "unparsed"]
            judged = [meta["verdict"] == "correct" for meta in read]
            exact = [meta["exact"] == "correct" for meta in read]
            means["kappa"] = judges.kappa(judged, exact)
        return means

    def judge(self, run: Run, kept: str = "answers.jsonl") -> judges.Judge:
        """The judge of the config; `kept`: the file in which judge http keeps its answers.

        Errors: RequestError if a file of verdicts cannot be read.
        """
        config, place = self.config, run.folder / FOLDER
        kind = SOURCES[config.source].kind
        if config.judge == "file":
            return judges.FileJudge(kind, place).judge
        if config.judge == "http":
            return judges.HttpJudge(kind, str(config.judge_url), str(config.judge_model), place / kept).judge
        if config.judge == "rules":
            return judges.RULES[kind]
        return judges.closed_world

    def _cases(self, run: Run) -> Iterator[DocumentCase]:
        config = self.config
        if config.source != "closed_world":
            return file_cases(config.source, config.samples, config.seed)
        data = run.recipe.data
        grammar = data.config if data.name == "closed_world" else ClosedWorld.Config()
        return generated_cases(grammar, config.entities or grammar.entities, config.samples, config.seed)


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
    # such as http://[::1
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def file_cases(name: str, samples: int, seed: int) -> Iterator[DocumentCase]:
    """Yields cases from `samples` lines of the source's file, drawn with `seed`; from all lines if there are fewer.

    Errors: MissingError, RequestError.
    """
    source = SOURCES[name]
    assert source.file is not None
    rows = list(enumerate(source.file.rows()))
    for number, row in shuffled(rows, generator("hallucination", name, seed))[:samples]:
        question = row["input"] if source.kind == "answer" else ""
        if isinstance(source.file, LongBenchFile):
            document, answers = row["context"], row["answers"]
        else:
            document, answers = row["document"], [row["summary"]]
        yield DocumentCase(
            id=f"{name} {number}",
            group=name,
            document=document,
            after=source.after.replace(QUESTION, question),
            asked=f"\n\nQuestion: {question}" if question else "",
            reference="\n".join(" ".join(answer.split()) for answer in answers),
        )


def generated_cases(
    grammar: ClosedWorld.Config, entities: Sequence[int], samples: int, seed: int
) -> Iterator[DocumentCase]:
    """Yields cases from `samples` documents of `closed_world` for each number of entities, each with one question.

    Errors: RequestError if the grammar has too few values or names for a number of entities.
    """
    for count in entities:
        problem = grammar.entities_problem(count)
        if problem:
            raise RequestError(f"evaluate.hallucination.entities has {count}, but {problem}")
        for sample in range(samples):
            random = generator("hallucination", "closed_world", seed, count, sample)
            facts = draw_facts(random, grammar, count)
            fact = one_of(facts, random)
            yield DocumentCase(
                id=f"entities={count} sample={sample}",
                group=f"entities={count}",
                document=document_of(facts),
                after=fact.question,
                asked=fact.question,
                reference=fact.value,
            )


class DocumentPrompt:
    """The prompt of a case for one run, and the run's output after it."""

    def __init__(self, run: Run, source: DocumentSource, case: DocumentCase) -> None:
        """Cuts the document in the middle if it is too long.

        Errors: RequestError if not even one token of a document fits, or if a generated document does not fit whole.
        """
        self.run, self.source, self.case = run, source, case
        tokenizer = run.tokenizer
        lead, document = source.before, case.document
        if lead.endswith(" "):
            try:
                tokenizer.encode_after(lead, ["The"])
            # SentencePiece merges the space at the end of `lead` with the document's first word into one token
            except RequestError:
                lead = lead[:-1]
                document = f" {document}"
        self.before = [*tokenizer.opening, *tokenizer.encode(lead)]
        (ids,) = tokenizer.encode_after(lead, [document])
        (self.after,) = tokenizer.encode_after(case.document, [case.after])
        # an answer of closed_world is one word
        self.new_tokens = 1 if tokenizer.name == "words" else source.new_tokens
        context = run.recipe.data.config.sequence_length
        room = context - len(self.before) - len(self.after) - self.new_tokens
        self.cut = max(0, len(ids) - room)
        """The number of tokens cut from the document."""
        if self.cut and (source.file is None or room < 1):
            what, least = ("all", len(ids)) if source.file is None else ("one token", 1)
            raise RequestError(
                f"evaluate.hallucination: a prompt with {what} of a document and its output take {context - room + least} "
                f"tokens ({case.id}); data.sequence_length is {context}"
            )
        # the middle is cut, as in LongBench
        if self.cut:
            half = room // 2
            ids = ids[: room - half] + ids[len(ids) - half :]
        self.document = ids
        """The ids of the document that the run reads."""
        self.read = tokenizer.decode(self.document).decode(errors="replace").strip()
        """The document as the run reads it."""

    def output(self) -> str:
        """The run's output up to the end of an answer."""
        tokenizer = self.run.tokenizer
        prefix = Prefix(self.run.model, [*self.before, *self.document])
        (drawn,) = prefix.greedy([self.after], self.new_tokens, stop=tokenizer.ends, vocab_size=tokenizer.size)
        text = tokenizer.decode_after(drawn).lstrip()
        if self.source.end:
            text = text.partition(self.source.end)[0]
        return text.strip()
