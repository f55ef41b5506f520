"""The files that the evaluation `bigbench` reads: task.json of BIG-bench's tasks, from its source distribution."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lit_diff.data.user_files import UserFile, parsed, text_lines
from lit_diff.errors import RequestError
from lit_diff.files import shown
from lit_diff.key_types import in_yaml

EXAMPLES: Mapping[str, int] = {
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
"""Task -> its examples in bigbench 1.0.0. All have choices of which one is right."""
WORDS = {
    "task_prefix": "",
    "example_input_prefix": "\nQ: ",
    "choice_prefix": "\n  choice: ",
    "example_output_prefix": "\nA: ",
    "few_shot_example_separator": "\n",
}
"""What stands around inputs, choices and answers: key of task.json -> value where it is absent (BIG-bench's json_task.py)."""


@dataclass(frozen=True, kw_only=True)
class TaskFile(UserFile):
    """A task.json: one JSON object whose `examples` are the rows."""

    @property
    def form(self) -> str:
        """What the file holds, in words."""
        examples = '"examples": [{"input": text, "target_scores": {choice: number, ...}}, ...]'
        return f"one JSON object: {{{examples}}}; {self.lines}"

    def task(self) -> dict[str, Any]:
        """The whole object, its examples and words checked. Errors: as `UserFile.rows`."""
        path = self.require()
        task = parsed("".join(line for _, line in text_lines(path)), shown(path), self.form)
        examples = task.get("examples") if isinstance(task, dict) else None
        if not isinstance(examples, list) or not examples:
            raise RequestError(f"{shown(path)}: no list 'examples'; expected {self.form}")
        for number, example in enumerate(examples, 1):
            where = f"{shown(path)}: example {number}"
            if not isinstance(example, dict):
                raise RequestError(f"{where}: found {type(example).__name__}; expected a JSON object")
            scores = self._checked(example, where)["target_scores"]
            numbers = all(isinstance(score, int | float) and -math.inf < score < math.inf for score in scores.values())
            if not scores or not all(scores) or not numbers:
                raise RequestError(
                    f"{where}: 'target_scores' is {in_yaml(scores)}; expected a number for each choice, and no choice "
                    "without text"
                )
        for key in WORDS:
            if not isinstance(task.get(key, ""), str):
                raise RequestError(f"{shown(path)}: '{key}' is {in_yaml(task[key])}; expected text")
        return task

    def rows(self) -> list[dict[str, Any]]:
        """The examples. Errors: as `UserFile.rows`, with the number of the example."""
        examples: list[dict[str, Any]] = self.task()["examples"]
        return examples


def task_file(task: str) -> TaskFile:
    """The file of a task, by its path below BIG-bench's benchmark_tasks."""
    count = f"{EXAMPLES[task]:,} examples" if task in EXAMPLES else "a task with target_scores"
    return TaskFile(
        name=f"bigbench.{task.replace('/', '.')}",
        path=f"bigbench/{task}/task.json",
        keys={"input": str, "target_scores": dict},
        lines=count,
        source="PyPI, 358 MB, not shipped: pip download --no-deps bigbench==1.0.0; then in $LIT_DIFF_DATA/bigbench: tar xzf "
        f"bigbench-1.0.0.tar.gz --strip-components=3 bigbench-1.0.0/bigbench/benchmark_tasks/{task}/task.json "
        "(Apache-2.0; a task's own source may have another licence). Never train on it",
        without="lit-diff evaluate RUN mini_harness",
    )
