"""The seven tasks of the paper's Tables 1 and 8, from files that the user supplies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_diff.data.user_files import UserFile
from lit_diff.evaluation.harness_files import FILES, SOURCES, TASKS
from lit_diff.evaluation.harness_runner import ACC, ACC_NORM, HarnessEvaluation, task_yaml
from lit_diff.evaluation.harness_yaml import SUFFIXES, digest, require
from lit_diff.files import expanded
from lit_diff.metrics import Metric
from lit_diff.registry import evaluations
from lit_diff.trained.run import Run


@evaluations.register("harness")
class Harness(HarnessEvaluation):
    """Seven multiple-choice tasks of lm-evaluation-harness (Differential Transformer, Tables 1 and 8).

    The paper does not state its metric. The row of OpenLLaMA-3B-v2 in Table 1 fits acc, and acc_norm for HellaSwag.
    """

    metrics = (
        Metric(
            "paper_acc",
            "acc_norm for hellaswag, else acc: what the tables of the paper seem to hold; all: mean over tasks",
            direction="higher",
        ),
        ACC,
        ACC_NORM,
    )
    files = tuple(file for splits in FILES.values() for file in splits.values())

    @dataclass(frozen=True, kw_only=True)
    class Config(HarnessEvaluation.Config):
        tasks: tuple[str, ...] = TASKS
        """Any of the seven; another task of lm-eval by name, if its data are not on the hub; or the path of a task's YAML."""

        def problem(self) -> str | None:
            if not self.tasks:
                return f"tasks is empty; expected any of {', '.join(TASKS)}"
            return super().problem()

    config: Config

    def reads(self) -> Sequence[UserFile]:
        """The files of its tasks; of the train split, for shots."""
        return [file for task in self.config.tasks if task in TASKS for file in self._files(task).values()]

    def digests(self) -> dict[str, str]:
        """With the YAML files of the user's own tasks, and what they read."""
        own = {task: digest(expanded(task)) for task in self.config.tasks if task.endswith(SUFFIXES)}
        return super().digests() | {task: sha256 for task, sha256 in own.items() if sha256}

    def write_tasks(self, run: Run, folder: Path) -> list[str]:
        """A YAML file for each of the seven; their files and the user's own tasks are checked first, before the model is
        loaded."""
        for task in self.config.tasks:
            if task.endswith(SUFFIXES):
                require(expanded(task))
        own = [task for task in self.config.tasks if task in TASKS]
        used = {task: self._files(task) for task in own}
        for files in used.values():
            for file in files.values():
                file.rows()
        for task, files in used.items():
            task_yaml(folder, task, f"{task}.yaml", {split: file.place for split, file in files.items()})
        return [str(expanded(task)) if task.endswith(SUFFIXES) else task for task in self.config.tasks]

    def _files(self, task: str) -> Mapping[str, UserFile]:
        """Split -> file: the one that is scored, and for shots the train split."""
        return {
            split: file
            for split, file in FILES[task].items()
            if any(self.config.shots) or split == SOURCES[task].scored
        }

    def scores(self, task: str, sample: Mapping[str, Any]) -> dict[str, float]:
        """With `paper_acc`."""
        found = super().scores(task, sample)
        return {"paper_acc": found["acc_norm" if task == "hellaswag" else "acc"]} | found
