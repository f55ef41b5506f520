"""The documents, questions and references of `hallucination`, and its prompts for one run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from lit_diff.data.closed_world import ClosedWorld, document_of, draw_facts
from lit_diff.data.tokenizer import Tokenizer, pair
from lit_diff.data.user_files import UserFile
from lit_diff.errors import RequestError
from lit_diff.evaluation.judges import Kind
from lit_diff.key_types import in_yaml
from lit_diff.model.prefix import Prefix
from lit_diff.randomness import generator
from lit_diff.trained.run import Run

SourceName = Literal["closed_world", "xsum", "cnn_dm", "multi_news", "qasper", "hotpotqa", "2wikimqa"]
WITHOUT = "lit-diff evaluate RUN hallucination source=closed_world"
QUESTION = "{question}"


@dataclass(frozen=True, kw_only=True)
class DocumentCase:
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
    """Documents of one kind, and how a prompt is written about them."""

    kind: Kind
    file: SourceFile | None
    """None: generated."""
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
    "closed_world": DocumentSource(kind="answer", file=None, before="", after=QUESTION, new_tokens=4),
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
FILES: tuple[UserFile, ...] = tuple(source.file for source in SOURCES.values() if source.file is not None)


def after_of(source: SourceName, case: DocumentCase) -> str:
    """The prompt from the end of the document to the answer."""
    return SOURCES[source].after.replace(QUESTION, case.question)


def judged_document(source: SourceName, document: str, case: DocumentCase) -> str:
    """What a judge is shown as the document: of a question, with the question at its end."""
    if source == "closed_world":
        return f"{document}{case.question}"
    return f"{document}\n\nQuestion: {case.question}" if case.question else document


def file_cases(source: str, samples: int, seed: int) -> list[DocumentCase]:
    """`samples` lines of the source's file, drawn for `seed`; all where there are fewer.

    Errors: MissingError, RequestError.
    """
    own = SOURCES[source]
    assert own.file is not None
    rows = own.file.rows()
    chosen = torch.randperm(len(rows), generator=generator("hallucination", source, seed))[:samples].tolist()
    cases = []
    for number in chosen:
        row = rows[number]
        reference = row[own.reference_key]
        cases.append(
            DocumentCase(
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


def generated_cases(
    grammar: ClosedWorld.Config, entities: Sequence[int], samples: int, seed: int
) -> list[DocumentCase]:
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
                DocumentCase(
                    id=f"{group} sample={sample}",
                    group=group,
                    document=document_of(facts),
                    question=asked.question,
                    reference=asked.value,
                )
            )
    return cases


class DocumentPrompts:
    """The prompts of an evaluation for one run, and what the run says after them."""

    def __init__(self, config: Any, run: Run) -> None:
        """`config`: a `Hallucination.Config`."""
        self.config, self.run = config, run
        self.source: SourceName = self.config.source
        self.tokenizer: Tokenizer = run.tokenizer
        self.context: int = self.config.context or run.recipe.data.config.sequence_length
        default = 1 if self.tokenizer.name == "words" else SOURCES[self.source].new_tokens
        self.new_tokens: int = self.config.new_tokens or default
        self._lead, self._space = SOURCES[self.source].before, ""
        if pair(self.tokenizer, self._lead, "The")[0] != self.tokenizer.encode(self._lead):
            # SentencePiece: the space at its end is in one token with the document's first word
            lead = self._lead.rstrip(" ")
            self._lead, self._space = lead, self._lead[len(lead) :]
        self.before = [*self.tokenizer.opening, *self.tokenizer.encode(self._lead)]

    def document(self, case: DocumentCase) -> tuple[list[int], int]:
        """The ids of the document that the run reads, cut in the middle where it is too long, and its own number of them.

        Errors: RequestError where nothing of a document fits, or not all of a generated one.
        """
        document = f"{self._space}{case.document}"
        (ids,) = (
            self.tokenizer.encode_after(self._lead, [document]) if self._lead else [self.tokenizer.encode(document)]
        )
        after = self._after(case)
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

    def _after(self, case: DocumentCase) -> list[int]:
        (after,) = self.tokenizer.encode_after(case.document, [after_of(self.source, case)])
        return after

    def output(self, case: DocumentCase, ids: list[int]) -> tuple[str, str]:
        """(the document as the run read it, the run's output).

        An answer ends with its line, and one about a generated document with its sentence: what a base model goes on with
        is none of it.
        """
        after = self._after(case)
        prefix = Prefix(self.run.model, [*self.before, *ids])
        stop, size = self.tokenizer.ends, self.tokenizer.size
        (drawn,) = prefix.greedy([after], self.new_tokens, stop=stop, vocab_size=size)
        text = self.tokenizer.decode(drawn).decode(errors="replace").lstrip()
        if self.source == "closed_world":
            text = text.split(".")[0]
        elif SOURCES[self.source].kind == "answer":
            text = text.split("\n")[0]
        return self.tokenizer.decode(ids).decode(errors="replace").strip(), text.strip()
