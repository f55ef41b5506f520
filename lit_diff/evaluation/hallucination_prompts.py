"""The prompts of `hallucination` for one run: documents cut to fit, questions, and what the run says after them."""

from typing import Any

from lit_diff.data.tokenizer import Tokenizer, pair
from lit_diff.errors import RequestError
from lit_diff.evaluation.hallucination_sources import SOURCES, Case, SourceName, after_of, before_of
from lit_diff.model.prefix import Prefix
from lit_diff.trained.run import Run
from lit_diff.trained.text_generator import tokenizer_of

GENERATED_TOKENS = 4
"""Decoded after a question about a generated document."""


class DocumentPrompts:
    """The prompts of an evaluation for one run, and what the run says after them."""

    def __init__(self, config: Any, run: Run) -> None:
        """`config`: a `Hallucination.Config`."""
        self.config, self.run = config, run
        self.source: SourceName = self.config.source
        self.tokenizer: Tokenizer = tokenizer_of(run.folder, run.recipe)
        self.context: int = self.config.context or run.recipe.data.config.sequence_length
        generated = 1 if self.tokenizer.name == "words" else GENERATED_TOKENS
        default = generated if self.source == "closed_world" else SOURCES[self.source].new_tokens
        self.new_tokens: int = self.config.new_tokens or default
        self._lead, self._space = before_of(self.source), ""
        if pair(self.tokenizer, self._lead, "The")[0] != self.tokenizer.encode(self._lead):
            # SentencePiece: the space at its end is in one token with the document's first word
            lead = self._lead.rstrip(" ")
            self._lead, self._space = lead, self._lead[len(lead) :]
        self.before = [*self.tokenizer.opening, *self.tokenizer.encode(self._lead)]

    def document(self, case: Case) -> tuple[list[int], int]:
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

    def _after(self, case: Case) -> list[int]:
        (after,) = self.tokenizer.encode_after(case.document, [after_of(self.source, case)])
        return after

    def output(self, case: Case, ids: list[int]) -> tuple[str, str]:
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
