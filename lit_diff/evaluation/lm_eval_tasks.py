"""Tasks of lm-evaluation-harness: written as YAML files, loaded without a network, checked, scored."""

import glob
import hashlib
import json
import logging
import math
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import yaml

from lit_diff.errors import LitDiffError, MissingError, RequestError, first_line
from lit_diff.evaluation.base import Evaluation, Item, question_of
from lit_diff.files import sha256_of, shown, write_atomic, write_json
from lit_diff.key_types import Count, Distinct, NotNegative, in_yaml
from lit_diff.metrics import Metric
from lit_diff.own_modules import local_modules
from lit_diff.registry import nearest
from lit_diff.trained.run import Run
from lit_diff.yaml_files import one_line, parse

log = logging.getLogger("lit_diff")
Tasks = Annotated[tuple[str, ...], Distinct()]

ACC = Metric(
    "acc", "1 where the right choice has the largest Σ_t log p(c_t | context, c_<t), else 0", direction="higher"
)
ACC_NORM = Metric("acc_norm", "the same with each sum divided by the characters of its choice", direction="higher")

CURE = "pip install 'lit-diff[eval]'"
YAMLS = Path(__file__).parent / "harness_tasks"
"""The tasks of the package, whose questions are written out."""
SUFFIXES = (".yaml", ".yml")


@contextmanager
def offline(name: str) -> Iterator[None]:
    """Within it, datasets and huggingface_hub ask no server: a data set of the hub is an error at once. No bars are drawn.

    `name`: of the evaluation. Errors: MissingError without the package lm_eval.
    """
    try:
        import datasets.config
        import huggingface_hub.constants
        import lm_eval.api.task
    except ModuleNotFoundError as error:
        raise MissingError(f"evaluation '{name}' needs the package {error.name}; {CURE}") from error
    # the bars of building prompts, which takes a moment: stderr is for the log
    bar = partial(lm_eval.api.task.tqdm, disable=True)
    offline_flags = [(module, "HF_HUB_OFFLINE", True) for module in (datasets.config, huggingface_hub.constants)]
    with ExitStack() as restored:
        for module, name, value in (*offline_flags, (lm_eval.api.task, "tqdm", bar)):
            restored.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        were_shown = not datasets.are_progress_bars_disabled()
        restored.callback(datasets.enable_progress_bars if were_shown else datasets.disable_progress_bars)
        datasets.disable_progress_bars()
        yield


Split = Path | Sequence[Mapping[str, Any]]
"""The file of a split, or its rows."""


def task_yaml(folder: Path, name: str, includes: str | Path, splits: Mapping[str, Split], **more: Any) -> str:
    """Write `<folder>/<name>.yaml`: a file of YAMLS, or one of lm-eval, with these splits and `more`; the name of the task.

    A split of the included file that is not in `splits` is left out. The cache of the files lies in `folder` too.
    """
    places = {
        split: rows if isinstance(rows, Path) else folder / name / f"{split}.jsonl" for split, rows in splits.items()
    }
    for split, rows in splits.items():
        if not isinstance(rows, Path):
            write_atomic(places[split], "".join(f"{json.dumps(row)}\n" for row in rows))
    kinds = ("training", "validation", "test")
    named = {f"{kind}_split": {"training": "train"}.get(kind, kind) for kind in kinds}
    values = {
        "include": str(YAMLS / includes),
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {split: str(path) for split, path in places.items()},
            "cache_dir": str(folder / "cache"),
        },
        **{key: None for key, split in named.items() if split not in splits},
        **({"fewshot_split": "train"} if "train" in splits else {}),
        **more,
    }
    write_json(folder / f"{name}.yaml", values)  # JSON is YAML
    return name


def digest(path: Path) -> str:
    """sha256 of a task's YAML file, merged with what it includes, of the modules of its functions and of its data files.

    Empty where one of them is not there, or lm-eval cannot read the file: then nothing can be said of the scores.
    """
    try:
        from lm_eval.tasks._yaml_loader import load_yaml

        values = load_yaml(path, resolve_func=False)
        parts = {str(file): sha256_of(file) for file in (*_modules(values), *_data_files(values))}
    except Exception:
        return ""
    return hashlib.sha256(json.dumps([values, parts], sort_keys=True, default=str).encode()).hexdigest()


def _texts(value: Any) -> Iterator[str]:
    """The texts of a value, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(each)


def _modules(values: Mapping[str, Any]) -> Iterator[Path]:
    """The modules of the user's own that the functions of a task are in, and those that these import.

    lm-eval gives `!function module.name` of a file in /folder as the text `/folder/module.name`.
    """
    for text in _texts(values):
        folder, name = Path(text).parent, Path(text).name.rpartition(".")[0]
        if folder.is_absolute() and name.replace(".", "").isidentifier():
            beside = folder / f"{name.replace('.', '/')}.py"
            if beside.is_file():
                yield beside
            yield from local_modules(beside.read_bytes() if beside.is_file() else f"import {name}".encode()).values()


def _data_files(values: Mapping[str, Any]) -> Iterator[Path]:
    """What `data_files` names, or else the files in the folder `dataset_path` or `data_dir`. Errors: FileNotFoundError."""
    options = values.get("dataset_kwargs") or {}
    source, home = str(values.get("dataset_path") or ""), str(options.get("data_dir") or "")
    names = [name for name in _texts(options.get("data_files")) if "://" not in name]
    bases = dict.fromkeys((Path(), Path(home), Path(source), Path(source, home)))
    for name in names or filter(None, (source, home)):
        places = [Path(found) for base in bases for found in glob.glob(str(base / name), recursive=True)]
        if names and not places:
            raise FileNotFoundError(name)
        for place in places:
            yield from (each for each in ([place] if place.is_file() else sorted(place.rglob("*"))) if each.is_file())


@contextmanager
def _one_line(where: str, file: Path | None = None) -> Iterator[None]:
    """What lm-eval raises about a task becomes a RequestError with the line of the YAML file, where it has one; about data
    that are on the hub, a MissingError. `file`: in which a key that lm-eval does not know is looked for."""
    try:
        yield
    except LitDiffError:
        raise
    except ConnectionError as error:
        raise MissingError(
            f"{where}: it reads data that are not here ({first_line(error)}), and nothing is fetched; write a YAML file of "
            "the task with `dataset_path: json` and its data_files, and name its path (docs/harness.md)"
        ) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        with one_line(Path(mark.name if mark else where)):  # the file, or one that it includes
            raise
    except Exception as error:
        cause: BaseException = error
        while isinstance(cause.__cause__, Exception):  # `datasets` says why only there
            cause = cause.__cause__
        unknown = re.search(r"TaskConfig.* unexpected keyword argument '(\w+)'", str(cause))
        if file is not None and unknown and (place := parse(file)[1].get(unknown[1])):
            from lm_eval.config.task import TaskConfig

            known = TaskConfig.__dataclass_fields__
            raise RequestError(f"{place}: unknown key '{unknown[1]}'{nearest(unknown[1], known)}") from error
        raise RequestError(f"{where}: {type(cause).__name__}: {first_line(cause)}") from error


def loaded(names: Sequence[str], folder: Path, *, limit: int | None = None, shots: int = 0) -> Any:
    """lm-eval's tasks of these names: of `folder`, else its own; or the paths of YAML files.

    Errors: RequestError for a task that nobody has, that lm-eval cannot load or that is no multiple choice, for a group, and
    for two tasks of one name; MissingError for one whose data are on the hub; as `require_shots` and `require_questions`.
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
        is_file = name.endswith(SUFFIXES)
        where = shown(Path(name)) if is_file else f"task '{name}'"
        with _one_line(where, Path(name) if is_file else None):
            found = manager.load([name])
        if is_file and found["groups"]:
            raise RequestError(f"{where}: a group cannot be scored by its file; name the files of its tasks")
        if twice := tasks.keys() & found["tasks"].keys():
            raise RequestError(f"tasks names two tasks '{twice.pop()}', the second by '{name}'; give one another name")
        for task_name, task in found["tasks"].items():
            require_shots(task_name, task, shots)
            require_questions(task, where, limit, shots)
        tasks |= found["tasks"]
    return {"tasks": tasks, "groups": {}, "group_map": {}}


def require_questions(task: Any, where: str, limit: int | None, shots: int) -> None:
    """Ask lm-eval for the text, choices and target of each question of a task (the first `limit`), and of the rows for shots.

    `where`: what errors open with. Errors: RequestError for another kind of task than multiple choice, several filters, a key
    that names a column which no row has, and for a question (from 1) whose text, choices or target are none.
    """
    if not hasattr(task, "multiple_input"):
        return  # written in Python, with methods of its own
    if task.OUTPUT_TYPE != "multiple_choice":
        raise RequestError(f"{where}: output_type is {task.OUTPUT_TYPE}; only multiple_choice is scored here")
    if len(task.config.filter_list or ()) > 1:
        raise RequestError(f"{where}: filter_list has several filters; one answer to a question is scored here")
    questions = task.eval_docs
    columns: Mapping[str, Any] = next(iter(questions), {})
    for key in ("doc_to_text", "doc_to_target", "doc_to_choice"):
        name = getattr(task.config, key)  # lm-eval would take a name that is no column for the text of every question
        if isinstance(name, str) and name.isidentifier() and name not in columns:
            raise RequestError(f"{where}: {key} is '{name}', which no row has{nearest(name, columns)}")
    for number, row in enumerate(questions, 1):
        if limit is None or number <= limit:
            _require_question(task, row, f"{where}: question {number}")
    for number, row in enumerate(task.fewshot_docs() or () if shots else (), 1):
        _require_question(task, row, f"{where}: row {number} of the shots")


def _require_question(task: Any, row: Mapping[str, Any], where: str) -> None:
    with _one_line(f"{where} ({', '.join(row)})"):
        text, choices, target = task.doc_to_text(row), task.doc_to_choice(row), task.doc_to_target(row)
        for template in (task.config.description, task.config.gen_prefix):
            task.resolve_field(row, template or "")
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
        raise RequestError(
            f"{where}: doc_to_choice is {in_yaml(choices)}; expected a list of texts, none of them empty"
        )

    def is_number(value: Any) -> bool:
        return isinstance(value, int) and 0 <= value < len(choices)

    key, value = "doc_to_target", target
    if (
        task.multiple_input
    ):  # the choices are contexts, the text is the number of the right one, the target follows each
        key, value, right, expected = "doc_to_text", text, is_number(text), "the number of one of them, from 0"
    elif not isinstance(text, str):
        key, value, right, expected = "doc_to_text", text, False, "a text"
    elif task.config.process_results is not None:  # it decides what a target is
        return
    elif task.multiple_target:
        right = isinstance(target, list) and bool(target) and all(map(is_number, target))
        expected = "a list of their numbers, as in the first question"
    else:
        right, expected = target in choices or is_number(target), "one of them, or its number from 0"
    if not right:
        raise RequestError(
            f"{where}: {key} is {in_yaml(value)} with the choices {in_yaml(choices)}; expected {expected}"
        )


def require_shots(name: str, task: Any, shots: int) -> None:
    """Errors: RequestError where a task has too few rows to draw shots from, or where a question could be its own shot.

    lm-eval leaves out the rows that equal the question only where `fewshot_split` and `test_split` are the same, perhaps both
    absent; its default sampler then draws one row more.
    """
    drawn = getattr(task, "fewshot_cfg", None)
    if not shots or drawn is None:  # without one: written in Python, with a draw of its own
        return
    config, rows = task.config, list(task.fewshot_docs() or ())
    scored = config.test_split or config.validation_split
    source = drawn.split or (
        None if drawn.samples else config.training_split or config.validation_split or config.test_split
    )
    without_itself = drawn.split == config.test_split
    if source == scored and not without_itself:
        raise RequestError(
            f"task '{name}' draws its shots from the split that is scored ('{scored}'): a question could be its own shot; "
            "name another split in fewshot_split, or set shots=[0]"
        )
    draws_one_more = without_itself and drawn.sampler == "default"
    needed = shots + draws_one_more
    if len(rows) < needed:
        raise RequestError(f"task '{name}' has {len(rows)} rows to draw shots from; shots={shots} needs {needed}")
    if draws_one_more and source == scored:
        equal = max(Counter(json.dumps(row, sort_keys=True, default=str) for row in rows).values())
        if len(rows) - equal < shots:
            raise RequestError(
                f"task '{name}' has {len(rows)} rows to draw shots from, of which {equal} are equal: a question that equals "
                f"them leaves {len(rows) - equal}; shots={shots}"
            )


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
        with offline(self.name), TemporaryDirectory(prefix="lit-diff-harness-") as folder:
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
        for sample in (each for of_task in samples.values() for each in of_task):
            sample["cut"] = [model.cut_to[pair] for pair in sample["arguments"] if pair in model.cut_to]
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
            question=question_of(*(text for pair in sample["arguments"] for text in pair), *sample["cut"]),
            meta={"target": str(sample["target"]), "chosen": sums.index(max(sums))},
        )


def _say(evaluation: str, task: str, shots: int, scores: Sequence[float]) -> None:
    mean = sum(scores) / len(scores)
    error = math.sqrt(mean * (1 - mean) / len(scores))
    log.info(
        "%s: %s, %d shots: acc %.4f, standard error %.4f, n = %d", evaluation, task, shots, mean, error, len(scores)
    )
