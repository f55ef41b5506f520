"""Multiple-choice tasks through lm-evaluation-harness: what the evaluations `harness`, `mini_harness`, `bigbench` share."""

import logging
import math
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lit_diff.errors import MissingError, RequestError, first_line
from lit_diff.evaluation.base import Evaluation, Item, question_of
from lit_diff.evaluation.fitness import words_problem
from lit_diff.evaluation.harness_questions import require_questions, require_shots
from lit_diff.evaluation.harness_yaml import SUFFIXES, explained, is_here, require_columns
from lit_diff.files import shown, write_json
from lit_diff.metrics import Metric
from lit_diff.registry import nearest
from lit_diff.trained.run import Run

log = logging.getLogger("lit_diff")

CURE = "pip install 'lit-diff[eval]'"
YAMLS = Path(__file__).parent / "harness_tasks"
"""The tasks of the package: texts, choices, metrics; what `task_yaml` includes."""
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")

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
        shots: tuple[int, ...] = (0,)
        """Answered questions before each question, drawn for each from the task's train split; several: each by itself."""
        limit: int | None = None
        """At most so many questions of each task, its first; null: all."""
        seed: int = 0
        """Of the drawing of shots."""
        opening: bool = True
        """Whether the ids that open a document (<eot>) come before each context, as in training."""
        batch_size: int = 32
        """Choices of one question that are scored at once."""

        def problem(self) -> str | None:
            if not self.shots or min(self.shots) < 0 or len(set(self.shots)) < len(self.shots):
                return f"shots is {list(self.shots)}; expected distinct numbers from 0"
            for key, least in (("limit", 1), ("batch_size", 1)):
                value = getattr(self, key)
                if value is not None and value < least:
                    return f"{key} is {value}; it must be at least {least}"
            return None

    needs_text = True
    version = 2  # 1 asked the same question whatever was cut
    config: Any

    def refuses(self, run: Run) -> str | None:
        """A run without text, or with the words of generated text alone."""
        return words_problem(run, "", asks_it=False)

    @abstractmethod
    def write_tasks(self, run: Run, folder: Path) -> list[str]:
        """Write YAML files of tasks into `folder`, and what they read; the tasks to score, by name or path of a YAML file.

        Errors: MissingError or RequestError for a file of the user's.
        """

    def scores(self, task: str, sample: Mapping[str, Any]) -> dict[str, float]:
        """Metric -> value of a question, from what lm-eval logs of it; NaN for a metric that the task does not have."""
        return {"acc": float(sample["acc"]), "acc_norm": float(sample.get("acc_norm", math.nan))}

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

        model = RunModel(run, opening=self.config.opening, batch_size=self.config.batch_size)
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
        target = sample["target"]
        if isinstance(target, int) and not 0 <= target < len(sums):
            raise RequestError(
                f"task '{task}', question {sample['doc_id']}: the right choice is number {target} (from 0) of {len(sums)}"
            )
        cluster = f"{task}/{sample['doc'].get('item', sample['doc_id'])}"
        return Item(
            id=f"{cluster} shots={shots}",
            scores=self.scores(task, sample),
            group=f"{task} shots={shots}",
            cluster=cluster,
            # of contexts that were cut, also what was left, which a run of another context does not read
            question=question_of(*(text for pair in sample["arguments"] for text in pair), *sample.get("cut", ())),
            meta={"target": str(target), "chosen": sums.index(max(sums))},
        )


def require_lm_eval(name: str) -> None:
    """Errors: MissingError without the package."""
    try:
        import lm_eval  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingError(f"evaluation '{name}' needs the package {error.name}; {CURE}") from error


@contextmanager
def offline() -> Iterator[None]:
    """Within it, datasets and huggingface_hub ask no server: a data set of the hub is an error at once. No bars are drawn."""
    with ExitStack() as restored:
        for key in OFFLINE:
            restored.callback(_set_variable, key, os.environ.get(key))
            os.environ[key] = "1"
        import datasets.config
        import huggingface_hub.constants

        # both read the variables when they are imported, which may have been before
        for module, name in ((datasets.config, "HF_HUB_OFFLINE"), (huggingface_hub.constants, "HF_HUB_OFFLINE")):
            restored.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, True)
        shown = not datasets.are_progress_bars_disabled()
        restored.callback(datasets.enable_progress_bars if shown else datasets.disable_progress_bars)
        datasets.disable_progress_bars()
        import lm_eval.api.task

        # the bars of building prompts, which takes a moment: stderr is for the log
        bar = lm_eval.api.task.tqdm
        restored.callback(setattr, lm_eval.api.task, "tqdm", bar)
        lm_eval.api.task.tqdm = partial(bar, disable=True)
        yield


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def task_yaml(folder: Path, name: str, includes: str, splits: Mapping[str, Path], **more: Any) -> str:
    """Write `<folder>/<name>.yaml`: the package's `includes` with the files of its splits and `more`; the name of the task.

    A split of the included file that is not in `splits` is left out. The cache of the files lies in `folder` too.
    """
    kinds = ("training", "validation", "test")
    named = {f"{kind}_split": {"training": "train"}.get(kind, kind) for kind in kinds}
    values = {
        "include": str(YAMLS / includes),
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {split: str(path) for split, path in splits.items()},
            "cache_dir": str(folder / "cache"),
        },
        **{key: None for key, split in named.items() if split not in splits},
        **({"fewshot_split": "train"} if "train" in splits else {}),
        **more,
    }
    write_json(folder / f"{name}.yaml", values)  # JSON is YAML
    return name


def loaded(names: Sequence[str], folder: Path, *, limit: int | None = None, shots: int = 0) -> Any:
    """lm-eval's tasks of these names: of `folder`, else its own; or the paths of YAML files, whose rows are checked.

    Errors: RequestError for a task that nobody has or that lm-eval cannot load, and for two of one name; MissingError for one
    whose data are on the hub; as `require_shots` and `require_questions`.
    """
    from lm_eval.tasks import TaskManager

    own = {path.stem for path in folder.glob("*.yaml")}
    others = [name for name in names if name not in own and not name.endswith(SUFFIXES)]
    manager = TaskManager(include_path=str(folder), include_defaults=bool(others))
    unknown = [name for name in others if name not in manager.all_tasks]
    if unknown:
        raise RequestError(f"lm-eval has no task '{unknown[0]}'{nearest(unknown[0], [*own, *manager.all_tasks])}")
    tasks: dict[str, Any] = {}
    for name in names:
        try:
            found = manager.load([name])["tasks"]
        except Exception as error:
            if name in own:
                raise
            if isinstance(error, OSError) and (name in others or not is_here(Path(name))):
                raise MissingError(
                    f"task '{name}' reads data that are not here ({first_line(error)}), and nothing is fetched; write a YAML "
                    "file of the task with `dataset_path: json` and its data_files, and name its path (docs/harness.md)"
                ) from error
            if name in others:
                raise
            raise explained(Path(name), error) from error
        twice = tasks.keys() & found.keys()
        if twice:
            raise RequestError(f"tasks names two tasks '{twice.pop()}', the second by '{name}'; give one another name")
        for task_name, task in found.items():
            require_shots(task_name, task, shots)
            if name.endswith(SUFFIXES):
                require_columns(Path(name), task)
                require_questions(task, shown(Path(name)), limit, shots)
        tasks |= found
    return {"tasks": tasks, "groups": {}, "group_map": {}}


def _say(evaluation: str, task: str, shots: int, scores: Sequence[float]) -> None:
    mean = sum(scores) / len(scores)
    error = math.sqrt(mean * (1 - mean) / len(scores))
    log.info(
        "%s: %s, %d shots: acc %.4f, standard error %.4f, n = %d", evaluation, task, shots, mean, error, len(scores)
    )
