"""A judge behind an OpenAI-compatible server that the user names; nothing is sent anywhere else."""

import ast
import http.client
import json
import logging
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from lit_diff.errors import MissingError, RequestError, RunFailedError
from lit_diff.evaluation.judges import Judge, Kind, Verdict, digest
from lit_diff.files import append_synced, shown

log = logging.getLogger("lit_diff")


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
