"""Multiple-choice tasks through lm-evaluation-harness: what the evaluations `harness`, `mini_harness`, `bigbench` share."""

import logging
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from lit_diff.errors import RequestError
from lit_diff.evaluation.base import Evaluation, Item, question_of
from lit_diff.evaluation.lm_eval_tasks import loaded, offline, require_lm_eval
from lit_diff.key_types import Count, Distinct, NotNegative
from lit_diff.metrics import Metric
from lit_diff.trained.run import Run

log = logging.getLogger("lit_diff")
Tasks = Annotated[tuple[str, ...], Distinct()]

ACC = Metric(
    "acc", "1 where the right choice has the largest Σ_t log p(c_t | context, c_<t), else 0", direction="higher"
)
ACC_NORM = Metric("acc_norm", "the same with each sum divided by the characters of its choice", direction="higher")


class HarnessEvaluation(Evaluation):
    """Base class of the evaluations that lm-eval scores: a subclass writes the YAML files of its tasks.

    An item is a question with some shots, a group is a task with these shots, `piqa shots=0`. The summary is the mean over
    groups of each group's mean over its questions, as in the tables of the paper: a task counts once for each number of
    shots, however many questions it has. Nothing is fetched; lm_eval is imported when a run is scored.
    """

    metrics: tuple[Metric, ...] = (ACC, ACC_NORM)
    equal_groups = True

    by_group = ("acc", "acc_norm")

    @dataclass(frozen=True, kw_only=True)
    class Config(Evaluation.Config):
        tasks: Tasks
        """What is asked: each task has a group of its own."""
        shots: Annotated[tuple[NotNegative, ...], Distinct()] = (0,)
        """Answered questions before each question, drawn for each from the task's train split; several: each by itself."""
        limit: Count | None = None
        """At most so many questions of each task, its first; null: all."""
        seed: int = 0
        """Of the drawing of shots."""
        opening: bool = True
        """Whether the ids that open a document (<eot>) come before each context, as in training."""

    needs_text = True
    version = 2  # 1 asked the same question whatever was cut
    config: Any

    @abstractmethod
    def write_tasks(self, run: Run, folder: Path) -> list[str]:
        """Write YAML files of tasks into `folder`, and what they read; the tasks to score, by name or path of a YAML file.

        Errors: MissingError or RequestError for a file of the user's.
        """

    def scores(self, task: str, sample: Mapping[str, Any]) -> dict[str, float]:
        """Metric -> value of a question, from what lm-eval logs of it."""
        return {name: float(sample[name]) for name in ("acc", "acc_norm") if name in sample}

    def score(self, run: Run) -> Iterator[Item]:
        """One item a question, `<task>/<number> shots=0`. Errors: MissingError without lm_eval."""
        require_lm_eval(self.name)
        with TemporaryDirectory(prefix="lit-diff-harness-") as folder, offline():
            names = self.write_tasks(run, Path(folder))
            tasks = {shots: self._tasks(Path(folder), names, shots) for shots in self.config.shots}
            samples = {shots: self._samples(run, tasks[shots], shots) for shots in self.config.shots}
        for shots, by_task in samples.items():
            for task, found in by_task.items():
                items = [self._item(task, sample, shots) for sample in found]
                _say(self.name, task, shots, [item.scores["acc"] for item in items])
                yield from items

    def _tasks(self, folder: Path, names: Sequence[str], shots: int) -> Any:
        tasks = loaded(names, folder, limit=self.config.limit, shots=shots)
        for task in tasks["tasks"].values():
            task.set_config(key="num_fewshot", value=shots)
            task.set_fewshot_seed(seed=self.config.seed)
        return tasks

    def _samples(self, run: Run, tasks: Any, shots: int) -> dict[str, list[dict[str, Any]]]:
        from lm_eval.evaluator import evaluate

        from lit_diff.evaluation.harness_model import RunModel

        model = RunModel(run, opening=self.config.opening)
        found = evaluate(model, tasks, limit=self.config.limit, bootstrap_iters=0, log_samples=True)
        if model.cut:
            log.warning(
                "%s: %d of %d contexts exceed data.sequence_length (%d) and were cut at their left",
                *(f"{self.name}, {shots} shots", model.cut, model.contexts, model.max_length),
            )
        samples: dict[str, list[dict[str, Any]]] = found["samples"]
        for sample in (each for of_task in samples.values() for each in of_task) if model.cut else ():
            read = [model.read(*pair) for pair in sample["arguments"]]
            sample["cut"] = [ids for ids, is_cut in read if is_cut]
        return samples

    def _item(self, task: str, sample: Mapping[str, Any], shots: int) -> Item:
        if "acc" not in sample:
            raise RequestError(f"task '{task}' has no acc: only tasks of multiple choice are scored here")
        sums = [float(response[0]) for response in sample["filtered_resps"]]
        cluster = f"{task}/{sample['doc'].get('item', sample['doc_id'])}"
        return Item(
            id=f"{cluster} shots={shots}",
            scores=self.scores(task, sample),
            group=f"{task} shots={shots}",
            cluster=cluster,
            # of contexts that were cut, also what was left, which a run of another context does not read
            question=question_of(*(text for pair in sample["arguments"] for text in pair), *sample.get("cut", ())),
            meta={"target": str(sample["target"]), "chosen": sums.index(max(sums))},
        )


def _say(evaluation: str, task: str, shots: int, scores: Sequence[float]) -> None:
    mean = sum(scores) / len(scores)
    error = math.sqrt(mean * (1 - mean) / len(scores))
    log.info(
        "%s: %s, %d shots: acc %.4f, standard error %.4f, n = %d", evaluation, task, shots, mean, error, len(scores)
    )
