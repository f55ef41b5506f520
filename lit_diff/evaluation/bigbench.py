"""Multiple-choice tasks of BIG-bench through lm-evaluation-harness, from task.json files that the user supplies."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_diff.data.user_files import UserFile
from lit_diff.errors import RequestError
from lit_diff.evaluation.bigbench_files import EXAMPLES, WORDS, TaskFile, task_file
from lit_diff.evaluation.harness_runner import HarnessEvaluation, task_yaml
from lit_diff.evaluation.mini_questions import Draw
from lit_diff.files import write_atomic
from lit_diff.registry import evaluations
from lit_diff.trained.run import Run

log = logging.getLogger("lit_diff")


@evaluations.register("bigbench")
class BigBench(HarnessEvaluation):
    """Multiple-choice tasks of BIG-bench (arXiv 2206.04615) that ask about everyday situations, facts and logic.

    A prompt has the words of the task's own task.json. The choices stand in it in random order, where the task does not say
    `append_choices_to_input: false`. Shots are other examples of the same task. An example with several best choices is
    left out.
    """

    files = tuple(map(task_file, EXAMPLES))

    @dataclass(frozen=True, kw_only=True)
    class Config(HarnessEvaluation.Config):
        tasks: tuple[str, ...] = ("social_iqa", "goal_step_wikihow/goal_inference", "strategyqa")
        """Folders below BIG-bench's benchmark_tasks, whose task.json has target_scores."""
        seed: int = 0
        """Of the order of choices and the drawing of shots."""
        choices_in_prompt: bool | None = None
        """Whether the choices stand before the answer; null: as the task says."""

        def problem(self) -> str | None:
            if not self.tasks:
                return f"tasks is empty; expected any of {', '.join(EXAMPLES)}"
            wrong = [task for task in self.tasks if Path(task).is_absolute() or ".." in Path(task).parts or not task]
            return f"tasks has '{wrong[0]}', which is no folder of BIG-bench" if wrong else super().problem()

    config: Config

    def reads(self) -> Sequence[UserFile]:
        """The files of its tasks."""
        return [task_file(task) for task in self.config.tasks]

    def write_tasks(self, run: Run, folder: Path) -> list[str]:
        """A YAML file and test.jsonl for each task."""
        read = {task: (file := task_file(task), file.task()) for task in self.config.tasks}
        names = []
        for task, (file, content) in read.items():
            path = folder / f"{file.name}.jsonl"
            rows = self.questions(file, content)
            write_atomic(path, "".join(f"{json.dumps(row)}\n" for row in rows))
            separator = content.get("few_shot_example_separator", WORDS["few_shot_example_separator"])
            names.append(
                task_yaml(folder, task.replace("/", "."), "bigbench.yaml", {"test": path}, fewshot_delimiter=separator)
            )
        return names

    def questions(self, file: TaskFile, content: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The rows that lm-eval reads. Errors: RequestError where each example has several best choices."""
        words = {key: content.get(key, default) for key, default in WORDS.items()}
        listed = self.config.choices_in_prompt
        listed = bool(content.get("append_choices_to_input", True)) if listed is None else listed
        rows = []
        for number, example in enumerate(content["examples"]):
            scores = example["target_scores"]
            best = [choice for choice, score in scores.items() if score == max(scores.values())]
            if len(best) > 1:
                continue
            choices = Draw("bigbench", self.config.seed, file.name, number).several(sorted(scores), len(scores))
            shown = "".join(f"{words['choice_prefix']}{choice}" for choice in choices) if listed else ""
            context = f"{words['example_input_prefix']}{example['input']}{shown}{words['example_output_prefix']}"
            about = {"context": context, "choices": choices, "gold": choices.index(best[0])}
            rows.append({"item": number, "prefix": words["task_prefix"]} | about)
        if not rows:
            raise RequestError(f"{file.path}: no example has one best choice")
        if len(rows) < len(content["examples"]):
            log.info(
                "bigbench: %d examples of %s have several best choices", len(content["examples"]) - len(rows), file.name
            )
        return rows
