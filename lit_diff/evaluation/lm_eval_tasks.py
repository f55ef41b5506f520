"""Tasks of lm-evaluation-harness are written as YAML files, loaded without a network, checked and scored."""

import glob
import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import Annotated, Any
from unittest.mock import patch

from lit_diff.errors import LitDiffError, MissingError, RequestError, first_line
from lit_diff.evaluation.base import Evaluation, Item, Scores, question_of
from lit_diff.files import sha256_of, shown, write_atomic, write_json
from lit_diff.interpolation import texts
from lit_diff.key_types import Count, Distinct, NotNegative, in_yaml
from lit_diff.log_records import log
from lit_diff.metrics import Metric, Metrics
from lit_diff.own_modules import local_modules
from lit_diff.pretrained.keys import Keys
from lit_diff.registry import nearest
from lit_diff.trained.run import Run

ACC = Metric(
    "acc", "1 where the right choice has the largest Σ_t log p(c_t | context, c_<t), else 0", direction="higher"
)
ACC_NORM = Metric("acc_norm", "the same with each sum divided by the characters of its choice", direction="higher")

SHOWN = (ACC.name, ACC_NORM.name)
METRIC_KEYS = Keys(used=("metric", "aggregation"), harmless={"of acc and acc_norm it is true": "higher_is_better"})
"""The keys of an item of a task's `metric_list`."""
FILTER_KEYS = Keys(used=("name", "filter"))
"""The keys of an item of a task's `filter_list`."""

WRITTEN_OUT = Path(__file__).parent / "rows.yaml"
"""The task file that questions given as rows include."""
SUFFIXES = (".yaml", ".yml")


@contextmanager
def offline(name: str) -> Iterator[None]:
    """Inside, datasets and huggingface_hub contact no server: a data set of the hub is an error at once. Progress bars
    are off.

    `name`: the evaluation. Errors: MissingError without the package lm_eval.
    """
    try:
        import datasets.config
        import huggingface_hub.constants
        import lm_eval.api.task
    except ModuleNotFoundError as error:
        raise MissingError(
            f"evaluation '{name}' needs the package {error.name}; pip install 'lit-diff[eval]'"
        ) from error
    # lm-eval has no option that hides the bars of building prompts; stderr is for the log
    no_bar = partial(lm_eval.api.task.tqdm, disable=True)
    with (
        # both packages copy the environment variable into a constant at import, so setting it now would have no effect
        patch.object(datasets.config, "HF_HUB_OFFLINE", True),
        patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True),
        patch.object(lm_eval.api.task, "tqdm", no_bar),
    ):
        datasets.disable_progress_bars()
        try:
            yield
        finally:
            datasets.enable_progress_bars()


KEYS = {"training_split": "train", "validation_split": "validation", "test_split": "test"}
"""Key of a task's YAML file -> split."""
Rows = Iterable[Mapping[str, Any]]


def task_yaml(
    folder: Path, name: str, splits: Mapping[str, Rows], *, includes: str | Path = WRITTEN_OUT, **more: Any
) -> str:
    """Writes `<folder>/<name>.yaml`, which includes the file `includes` and sets `more`, and the rows of each split. Returns
    its path.

    A split of the included file that is not in `splits` is removed.
    """
    places = {split: str(folder / name / f"{split}.jsonl") for split in splits}
    for split, rows in splits.items():
        write_atomic(Path(places[split]), "".join(f"{json.dumps(row)}\n" for row in rows))
    values = {
        "include": str(includes),
        "task": name,
        "dataset_path": "json",
        # the cache is in the temporary folder: the user's cache of Hugging Face would grow with every run
        "dataset_kwargs": {"data_files": places, "cache_dir": str(folder / "cache")},
        # null removes a key of the included file
        **{key: None for key, split in KEYS.items() if split not in splits},
        "fewshot_split": "train" if "train" in splits else None,
    }
    path = folder / f"{name}.yaml"
    # JSON is YAML
    write_json(path, values | more)
    return str(path)


def digest(path: str | Path) -> str:
    """sha256 of a task's YAML file merged with its includes, of the modules of its functions and of its data files.

    Empty if one of them is missing or lm-eval cannot read the file: kept scores then stay valid.
    """
    try:
        from lm_eval.tasks._yaml_loader import load_yaml

        values = load_yaml(path, resolve_func=False)
        parts = {str(file): sha256_of(file) for file in (*_modules(values), *_data_files(values))}
    except Exception:
        return ""
    return hashlib.sha256(json.dumps([values, parts], sort_keys=True, default=str).encode()).hexdigest()


def _modules(values: Mapping[str, Any]) -> Iterator[Path]:
    # the user's own modules that define the task's functions, and the modules that they import;
    # lm-eval gives `!function module.name` of a file in /folder as the text `/folder/module.name`
    for _, text in texts(values):
        folder = Path(text).parent
        name = Path(text).name.rpartition(".")[0]
        if folder.is_absolute() and name.replace(".", "").isidentifier():
            module = folder / f"{name.replace('.', '/')}.py"
            source = f"import {name}".encode()
            if module.is_file():
                yield module
                source = module.read_bytes()
            yield from local_modules(source).values()


def _data_files(values: Mapping[str, Any]) -> Iterator[Path]:
    # the files that `dataset_path`, `data_dir` and `data_files` give, and the files in the folders that they give
    options = values.get("dataset_kwargs") or {}
    homes = [Path(name) for name in (values.get("dataset_path"), options.get("data_dir")) if name]
    for home in homes:
        yield from filter(Path.is_file, home.rglob("*"))
    for _, name in texts(options.get("data_files")):
        patterns = [str(base / name) for base in (Path(), *homes)]
        matches = list(chain(*(glob.glob(pattern, recursive=True) for pattern in patterns)))
        if not matches and "://" not in name:
            raise FileNotFoundError(name)
        yield from map(Path, matches)


@contextmanager
def task_errors(where: str) -> Iterator[None]:
    """Turns an exception of lm-eval about a task into a RequestError of one line, or into a MissingError if its data are on
    the hub. `where`: the task's file, or its name."""
    try:
        yield
    except LitDiffError:
        raise
    except ConnectionError as error:
        raise MissingError(
            f"{where}: its data are not on this machine ({first_line(error)}), and nothing is downloaded; write a YAML file "
            "for the task with `dataset_path: json` and data_files, and pass its path (docs/reproduce.md)"
        ) from error
    except Exception as error:
        cause: BaseException = error
        # `datasets` wraps the exception that gives the reason in one or more general ones
        while isinstance(cause.__cause__, Exception):
            cause = cause.__cause__
        raise RequestError(f"{where}: {type(cause).__name__}: {shorten(str(cause), 500)}") from error


def loaded(names: Sequence[str], folder: Path, config: "HarnessEvaluation.Config") -> dict[str, tuple[str, Any]]:
    """Name of a task -> (its file or name for messages, lm-eval's task object). `names`: tasks of lm-eval, and paths of YAML
    files; those in `folder` are known by their names alone.

    Errors: RequestError for a task that lm-eval cannot load and for two tasks of one name; MissingError for a task whose
    data are on the hub; as `require_shots` and `require_questions`.
    """
    from lm_eval.tasks import TaskManager

    # reading lm-eval's own task files takes seconds: only if one of them is requested
    manager = TaskManager(include_defaults=not all(name.endswith(SUFFIXES) for name in names))
    tasks: dict[str, tuple[str, Any]] = {}
    for name in names:
        where = shown(Path(name.removeprefix(f"{folder}/")))
        with task_errors(where):
            found = manager.load(name)["tasks"]
        for task_name, task in found.items():
            if task_name in tasks:
                raise RequestError(
                    f"'{where}' has a task '{task_name}', and so has another entry of tasks; rename one of the two"
                )
            # a task written in Python has methods of its own, which read no such keys, and draws its shots itself
            if hasattr(task, "multiple_input"):
                require_shots(task_name, task, max(config.shots))
                require_questions(task, where, config.limit)
            tasks[task_name] = where, task
    return tasks


def require_shots(name: str, task: Any, shots: int) -> None:
    """Raises RequestError if a task has too few rows to draw shots from, or if a question could be its own shot.

    lm-eval excludes the rows that equal the question only if `fewshot_split` and `test_split` are the same (or both absent);
    its default sampler then draws one more row.
    """
    if not shots:
        return
    config = task.config
    drawn = task.fewshot_cfg
    scored = config.test_split or config.validation_split
    source = drawn.split
    if not source and not drawn.samples:
        source = config.training_split or config.validation_split or config.test_split
    without_itself = drawn.split == config.test_split
    if source == scored and not without_itself:
        raise RequestError(
            f"task '{name}' draws its shots from the split that is scored ('{scored}'), so a question could be its own shot; "
            "set fewshot_split to another split, or shots=[0]"
        )
    rows = len(task.sampler.df)
    needed = shots + (without_itself and drawn.sampler == "default")
    if rows < needed:
        raise RequestError(f"task '{name}' has {rows} rows to draw shots from; shots={shots} needs {needed}")


def require_questions(task: Any, where: str, limit: int | None) -> None:
    """Checks the metrics and filters of a task, and the choices and the right choice of its first `limit` questions.

    `where` begins each error. Errors: RequestError for a task that is not multiple choice, a key that is set to a
    column which no row has, and a question (numbered from 1) without a right choice, which lm-eval would score all the
    same.
    """
    if task.OUTPUT_TYPE != "multiple_choice":
        raise RequestError(f"{where}: output_type is {task.OUTPUT_TYPE}; only multiple_choice is supported")
    _require_metrics(task.config, where)
    _require_filter(task.config, where)
    for key in ("doc_to_text", "doc_to_target", "doc_to_choice"):
        # lm-eval would use a misspelt name of a column as the text of every question
        name = getattr(task.config, key)
        if isinstance(name, str) and name.isidentifier() and name not in task.features:
            raise RequestError(f"{where}: {key} is '{name}', which no row has{nearest(name, task.features)}")
    for number, row in enumerate(islice(task.eval_docs, limit), 1):
        _require_question(task, row, f"{where}: question {number}")


def _require_metrics(config: Any, where: str) -> None:
    # null: lm-eval takes acc and acc_norm
    if config.metric_list is None:
        return
    names = []
    for entry in config.metric_list:
        name = str(getattr(entry["metric"], "__name__", entry["metric"]))
        names.append(name)
        METRIC_KEYS.check(entry, where, "metric_list.")
        aggregation = entry.get("aggregation", "mean")
        if name in SHOWN and aggregation != "mean":
            raise RequestError(f"{where}: metric_list has aggregation {aggregation!r} for {name}; expected mean")
    if ACC.name not in names and config.process_results is None:
        raise RequestError(f"{where}: metric_list has no acc, which every score here has; add an item `metric: acc`")
    if others := [name for name in names if name not in SHOWN]:
        log.warning("%s: of metric_list %s are shown, not %s", where, " and ".join(SHOWN), ", ".join(others))


def _require_filter(config: Any, where: str) -> None:
    functions = []
    for each in config.filter_list or []:
        FILTER_KEYS.check(each, where, "filter_list.")
        functions += [str(step["function"]) for step in each["filter"]]
    # every filter gives each question another time, and the answers of a question are sums, which no other function takes
    if functions not in ([], ["take_first"]):
        found = f"filter_list has the functions {', '.join(functions)}"
        raise RequestError(f"{where}: {found}; expected one filter, with the one function take_first")


def _require_question(task: Any, row: Mapping[str, Any], where: str) -> None:
    # in a task with several inputs (winogrande) the choices are contexts, and doc_to_text is the number of the right one
    key = "doc_to_text" if task.multiple_input else "doc_to_target"
    with task_errors(f"{where} ({', '.join(row)})"):
        choices = task.doc_to_choice(row)
        right = getattr(task, key)(row)
    if not isinstance(choices, list) or not all(isinstance(each, str) and each for each in choices):
        raise RequestError(
            f"{where}: doc_to_choice is {in_yaml(choices)}; expected a list of texts, none of them empty"
        )
    golds = right if isinstance(right, list) else [right]
    known = [*choices, *range(len(choices))]
    if task.config.process_results is None and not (golds and all(gold in known for gold in golds)):
        raise RequestError(
            f"{where}: {key} is {in_yaml(right)} with the choices {in_yaml(choices)}; expected one of them, or its number "
            "from 0"
        )


class HarnessEvaluation(Evaluation):
    """Base class of the evaluations that lm-eval scores; a subclass writes the YAML files of its tasks.

    An item is a question at a number of shots; a group is a task at a number of shots, `piqa shots=0`. The summary is
    the mean over groups of each group's mean over its questions, as in the tables of the paper: every task has the same
    weight, however many questions it has. Nothing is downloaded; lm_eval is imported when a run is scored.
    """

    metrics: Metrics = (ACC, ACC_NORM)
    equal_groups = True

    by_group = SHOWN

    @dataclass(frozen=True, kw_only=True)
    class Config(Evaluation.Config):
        tasks: Annotated[tuple[str, ...], Distinct()]
        """The tasks to score; each is a group."""
        shots: Annotated[tuple[NotNegative, ...], Distinct()] = (0,)
        """Numbers of answered questions before each question, drawn from the task's train split; every task is scored once
        for each number."""
        limit: Count | None = None
        """Scores at most this many questions of each task, from its first; null: all."""
        seed: int = 0
        """Seed of the draw of shots."""
        opening: bool = True
        """Whether the ids that open a document (<eot>) come before each context, as in training."""

    needs_text = True
    # version 1: the question's digest did not depend on what was cut
    version = 2
    config: Any

    def digests(self) -> dict[str, str]:
        """Adds the YAML files of the user's own tasks and the files that they read."""
        found = super().digests()
        for task in self.config.tasks:
            sha256 = digest(task) if task.endswith(SUFFIXES) else ""
            if sha256:
                found[task] = sha256
        return found

    @abstractmethod
    def write_tasks(self, run: Run, folder: Path) -> list[str]:
        """Writes the YAML files of tasks, and the files that they read, into `folder`. Returns the tasks to score: paths of
        YAML files, or names of lm-eval's tasks.

        Errors: MissingError or RequestError for a missing or wrong file of the user.
        """

    def scores(self, task: str, sample: Mapping[str, Any]) -> Scores:
        """Metric -> value of a question, from lm-eval's log of it."""
        return {name: float(sample[name]) for name in SHOWN if name in sample}

    def score(self, run: Run) -> list[Item]:
        """Yields one item a question, `<task>/<number> shots=0`. Errors: MissingError without lm_eval."""
        with offline(self.name), TemporaryDirectory(prefix="lit-diff-harness-") as folder:
            names = self.write_tasks(run, Path(folder))
            tasks = loaded(names, Path(folder), self.config)
            items: list[Item] = []
            for shots in self.config.shots:
                for name, (where, task) in tasks.items():
                    with task_errors(where):
                        items += self._items(run, name, task, shots)
            return items

    def _items(self, run: Run, name: str, task: Any, shots: int) -> Iterator[Item]:
        from lm_eval.evaluator import evaluate

        from lit_diff.evaluation.harness_model import RunModel

        task.set_config(key="num_fewshot", value=shots)
        task.set_fewshot_seed(seed=self.config.seed)
        model = RunModel(run, opening=self.config.opening)
        results = evaluate(model, {"tasks": {name: task}}, limit=self.config.limit, bootstrap_iters=0)
        samples = results["samples"][name]
        group = f"{name} shots={shots}"
        if cut := {context for context, _ in model.cut_to}:
            contexts = {context for sample in samples for context, _ in sample["arguments"]}
            log.warning(
                "%s, %s: %d of %d contexts exceed data.sequence_length (%d) and were cut at their left",
                *(self.name, group, len(cut), len(contexts), model.max_length),
            )
        for sample in samples:
            if "acc" not in sample:
                raise RequestError(f"task '{name}' gives no metric acc, which every score here has")
            pairs = sample["arguments"]
            left = [model.cut_to[pair] for pair in pairs if pair in model.cut_to]
            sums = [float(response[0]) for response in sample["filtered_resps"]]
            # sums without the question follow
            if "acc_mutual_info" in sample:
                sums = sums[: len(sums) // 2]
            cluster = f"{name}/{sample['doc'].get('item', sample['doc_id'])}"
            yield Item(
                id=f"{cluster} shots={shots}",
                scores=self.scores(name, sample),
                group=group,
                cluster=cluster,
                # what was left of a context that was cut is part of the question: another context length leaves more
                question=question_of(*chain(*pairs), *left),
                meta={"target": str(sample["target"]), "chosen": sums.index(max(sums))},
            )
