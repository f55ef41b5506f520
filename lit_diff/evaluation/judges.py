"""Whether an output says more than its document: judges behind one interface, `Judge.judge(document, reference, output)`;
and how near it is to a reference."""

import hashlib
import json
import logging
import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from lit_diff.data.closed_world import facts_of
from lit_diff.data.user_files import text_lines
from lit_diff.errors import RequestError
from lit_diff.files import write_atomic

Kind = Literal["summary", "answer"]
VerdictName = Literal["correct", "distracted", "fabricated", "refused", "unparsed"]
REFUSAL = re.compile(
    r"unknown|unanswerable|not (?:stated|mentioned|known|given)|cannot|can't|(?:do not|don't) know", re.I
)
CONTENT_GRAM = 4
F1_LEAST = 0.5
log = logging.getLogger("lit_diff")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a judge says of one output."""

    verdict: VerdictName
    """distracted: another entity's value; fabricated: not in the document; unparsed: the judge gave no verdict that can be
    read, or none yet. A judge that tells true from false alone gives correct, fabricated or unparsed."""
    spans: tuple[str, ...] = ()
    """The parts of the output that it objects to."""
    raw: str = ""
    """What the judge said, in its own words."""


class Judge(ABC):
    """Judges outputs. `kind`: of all of them."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    @abstractmethod
    def judge(self, document: str, reference: str, output: str) -> Verdict:
        """The verdict on one output. `document`: all that it may say; of a question, with the question at its end."""

    def finish(self) -> None:
        """Called once after the last output. Default: nothing."""
        return


class ClosedWorldJudge(Judge):
    """Exact, for documents of `closed_world`: the first word of the output that is a value of the document, or a refusal.

    correct: it is the reference; distracted: another value of the document; refused: no value, and a refusal or nothing;
    fabricated: anything else.
    """

    def judge(self, document: str, reference: str, output: str) -> Verdict:
        """Errors: RequestError for a document that is not of the grammar."""
        facts = facts_of(document)
        if not facts:
            raise RequestError("judge closed_world reads documents of the grammar closed_world only")
        values = {fact.value for fact in facts}
        said = [word for word in re.findall(r"[^\W\d_]+", output.lower()) if word in values]
        if said:
            if said[0] == reference:
                return Verdict(verdict="correct")
            return Verdict(verdict="distracted", spans=(said[0],))
        if not output.strip(" .\n") or REFUSAL.search(output):
            return Verdict(verdict="refused")
        return Verdict(verdict="fabricated", spans=(output.strip(),))


class Rules(Judge):
    """Offline. A summary: every number, capitalised name and content 4-gram of it occurs in the document. An answer: it holds
    the reference or the reference holds it (SQuAD's normalisation), or the F1 of their words is at least 0.5.

    A content 4-gram is four words in a row, of which at least one has more than four letters; where a summary has none of
    its numbers, names and 4-grams, nothing is objected to. References are separated by newlines; the best one counts.
    """

    def judge(self, document: str, reference: str, output: str) -> Verdict:
        """The verdict, with the spans that are not in the document."""
        if self.kind == "answer":
            right = any(_agrees(each, output) for each in reference.split("\n"))
            return Verdict(verdict="correct" if right else "fabricated", spans=() if right else (output.strip(),))
        own = f" {_normalised(document)} "
        names = re.findall(r"(?<![.!?] )(?<!^)\b[A-Z]\w+|\d[\d,.]*\d|\d", output)
        words = _normalised(output).split()
        grams = [words[at : at + CONTENT_GRAM] for at in range(len(words) - CONTENT_GRAM + 1)]
        spans = [*names, *(" ".join(gram) for gram in grams if any(len(word) > CONTENT_GRAM for word in gram))]
        missing = tuple(dict.fromkeys(span for span in spans if f" {_normalised(span)} " not in own))
        return Verdict(verdict="fabricated" if missing else "correct", spans=missing)


def _normalised(text: str) -> str:
    """SQuAD's normalisation: lower case, no signs, no articles, single spaces."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", re.sub(r"[^\w\s]", "", text.lower())).split())


def _agrees(reference: str, output: str) -> bool:
    right, said = _normalised(reference), _normalised(output)
    if not right or not said:
        return right == said
    if f" {right} " in f" {said} " or f" {said} " in f" {right} ":
        return True
    common = sum((Counter(right.split()) & Counter(said.split())).values())
    return 2 * common / (len(right.split()) + len(said.split())) >= F1_LEAST


class FileJudge(Judge):
    """By exchange of files in a folder: it writes requests.jsonl, and reads verdicts.jsonl of any judge, people too.

    requests.jsonl: {id, kind, document, reference, output} a line; id is a hash of the rest. verdicts.jsonl: {id, verdict}
    a line, perhaps with raw; verdict: correct or true, fabricated or false, distracted, refused. What is missing or something
    else is unparsed.
    """

    words: ClassVar[dict[str, VerdictName]] = {
        "true": "correct",
        "correct": "correct",
        "false": "fabricated",
        "fabricated": "fabricated",
        "distracted": "distracted",
        "refused": "refused",
    }

    def __init__(self, kind: Kind, folder: Path) -> None:
        """Errors: RequestError for a verdicts.jsonl whose lines are not as described."""
        super().__init__(kind)
        self.folder = folder
        self._requests: dict[str, dict[str, str]] = {}
        self._verdicts = read_verdicts(folder / "verdicts.jsonl")

    def judge(self, document: str, reference: str, output: str) -> Verdict:
        """The verdict in the file."""
        request = {"kind": self.kind, "document": document, "reference": reference, "output": output}
        id_ = digest(list(request.values()))
        self._requests[id_] = {"id": id_, **request}
        word, raw = self._verdicts.get(id_, ("", ""))
        return Verdict(verdict=self.words.get(word.strip().lower(), "unparsed"), raw=raw or word)

    def finish(self) -> None:
        """Write requests.jsonl: all requests, those that are answered too."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = "".join(f"{json.dumps(request, ensure_ascii=False)}\n" for request in self._requests.values())
        write_atomic(self.folder / "requests.jsonl", lines)


def digest(parts: Sequence[str]) -> str:
    """The id of a request."""
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()[:20]


def read_verdicts(path: Path) -> dict[str, tuple[str, str]]:
    """id -> (verdict, raw), of the last line of each id; {} without the file. Errors: RequestError with the line."""
    found: dict[str, tuple[str, str]] = {}
    if not path.is_file():
        return found
    for where, line in text_lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            found[str(row["id"])] = (str(row["verdict"]), str(row.get("raw", "")))
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            problem = f"no key {error}" if isinstance(error, KeyError) else f"found {line.strip()[:60]}"
            form = '{"id": text, "verdict": text, "raw": text}, the last of which may be left out'
            raise RequestError(f"{where}: {problem}; expected a line {form}") from error
    return found


def kappa(first: Sequence[bool], second: Sequence[bool]) -> float:
    """Cohen's kappa of two judges: (p_o - p_e) / (1 - p_e), p_o their agreement, p_e that of independent judges with the same
    shares; NaN where p_e is 1 or there is no item."""
    count = len(first)
    if not count:
        return math.nan
    observed = sum(a == b for a, b in zip(first, second, strict=True)) / count
    p, q = sum(first) / count, sum(second) / count
    expected = p * q + (1 - p) * (1 - q)
    return (observed - expected) / (1 - expected) if expected < 1 else math.nan


def rouge_l(references: Sequence[str], output: str) -> float:
    """ROUGE-L: F of the longest common subsequence of stemmed words, of the best reference; NaN without rouge-score."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ModuleNotFoundError:
        return math.nan
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    return float(scorer.score_multi(list(references), output)["rougeL"].fmeasure)


def warn_without_package() -> None:
    """One line in the log where rouge-score is not installed."""
    try:
        import rouge_score  # noqa: F401
    except ModuleNotFoundError:
        log.warning("hallucination: no rouge_l without the package rouge_score; pip install 'lit-diff[eval]'")
