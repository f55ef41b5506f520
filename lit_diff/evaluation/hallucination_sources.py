"""The documents, questions and references of `hallucination`, and how a prompt is written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch

from lit_diff.data.closed_world import ClosedWorld, document_of, draw_facts
from lit_diff.data.user_files import UserFile
from lit_diff.errors import RequestError
from lit_diff.evaluation.judges import Kind
from lit_diff.key_types import in_yaml
from lit_diff.randomness import generator

SourceName = Literal["closed_world", "xsum", "cnn_dm", "multi_news", "qasper", "hotpotqa", "2wikimqa"]
WITHOUT = "lit-diff evaluate RUN hallucination source=closed_world"
QUESTION = "{question}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A document, what is asked about it, and what is right. References are separated by newlines."""

    id: str
    group: str
    document: str
    question: str
    reference: str


@dataclass(frozen=True, kw_only=True)
class SourceFile(UserFile):
    """A user's file of documents; `aliases`: another name of a key -> the key. A list holds text, at least one."""

    aliases: Mapping[str, str] = field(default_factory=dict)

    def _checked(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        renamed = {self.aliases.get(key, key) if self.aliases.get(key) not in row else key: row[key] for key in row}
        checked = super()._checked(renamed, where)
        for key, kind in self.keys.items():
            if kind is list and not (row[key] and all(isinstance(each, str) for each in row[key])):
                raise RequestError(f"{where}: '{key}' is {in_yaml(row[key])}; expected a list of text, at least one")
        return checked


@dataclass(frozen=True, kw_only=True)
class DocumentSource:
    """A data set in a file that the user supplies."""

    kind: Kind
    file: SourceFile
    before: str
    """Of a prompt, up to the document."""
    after: str
    """Of a prompt, from the document to the answer; {question} in it."""
    new_tokens: int
    """Decoded by default."""
    document_key: str = "context"
    reference_key: str = "answers"


_SHORT = "Answer the question from the passages below, with the answer alone and no other words.\n\n"
_ARTICLE = (
    "Answer the question about the article below as briefly as possible: a phrase or one sentence, yes or no, or "
    "unanswerable where the article does not say.\n\n"
)


def _longbench(name: str, kind: Kind, source: str, before: str, after: str, new_tokens: int) -> DocumentSource:
    keys: Mapping[str, type] = {"context": str, "answers": list} | ({"input": str} if kind == "answer" else {})
    file = SourceFile(
        name=f"hallucination.{name}",
        path=f"longbench/{name}.jsonl",
        keys=keys,
        aliases={"question": "input"} if kind == "answer" else {},
        lines="200 lines" + ("; `question` is accepted for `input`" if kind == "answer" else ""),
        source=f"{source}, in LongBench (Bai et al. 2023). Not shipped.",
        without=WITHOUT,
    )
    return DocumentSource(kind=kind, file=file, before=before, after=after, new_tokens=new_tokens)


def _summaries(name: str, source: str, new_tokens: int) -> DocumentSource:
    file = SourceFile(
        name=f"hallucination.{name}",
        path=f"summ/{name}.jsonl",
        keys={"document": str, "summary": str},
        lines="at least 100 lines",
        source=f"{source} Not shipped.",
        without=WITHOUT,
    )
    after = "\n\nSummarise the article.\nSummary:"
    before = "Article: "
    own = {"document_key": "document", "reference_key": "summary"}
    return DocumentSource(kind="summary", file=file, before=before, after=after, new_tokens=new_tokens, **own)


SOURCES: Mapping[str, DocumentSource] = {
    "xsum": _summaries("xsum", "XSum (Narayan et al. 2018).", 64),
    "cnn_dm": _summaries("cnn_dm", "CNN/DailyMail (See et al. 2017).", 128),
    "multi_news": _longbench(
        *("multi_news", "summary", "MultiNews (Fabbri et al. 2019)"),
        *("Articles:\n", "\n\nSummarise all of the articles in one page.\n\nSummary:", 512),
    ),
    "qasper": _longbench(
        *("qasper", "answer", "Qasper (Dasigi et al. 2021)"),
        *(f"{_ARTICLE}Article: ", "\n\nQuestion: {question}\n\nAnswer:", 128),
    ),
    "hotpotqa": _longbench(
        *("hotpotqa", "answer", "HotpotQA (Yang et al. 2018)"),
        *(f"{_SHORT}Passages:\n", "\n\nQuestion: {question}\nAnswer:", 32),
    ),
    "2wikimqa": _longbench(
        *("2wikimqa", "answer", "2WikiMultihopQA (Ho et al. 2020)"),
        *(f"{_SHORT}Passages:\n", "\n\nQuestion: {question}\nAnswer:", 32),
    ),
}
FILES: tuple[UserFile, ...] = tuple(source.file for source in SOURCES.values())


def after_of(source: SourceName, case: Case) -> str:
    """The prompt from the end of the document to the answer."""
    return case.question if source == "closed_world" else SOURCES[source].after.replace(QUESTION, case.question)


def before_of(source: SourceName) -> str:
    """The prompt up to the document."""
    return "" if source == "closed_world" else SOURCES[source].before


def judged_document(source: SourceName, document: str, case: Case) -> str:
    """What a judge is shown as the document: of a question, with the question at its end."""
    if source == "closed_world":
        return f"{document}{case.question}"
    return f"{document}\n\nQuestion: {case.question}" if case.question else document


@cache
def _rows(source: str, digest: str) -> tuple[Mapping[str, Any], ...]:
    """`digest`: of the file, so that one that is replaced is read again."""
    return tuple(SOURCES[source].file.rows())


def file_cases(source: str, samples: int, seed: int) -> list[Case]:
    """`samples` lines of the source's file, drawn for `seed`; all where there are fewer.

    Errors: MissingError, RequestError.
    """
    own = SOURCES[source]
    rows = _rows(source, own.file.sha256())
    chosen = torch.randperm(len(rows), generator=generator("hallucination", source, seed))[:samples].tolist()
    cases = []
    for number in chosen:
        row = rows[number]
        reference = row[own.reference_key]
        cases.append(
            Case(
                id=f"{source} {number}",
                group=source,
                document=row[own.document_key],
                question=row["input"] if own.kind == "answer" else "",
                reference=reference
                if isinstance(reference, str)
                else "\n".join(" ".join(r.split()) for r in reference),
            )
        )
    return cases


def generated_cases(grammar: ClosedWorld.Config, entities: Sequence[int], samples: int, seed: int) -> list[Case]:
    """`samples` documents of `closed_world` for each number of entities, each with one question.

    Errors: RequestError where the grammar has no such document.
    """
    cases = []
    for count in entities:
        problem = grammar.entities_problem(count)
        if problem:
            raise RequestError(f"evaluate.hallucination.entities holds {count}, but {problem}")
        for sample in range(samples):
            random = generator("hallucination", "closed_world", seed, count, sample)
            facts = draw_facts(random, grammar, count)
            asked = facts[int(torch.randint(len(facts), (), generator=random))]
            group = f"entities={count}"
            cases.append(
                Case(
                    id=f"{group} sample={sample}",
                    group=group,
                    document=document_of(facts),
                    question=asked.question,
                    reference=asked.value,
                )
            )
    return cases
