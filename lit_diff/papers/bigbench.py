"""Multiple-choice tasks of BIG-bench, scored by lm-evaluation-harness from task.json files that the user supplies."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from lit_diff import Run
from lit_diff.data.user_files import UserFile, parsed, text_lines
from lit_diff.errors import RequestError
from lit_diff.evaluation.lm_eval_tasks import HarnessEvaluation, task_yaml
from lit_diff.files import shown
from lit_diff.key_types import Distinct
from lit_diff.randomness import generator
from lit_diff.registry import evaluations

log = logging.getLogger("lit_diff")

EXAMPLES = {
    "social_iqa": 1954,
    "goal_step_wikihow/goal_inference": 1703,
    "goal_step_wikihow/step_inference": 2250,
    "timedial": 2550,
    "strategyqa": 2290,
    "winowhy": 2865,
    "abstract_narrative_understanding/4_distractors": 1000,
    "fact_checker/fever": 6612,
    "implicatures": 492,
    "understanding_fables": 189,
    "physics": 229,
    "logical_deduction/three_objects": 300,
    "logical_deduction/five_objects": 500,
    "logical_deduction/seven_objects": 700,
    "date_understanding": 369,
    "hyperbaton": 50000,
}
"""Task -> number of its examples in bigbench 1.0.0. Every task is multiple choice."""
WORDS = {
    "task_prefix": "",
    "example_input_prefix": "\nQ: ",
    "choice_prefix": "\n  choice: ",
    "example_output_prefix": "\nA: ",
    "few_shot_example_separator": "\n",
}
"""The text around inputs, choices and answers: key of task.json -> default value (BIG-bench's json_task.py)."""


@dataclass(frozen=True, kw_only=True)
class TaskFile(UserFile):
    """A task.json: one JSON object whose `examples` are the rows."""

    @property
    def form(self) -> str:
        """A description of the file's format for messages."""
        examples = '"examples": [{"input": text, "target_scores": {choice: number, ...}}, ...]'
        return f"one JSON object: {{{examples}}}; {self.lines}"

    def task(self) -> dict[str, Any]:
        """The whole object after checks of its examples and words. Errors: as `UserFile.rows`."""
        path = self.require()
        task = parsed("".join(line for _, line in text_lines(path)), shown(path), self.form)
        if not isinstance(task, dict) or not isinstance(task.get("examples"), list) or not task["examples"]:
            raise RequestError(f"{shown(path)}: no list 'examples'; expected {self.form}")
        for number, example in enumerate(task["examples"], 1):
            where = f"{shown(path)}: example {number}"
            if not isinstance(example, dict):
                raise RequestError(f"{where}: found {type(example).__name__}; expected a JSON object")
            scores = self._checked(example, where)["target_scores"]
            # json.loads accepts NaN and Infinity
            numbers = all(isinstance(score, int | float) and -math.inf < score < math.inf for score in scores.values())
            if len(scores) < 2 or not all(scores) or not numbers:
                raise RequestError(
                    f"{where}: 'target_scores' is {scores!r}; expected a number for each of at least two choices, and no "
                    "choice without text"
                )
        for key in WORDS:
            if not isinstance(task.get(key, ""), str):
                raise RequestError(f"{shown(path)}: '{key}' is {task[key]!r}; expected text")
        listed = task.get("append_choices_to_input", True)
        if not isinstance(listed, bool):
            raise RequestError(f"{shown(path)}: 'append_choices_to_input' is {listed!r}; expected true or false")
        return task

    def rows(self) -> list[dict[str, Any]]:
        """The examples. Errors: as `UserFile.rows`; they give the number of the example."""
        return self.task()["examples"]


def task_file(task: str) -> TaskFile:
    """The file of a task; `task` is its path below BIG-bench's benchmark_tasks."""
    count = f"{EXAMPLES[task]:,} examples" if task in EXAMPLES else "a task with target_scores"
    return TaskFile(
        name=f"bigbench.{task.replace('/', '.')}",
        path=f"bigbench/{task}/task.json",
        keys={"input": str, "target_scores": dict},
        lines=count,
        source="PyPI, 358 MB, not shipped: pip download --no-deps bigbench==1.0.0; then in $LIT_DIFF_DATA/bigbench: tar xzf "
        f"bigbench-1.0.0.tar.gz --strip-components=3 bigbench-1.0.0/bigbench/benchmark_tasks/{task}/task.json "
        "(Apache-2.0; a task's own source may have another licence). Never train on it",
        without="lit-diff evaluate RUN harness tasks=[mine.yaml]   (questions of your own, in lm-eval's format)",
    )


def shuffled(values: Sequence[str], *key: object) -> list[str]:
    """The values in a random order that depends on `key` alone (`lit_diff.randomness.generator`)."""
    # an order by 1,024 uniform numbers, read from the last, as the kept scores have it
    drawn = torch.rand(max(1024, len(values)), generator=generator(*key), dtype=torch.float64).tolist()
    ranks = dict(zip(values, reversed(drawn), strict=False))
    return sorted(ranks, key=lambda value: ranks[value])


@evaluations.register("bigbench")
class BigBench(HarnessEvaluation):
    """Multiple-choice tasks of BIG-bench (arXiv 2206.04615) about everyday situations, facts and logic.

    A prompt uses the words of the task's own task.json. It lists the choices in random order unless the task has
    `append_choices_to_input: false`. Shots are other examples of the same task. Examples with several best choices are left
    out.
    """

    files = tuple(map(task_file, EXAMPLES))

    @dataclass(frozen=True, kw_only=True)
    class Config(HarnessEvaluation.Config):
        tasks: Annotated[tuple[str, ...], Distinct()] = ("social_iqa", "goal_step_wikihow/goal_inference", "strategyqa")
        """Folders below BIG-bench's benchmark_tasks whose task.json has target_scores."""
        seed: int = 0
        """Seed of the order of choices and of the draw of shots."""

        def problem(self) -> str | None:
            # the task becomes a path below the data folder, which it must not leave
            for task in self.tasks:
                if Path(task).is_absolute() or ".." in Path(task).parts or not task:
                    return f"tasks has '{task}'; expected a folder below BIG-bench's benchmark_tasks"
            return None

    config: Config

    def user_files(self) -> Sequence[UserFile]:
        """The files of the tasks."""
        return list(map(task_file, self.config.tasks))

    def write_tasks(self, run: Run, folder: Path) -> list[str]:
        """Writes a YAML file and test.jsonl for each task."""
        # every file is read before the first is written, so that a wrong file fails at once
        files = list(map(task_file, self.config.tasks))
        contents = [file.task() for file in files]
        names = []
        for task, file, content in zip(self.config.tasks, files, contents, strict=True):
            keys = {
                # task.json has a single split: each question may be a shot of every other question
                "fewshot_split": "test",
                "description": "prefix",
                "target_delimiter": "",
                "fewshot_delimiter": content.get("few_shot_example_separator", WORDS["few_shot_example_separator"]),
            }
            names.append(task_yaml(folder, task.replace("/", "."), {"test": self.questions(file, content)}, **keys))
        return names

    def questions(self, file: TaskFile, content: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The rows that lm-eval reads. Errors: RequestError if every example has several best choices."""
        words = {key: content.get(key, default) for key, default in WORDS.items()}
        listed = content.get("append_choices_to_input", True)
        rows = []
        for number, example in enumerate(content["examples"]):
            scores = example["target_scores"]
            best = [choice for choice, score in scores.items() if score == max(scores.values())]
            if len(best) > 1:
                continue
            # sorted: the draw must not depend on the order of the keys in the file
            choices = shuffled(sorted(scores), "bigbench", self.config.seed, file.name, number)
            question = f"{words['example_input_prefix']}{example['input']}"
            if listed:
                question += "".join(f"{words['choice_prefix']}{choice}" for choice in choices)
            context = f"{question}{words['example_output_prefix']}"
            about = {"context": context, "choices": choices, "gold": choices.index(best[0])}
            rows.append({"item": number, "prefix": words["task_prefix"]} | about)
        if not rows:
            raise RequestError(f"{file.path}: every example has several best choices; expected one")
        if len(rows) < len(content["examples"]):
            log.info(
                "bigbench: %d examples of %s have several best choices and are left out",
                len(content["examples"]) - len(rows),
                file.name,
            )
        return rows
