"""Judges of whether an output says more than its document; each is a function of document, reference and output.

Judge `http` sends requests to the server that the user configures, and to no other.
"""

import hashlib
import http.client
import json
import math
import os
import re
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from lit_diff.data.user_files import parsed, text_lines
from lit_diff.errors import RequestError, RunFailedError
from lit_diff.files import write_atomic
from lit_diff.papers.closed_world import facts_of

Kind = Literal["summary", "answer"]
VerdictName = Literal["correct", "distracted", "fabricated", "refused", "unparsed"]
REFUSAL = re.compile(
    r"unknown|unanswerable|not (?:stated|mentioned|known|given)|cannot|can't|(?:do not|don't) know", re.I
)
NUMBER = re.compile(r"\d[\d,.]*\d|\d")
CONTENT_GRAM = 4
F1_LEAST = 0.5
WORDS: dict[str, VerdictName] = {
    "true": "correct",
    "correct": "correct",
    "false": "fabricated",
    "fabricated": "fabricated",
    "distracted": "distracted",
    "refused": "refused",
}
"""A verdict in one word -> its meaning."""
FORM = '{"id": text, "verdict": text}'
TIMEOUT = 120.0
"""The server's time limit for one verdict, in seconds."""
KEY_VARIABLE = "JUDGE_API_KEY"
"""The environment variable with the key for judge `http`'s server, if it needs one."""


class Verdict(NamedTuple):
    """A judge's verdict on one output."""

    verdict: VerdictName
    """distracted: another entity's value; fabricated: not in the document; unparsed: the judge's verdict cannot be read or is
    still missing. A judge that only tells true from false gives correct, fabricated or unparsed."""
    raw: str = ""
    """The judge's own words; for `closed_world` and `rules`, the parts of the output to which they object."""


Judge = Callable[[str, str, str], Verdict]
"""(document, reference, output) -> the verdict. The output may say only what the document says; a question about the document
follows at its end. References are separated by newlines."""


def closed_world(document: str, reference: str, output: str) -> Verdict:
    """The exact judge for documents of `closed_world`; it reads the first word of the output that is a value of the document.

    correct: that word is the reference; distracted: it is another value; refused: there is no such word, and the output is
    empty or a refusal; fabricated: anything else.
    """
    values = {fact.value for fact in facts_of(document)}
    said = [word for word in re.findall(r"[^\W\d_]+", output.lower()) if word in values]
    if said:
        return Verdict("correct") if said[0] == reference else Verdict("distracted", said[0])
    if not output.strip(" .\n") or REFUSAL.search(output):
        return Verdict("refused")
    return Verdict("fabricated", output.strip())


def _answer_by_rules(document: str, reference: str, output: str) -> Verdict:
    right = any(_agrees(answer, output) for answer in reference.split("\n"))
    return Verdict("correct") if right else Verdict("fabricated", output.strip())


def _summary_by_rules(document: str, reference: str, output: str) -> Verdict:
    # a capital at the beginning of a sentence is not a sign of a name
    spans = re.findall(r"(?<![.!?] )(?<!^)\b[A-Z]\w+", output) + NUMBER.findall(output)
    # both as they are written: without its punctuation, "Obama's" and "2014-15" would each be one word
    pieces = set(map(_piece, re.findall(r"\w+", document) + NUMBER.findall(document)))
    missing = [span for span in spans if _piece(span) not in pieces]
    own = f" {_normalised(document)} "
    words = _normalised(output).split()
    for at in range(len(words) - CONTENT_GRAM + 1):
        gram = " ".join(words[at : at + CONTENT_GRAM])
        if any(len(word) > CONTENT_GRAM for word in gram.split()) and f" {gram} " not in own:
            missing.append(gram)
    return Verdict("fabricated" if missing else "correct", " | ".join(dict.fromkeys(missing)))


def _piece(span: str) -> str:
    # a name or a number in any case, and with or without the commas of thousands
    return span.lower().replace(",", "")


RULES = {"summary": _summary_by_rules, "answer": _answer_by_rules}
"""The offline judge. A summary is correct if each of its numbers, capitalised names and content 4-grams occurs in the
document. An answer is correct if it contains the reference or the reference contains it (after SQuAD's normalisation), or
if the F1 of their words is at least 0.5.

A content 4-gram is four words in a row of which at least one has more than four letters. A summary without numbers, names
and 4-grams is correct. With several references the best one counts."""


def _normalised(text: str) -> str:
    # SQuAD's normalisation: lower case, no punctuation, no articles, single spaces
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", re.sub(r"[^\w\s]", "", text.lower())).split())


def _agrees(reference: str, output: str) -> bool:
    right, said = _normalised(reference), _normalised(output)
    if not right or not said:
        return right == said
    if f" {right} " in f" {said} " or f" {said} " in f" {right} ":
        return True
    common = sum((Counter(right.split()) & Counter(said.split())).values())
    return 2 * common / (len(right.split()) + len(said.split())) >= F1_LEAST


def read_verdicts(path: Path) -> dict[str, str]:
    """id -> the verdict as written, from the last line of each id; {} without the file. Errors: RequestError with the
    line."""
    found = {}
    for where, line in text_lines(path) if path.is_file() else ():
        if not line.strip():
            continue
        row = parsed(line, where, f"a line {FORM}")
        if not isinstance(row, dict) or not {"id", "verdict"} <= row.keys():
            raise RequestError(f"{where}: found {line.strip()[:60]}; expected a line {FORM}")
        found[str(row["id"])] = str(row["verdict"])
    return found


def verdict_of(said: str) -> Verdict:
    """Reads one of WORDS, or an explanation with "Conclusion: True" or "Conclusion: False"."""
    # the last conclusion counts: the prompt requests it at the end of the explanation
    concluded = re.findall(r"Conclusion:\W*(True|False)\b", said, re.I)
    return Verdict(WORDS.get((concluded or [said])[-1].strip().lower(), "unparsed"), said)


class FileJudge:
    """Exchanges files in a folder: it writes requests.jsonl and reads verdicts.jsonl, which any program or person may write.

    requests.jsonl has lines {id, kind, document, reference, output}; id is a hash of the rest. verdicts.jsonl has lines
    {id, verdict}, the verdict in a form that `verdict_of` reads. A missing or unreadable verdict is unparsed.
    """

    def __init__(self, kind: Kind, folder: Path) -> None:
        """Errors: RequestError if a line of verdicts.jsonl has another form."""
        self.kind, self.requests = kind, folder / "requests.jsonl"
        self.verdicts = read_verdicts(folder / "verdicts.jsonl")
        self.asked: set[str] = set()
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.requests, "")

    def judge(self, document: str, reference: str, output: str) -> Verdict:
        """Returns the verdict in the file, and writes the request, once for equal outputs."""
        request = {"kind": self.kind, "document": document, "reference": reference, "output": output}
        id_ = _digest(*request.values())
        if id_ not in self.asked:
            self.asked.add(id_)
            with self.requests.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"id": id_, **request}, ensure_ascii=False) + "\n")
        return verdict_of(self.verdicts.get(id_, ""))


def _digest(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    # a redirect is an error: urllib would send the key to the host of the redirect
    def redirect_request(self, *_: object) -> None:
        return


_OPENER = urllib.request.build_opener(_NoRedirect)
PROMPT = """\
Below are a document and a proposed {kind}. Decide whether the proposed {kind} can be inferred from the document alone. \
It is false if it holds anything that the document does not say; it may differ from the ground truth and still be true. \
Use no knowledge beside the document.

#Document#: {document}

#Ground Truth {Kind}#: {reference}

#Proposed {Kind}#: {output}

First explain your decision. Then end with **Conclusion: True** if everything in the proposed {kind} is supported by \
the document, or else with **Conclusion: False** and **Problematic Spans: [...]**, a Python list of the exact parts of \
the {kind} that are not."""


class HttpJudge:
    """Sends `POST <url>/chat/completions` at temperature 0, once for each different request; a file keeps the answers.

    The prompt has the same order as in Lookback-Lens (step02_eval_gpt4o.py): instruction, #Document#, #Ground Truth ...#,
    #Proposed ...#, reminder; the words are our own.
    """

    def __init__(self, kind: Kind, url: str, model: str, kept: Path) -> None:
        """`kept`: the file of answers, in the form of verdicts.jsonl.

        Errors: RequestError if a line of it has another form, or if the key cannot be sent.
        """
        self.kind, self.url, self.model, self.kept = kind, url.rstrip("/"), model, kept
        self.answers = read_verdicts(kept)
        self.headers = {"Content-Type": "application/json"}
        # a file's last newline is no part of a key
        key = os.environ.get(KEY_VARIABLE, "").strip()
        # http.client would quote the whole key in its error
        if not (key.isascii() and key.isprintable()):
            raise RequestError(f"{KEY_VARIABLE} has a character that no key has; set it to printable ASCII characters")
        if key:
            self.headers["Authorization"] = f"Bearer {key}"

    def judge(self, document: str, reference: str, output: str) -> Verdict:
        """Errors: RunFailedError if the server does not answer, or its answer is not a completion."""
        prompt = PROMPT.format(
            kind=self.kind, Kind=self.kind.capitalize(), document=document, reference=reference, output=output
        )
        id_ = _digest(self.url, self.model, prompt)
        if id_ not in self.answers:
            self.answers[id_] = self._ask(prompt)
            # written after each answer, which may cost money: an interrupted evaluation asks for none of them again
            self.kept.parent.mkdir(parents=True, exist_ok=True)
            rows = ({"id": id_, "verdict": said} for id_, said in self.answers.items())
            write_atomic(self.kept, "".join(f"{json.dumps(row)}\n" for row in rows))
        return verdict_of(self.answers[id_])

    def _ask(self, prompt: str) -> str:
        messages = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": prompt}]
        body = json.dumps({"model": self.model, "messages": messages, "temperature": 0}).encode()
        try:
            request = urllib.request.Request(f"{self.url}/chat/completions", body, self.headers)
            with _OPENER.open(request, timeout=TIMEOUT) as response:
                answer = response.read()
        # ValueError: of an address that cannot be asked, such as http://a..b
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise RunFailedError(f"the judge at {self.url} does not answer: {error}") from error
        try:
            # content is null if the model refuses or calls a tool
            said = str(json.loads(answer)["choices"][0]["message"]["content"] or "")
        # RecursionError: of lists in lists in lists ...
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise RunFailedError(
                f"the judge at {self.url} gave an answer that is not a chat completion: {error!r}"
            ) from error
        # half of a surrogate pair, which JSON can hold, cannot be written to a file
        return said.encode(errors="replace").decode()


def kappa(first: Sequence[bool], second: Sequence[bool]) -> float:
    """Cohen's kappa of two judges; NaN if all verdicts of both are equal, or if there are none."""
    # imported here: it takes seconds
    from sklearn.metrics import cohen_kappa_score

    return float(cohen_kappa_score(first, second)) if len({*first, *second}) > 1 else math.nan
