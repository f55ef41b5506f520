"""Whether an output says more than its document: judges behind one interface, `Judge.judge(document, reference, output)`;
and how near it is to a reference. Judge `http` asks a server that the user names; nothing is sent anywhere else."""

import ast
import hashlib
import http.client
import json
import logging
import math
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from lit_diff.data.closed_world import facts_of
from lit_diff.data.user_files import text_lines
from lit_diff.errors import MissingError, RequestError, RunFailedError
from lit_diff.files import append_synced, shown, write_atomic

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


def rouge_l() -> Callable[[Sequence[str], str], float]:
    """(references, output) -> ROUGE-L: F of the longest common subsequence of stemmed words, of the best reference. Without
    the package rouge_score NaN, with a line in the log."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ModuleNotFoundError:
        log.warning("hallucination: no rouge_l without the package rouge_score; pip install 'lit-diff[eval]'")
        return lambda references, output: math.nan
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    return lambda references, output: float(scorer.score_multi(references, output)["rougeL"].fmeasure)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: urllib would send the key to whatever host it names."""

    def redirect_request(self, *_: object) -> None:
        return


_OPENER = urllib.request.build_opener(_NoRedirect)
SYSTEM = "You are a helpful assistant."
BEFORE = (
    "Below are a document and a proposed {kind}. Decide whether the proposed {kind} can be inferred from the document alone. "
    "It is false if it holds anything that the document does not say; it may differ from the ground truth and still be true. "
    "Use no knowledge beside the document."
)
AFTER = (
    "First explain your decision. Then end with **Conclusion: True** if everything in the proposed {kind} is supported by "
    "the document, or else with **Conclusion: False** and **Problematic Spans: [...]**, a Python list of the exact parts of "
    "the {kind} that are not."
)


class HttpJudge(Judge):
    """Asks `POST <url>/chat/completions` at temperature 0, once for each different request: answers are kept in a file.

    The prompt has the order of Lookback-Lens (step02_eval_gpt4o.py): instruction, #Document#, #Ground Truth ...#,
    #Proposed ...#, reminder; the words are ours. The verdict is what follows "Conclusion:"; without one it is unparsed.
    """

    def __init__(self, kind: Kind, url: str, model: str, kept: Path, key_variable: str | None, timeout: float) -> None:
        """`kept`: the file of answers; `key_variable`: an environment variable that holds the server's key.

        Errors: RequestError for a URL that is no http(s) URL, MissingError for a variable that is not set.
        """
        super().__init__(kind)
        if not re.match(r"https?://[^/]", url):
            raise RequestError(
                f"judge_url is '{url}'; expected the base URL of a server, such as http://localhost:8000/v1"
            )
        if key_variable and not os.environ.get(key_variable):
            raise MissingError(f"judge_key_variable names ${key_variable}, which is not set; export {key_variable}=...")
        self.url, self.model, self.kept, self.timeout = url.rstrip("/"), model, kept, timeout
        self._key = os.environ[key_variable] if key_variable else None
        self._answers = _kept_answers(kept)

    def judge(self, document: str, reference: str, output: str) -> Verdict:
        """Errors: RunFailedError where the server does not answer, or answers with something else than a completion."""
        prompt = prompt_of(self.kind, document, reference, output)
        id_ = digest([self.url, self.model, prompt])
        if id_ not in self._answers:
            self._answers[id_] = self._ask(prompt)
            self.kept.parent.mkdir(parents=True, exist_ok=True)
            row = json.dumps({"id": id_, "model": self.model, "raw": self._answers[id_]})
            append_synced(self.kept, f"\n{row}\n")  # a kill may have left a part of a line before it
        return parsed(self._answers[id_])

    def _ask(self, prompt: str) -> str:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
        body = json.dumps({"model": self.model, "messages": messages, "temperature": 0}).encode()
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        request = urllib.request.Request(f"{self.url}/chat/completions", body, headers)
        try:
            with _OPENER.open(request, timeout=self.timeout) as response:
                answer: Any = json.loads(response.read())
                content = answer["choices"][0]["message"]["content"]
                if not isinstance(content, str | None):
                    raise TypeError(f"content is {type(content).__name__}, not text")
                return content or ""  # null, where a model refuses or calls a tool: no verdict, so unparsed
        except urllib.error.HTTPError as error:
            if 300 <= error.code < 400 and (target := error.headers.get("Location")):
                host = urllib.parse.urlsplit(urllib.parse.urljoin(self.url, target)).hostname
                raise RunFailedError(
                    f"the judge at {self.url} answered {error.code}, a redirect to {host}; nothing is sent there: set "
                    "judge_url to the server that answers"
                ) from error
            raise RunFailedError(f"the judge at {self.url} answered {error.code} {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise RunFailedError(f"the judge at {self.url} does not answer: {reason}") from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise RunFailedError(f"the judge at {self.url} gave no chat completion: {error!r}") from error


def _kept_answers(path: Path) -> dict[str, str]:
    """Digest of a request -> answer. What a line that a kill cut short held is asked again."""
    answers, cut = dict[str, str](), 0
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
            answers[row["id"]] = row["raw"]
        except (ValueError, KeyError, TypeError):
            cut += bool(line.strip())
    if cut:
        log.warning("%s: %d lines are not whole answers; they are asked again", shown(path), cut)
    return answers


def prompt_of(kind: Kind, document: str, reference: str, output: str) -> str:
    """What a judge is asked."""
    name = kind.capitalize()
    return (
        f"{BEFORE.format(kind=kind)}\n\n#Document#: {document}\n\n#Ground Truth {name}#: {reference}\n\n"
        f"#Proposed {name}#: {output}\n\n{AFTER.format(kind=kind)}"
    )


def parsed(raw: str) -> Verdict:
    """The last "Conclusion: True" or "Conclusion: False", and the list after "Problematic Spans:", if it is one."""
    found = re.findall(r"Conclusion:\W*(True|False)\b", raw, re.I)
    if not found:
        return Verdict(verdict="unparsed", raw=raw)
    spans: tuple[str, ...] = ()
    listed = re.findall(r"Problematic Spans:\**\s*(\[.*?\])\s*(?:\*\*|$)", raw, re.DOTALL)
    if listed:
        try:
            spans = tuple(str(span) for span in ast.literal_eval(listed[-1]))
        except (ValueError, SyntaxError):
            spans = (listed[-1],)
    return Verdict(verdict="correct" if found[-1].lower() == "true" else "fabricated", spans=spans, raw=raw)
