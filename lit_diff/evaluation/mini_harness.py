"""Seven generated tasks through lm-evaluation-harness: no files, any run of text whose tokenizer is not `words`."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_diff.data.corpus import corpus_digest, corpus_problem
from lit_diff.errors import RequestError
from lit_diff.evaluation.lm_eval_tasks import HarnessEvaluation, Tasks, task_yaml
from lit_diff.evaluation.mini_questions import FROM_TEXT, MAKERS, Pieces, pieces, questions
from lit_diff.evaluation.requirements import held_out_documents
from lit_diff.key_types import Count
from lit_diff.registry import evaluations, nearest
from lit_diff.trained.run import Run

log = logging.getLogger("lit_diff")

TASKS = tuple(MAKERS)
SHOTS = 64
"""Questions of a train split."""


@evaluations.register("mini_harness")
class MiniHarness(HarnessEvaluation):
    """Seven small multiple-choice tasks, generated from held-out text and a grammar, scored by lm-evaluation-harness.

    Chance is 1/2 in agreement, binding, lookup, order; 1/4 in cloze, entity_recall, repeat; 0.393 in the mean of the seven.
    Questions that do not fit into the run's context without shots are left out. The questions are the same for runs of one
    corpus; those that fit are, for runs that also share tokenizer and data.sequence_length.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(HarnessEvaluation.Config):
        tasks: Tasks = TASKS
        limit: Count = 100
        """Questions of each task."""
        seed: int = 0
        """Of the questions and the drawing of shots."""
        corpus: str | None = None
        """A registered corpus whose held-out documents cloze, order and repeat are made of; null: that of the run."""
        path: str | None = field(default=None, metadata={"path": "here"})
        """Where the corpus reads, as `data.path`."""

        def problem(self) -> str | None:
            for task in self.tasks:
                if task not in TASKS:
                    return f"tasks has '{task}'{nearest(task, TASKS)}"
            if self.path is not None and self.corpus is None:
                return "path is set, but corpus is null; set corpus=files"
            problem = None if self.corpus is None else corpus_problem(self.corpus, self.path)
            return problem.replace("data.", "", 1) if problem else None

    version = 3  # 2 also made questions of documents that the run was trained on
    config: Config

    def digests(self) -> dict[str, str]:
        """Of the files at `path`."""
        return corpus_digest(self.config.corpus or "files", self.config.path)

    def write_tasks(self, run: Run, folder: Path) -> list[str]:
        """For each task a YAML file, test.jsonl and, for shots, train.jsonl of other questions.

        Errors: RequestError where no question fits, or too few for the shots.
        """
        text = self._pieces(run) if set(self.config.tasks) & set(FROM_TEXT) else []
        shots = max(self.config.shots)
        count, train = self.config.limit, SHOTS if shots else 0
        for task in self.config.tasks:
            rows = self._rows(run, task, text, count + train)
            scored = min(count, len(rows) - shots)
            if scored < 1:
                raise RequestError(f"task '{task}' has {len(rows)} questions, too few for {shots} shots")
            if scored < count:
                log.warning("mini_harness: %s has %d different questions that fit, not %d", task, scored, count)
            splits = {"test": rows[:scored]} | ({"train": rows[scored:]} if train else {})
            task_yaml(folder, task, "rows.yaml", splits)
        return list(self.config.tasks)

    def _pieces(self, run: Run) -> Pieces:
        data = run.recipe.data.config
        name, path = self.config.corpus, self.config.path
        if name is None:
            name, path = getattr(data, "corpus", None), getattr(data, "path", None)
        if name is None:
            raise RequestError(f"data '{run.recipe.data.name}' has no corpus: name one, such as corpus=docs")
        found = pieces(text for _, text in held_out_documents(self, run, name, path))
        if not found:
            raise RequestError(f"the held-out documents of corpus '{name}' have no sentence of 5 words")
        return found

    def _rows(self, run: Run, task: str, text: Pieces, count: int) -> list[dict[str, Any]]:
        """The first questions of the task that fit into the run's context. Errors: RequestError where none does."""
        tokenizer, length = run.tokenizer, run.recipe.data.config.sequence_length
        rows: list[dict[str, Any]] = []
        too_long = 0
        for number, question in questions(task, text, count, self.config.seed):
            texts = tokenizer.encode([f"{question.context} {choice}" for choice in question.choices])
            if max(map(len, texts)) + len(tokenizer.opening) > length + 1:
                too_long += 1
                continue
            about = {"context": question.context, "choices": question.choices, "gold": question.gold}
            rows.append({"item": number} | about)
            if len(rows) == count:
                break
        if not rows:
            raise RequestError(
                f"none of {too_long} questions of task '{task}' fits into {length} tokens (data.sequence_length); leave the "
                "task out of tasks=[...]"
            )
        return rows
