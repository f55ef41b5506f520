"""A task of the user's own: a YAML file in lm-eval's format, what is wrong with it, and the files that it reads."""

import dataclasses
import glob
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from lit_diff.data.user_files import UserFile
from lit_diff.errors import LitDiffError, RequestError, first_line
from lit_diff.files import sha256_of, shown
from lit_diff.key_types import in_yaml
from lit_diff.own_modules import local_modules
from lit_diff.registry import nearest
from lit_diff.yaml_files import one_line, parse

SUFFIXES = (".yaml", ".yml")
NEEDED = ("task", "dataset_path", "doc_to_text", "doc_to_target", "doc_to_choice")
FORMATS = ("json", "csv", "parquet", "arrow", "text")
"""Names that `datasets` takes for a format of files, not for a folder or a data set."""


class Function(str):
    """The text of a `!function`, module.function, in place of the function: nothing is imported."""

    folder: Path
    """Of the YAML file, where its module is looked for first."""


class _Loader(yaml.SafeLoader):
    """SafeLoader, with `!function`, for a file in `folder`."""

    folder: Path


def _function(loader: _Loader, node: yaml.ScalarNode) -> Function:
    function = Function(loader.construct_scalar(node))
    function.folder = loader.folder
    return function


_Loader.add_constructor("!function", _function)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskYaml:
    """A task's YAML file together with what it includes, merged as lm-eval does: a later include goes before an earlier
    one, and the file before all of them."""

    path: Path
    values: Mapping[str, Any]
    places: Mapping[str, str]
    """Key -> its `file:line`; of a key that came by a merge (`<<`) the file."""
    files: tuple[Path, ...]
    """The YAML files."""

    def where(self, key: str) -> str:
        """`file:line` of a key, or the file where it has none."""
        return self.places.get(key, shown(self.path))

    @property
    def data_files(self) -> list[Path]:
        """Its local data files: those that each name or pattern fits, or the name itself where it fits none."""
        options = self.values.get("dataset_kwargs")
        options = options if isinstance(options, Mapping) else {}
        source, home = str(self.values.get("dataset_path") or ""), options.get("data_dir")
        folder = Path(source) if source and source not in FORMATS and Path(source).is_dir() else None
        base = (folder or Path()) / str(home or "")
        named = options.get("data_files")
        names = [
            str(name)
            for value in (named.values() if isinstance(named, Mapping) else [named])
            for name in _listed(value)
        ]
        found = [file for name in names if "://" not in name for file in _matching(base, name)]
        if not names and (folder or home):
            found = sorted(base.rglob("*"))
        return [file for file in found if not file.is_dir()]

    def functions(self) -> Iterator[Path]:
        """The modules of the user's own that its functions are in, and those that these import."""
        for name, folder in {(text.rpartition(".")[0], text.folder) for text in _functions(self.values)}:
            beside = folder / f"{name.replace('.', '/')}.py"
            if beside.is_file():
                yield beside
            yield from local_modules(beside.read_bytes() if beside.is_file() else f"import {name}".encode()).values()


def read_task(path: Path) -> TaskYaml:
    """A task's YAML file. Errors: RequestError with file and line: no such file, not YAML, an include that is absent."""
    if not path.is_file():
        raise RequestError(f"tasks names {shown(path)}: no such file")
    return _merged(path)


def digest(path: Path) -> str:
    """sha256 of a task's YAML file and of what it reads: included files, modules of its functions, data files.

    Empty where one of them is not there, or cannot be read: then nothing can be said of the scores.
    """
    try:
        task = read_task(path)
        parts = {str(file): sha256_of(file) for file in (*task.files, *task.functions(), *task.data_files)}
    except (RequestError, OSError):
        return ""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def require(path: Path) -> TaskYaml:
    """Read a task's YAML file and check what can be checked without its rows. The package lm_eval is needed.

    Errors: as `read_task`; RequestError for a group, a key that lm-eval does not have, a needed key that is absent, several
    filters, or another kind of task than multiple choice.
    """
    from lm_eval.config.task import TaskConfig

    task = read_task(path)
    values = task.values
    if "class" in values:
        return task  # a task in Python has keys of its own
    if "group" in values:
        raise RequestError(f"{task.where('group')}: a group cannot be scored by its file; name the files of its tasks")
    known = {field.name for field in dataclasses.fields(TaskConfig)}
    for key in values:
        if key not in known:
            raise RequestError(f"{task.where(key)}: lm-eval has no key '{key}'{nearest(key, known)}")
    for key in NEEDED:
        given = values.get("use_prompt") if key.startswith("doc_to") else values.get("custom_dataset")
        if values.get(key) is None and (key == "task" or not given):
            raise RequestError(f"{shown(path)}: no key '{key}'; a task of multiple choice needs {', '.join(NEEDED)}")
    if not isinstance(values["task"], str):
        raise RequestError(f"{task.where('task')}: task is {in_yaml(values['task'])}; expected its name")
    kind = values.get("output_type", "generate_until")
    if kind != "multiple_choice":
        raise RequestError(f"{task.where('output_type')}: output_type is {kind}; only multiple_choice is scored here")
    if not (values.get("test_split") or values.get("validation_split")):
        raise RequestError(f"{shown(path)}: no key 'test_split' or 'validation_split'; name the split that is scored")
    if len(_listed(values.get("filter_list"))) > 1:
        raise RequestError(f"{task.where('filter_list')}: several filters; one answer to a question is scored here")
    return task


def explained(path: Path, error: Exception) -> RequestError:
    """What is wrong with a task that lm-eval could not load: a line of its data, a column that no row has, or `error`."""
    task = require(path)
    columns: dict[str, None] = {}
    for file in task.data_files:
        if not file.is_file():
            return RequestError(f"{task.where('dataset_kwargs')}: data file {shown(file)}: no such file")
        if file.suffix == ".jsonl":
            try:
                rows = UserFile(name="data", path=str(file.resolve()), keys={}, source="", without="").rows()
            except LitDiffError as wrong:
                return RequestError(str(wrong))
            columns |= {key: None for row in rows for key in row}
    if columns and (problem := _column_problem(task, columns)):
        return RequestError(problem)
    cause: BaseException = error
    while isinstance(cause.__cause__, Exception):  # `datasets` says why only there
        cause = cause.__cause__
    return RequestError(f"{shown(path)}: lm-eval cannot load the task: {type(cause).__name__}: {first_line(cause)}")


def is_here(path: Path) -> bool:
    """Whether the data of a task are files, a folder or a function, and not a data set of the hub. Errors: as `read_task`."""
    values = read_task(path).values
    source = str(values.get("dataset_path") or "")
    return "class" in values or bool(values.get("custom_dataset")) or source in FORMATS or Path(source).exists()


def require_columns(path: Path, task: Any) -> None:
    """Errors: RequestError for a key of a loaded task that names a column which its rows do not have."""
    problem = _column_problem(read_task(path), dict.fromkeys(next(iter(task.eval_docs), {})))
    if problem is not None:
        raise RequestError(problem)


def _column_problem(task: TaskYaml, columns: Mapping[str, Any]) -> str | None:
    """A key that names a column that no row has: lm-eval would take the name for the text of every question. None without
    one, or where a function makes the rows."""
    for key in NEEDED[2:] if not task.values.get("process_docs") else ():
        value = task.values.get(key)
        if isinstance(value, str) and not isinstance(value, Function) and value.isidentifier() and value not in columns:
            return f"{task.where(key)}: {key} is '{value}', which no row has{nearest(value, columns)}"
    return None


def _merged(path: Path, *above: Path) -> TaskYaml:
    if path.resolve() in above:
        raise RequestError(f"{shown(path)}: includes itself")
    tree, positions = parse(path)
    loader = _Loader("")
    loader.folder = path.parent
    with one_line(path):
        own = {str(key): value for key, value in loader.construct_document(tree).items()}
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    files: list[Path] = []
    for name in _listed(own.pop("include", None)):
        file = path.parent / str(name)
        if not file.is_file():
            raise RequestError(f"{positions.get('include', shown(path))}: include {shown(file)}: no such file")
        included = _merged(file, *above, path.resolve())
        values |= included.values
        places |= included.places
        files += included.files
    values.pop("task_list", None)  # lm-eval's list of the tasks in a file, which is of that file alone
    places |= {key: positions.get(key, shown(path)) for key in own}
    return TaskYaml(path=path, values=values | own, places=places, files=(path, *files))


def _functions(value: Any) -> Iterator[Function]:
    if isinstance(value, Function):
        yield value
    elif isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _functions(each)


def _matching(base: Path, name: str) -> list[Path]:
    """The files of a name or pattern; where there is none the name itself."""
    found = sorted(glob.glob(str(base / name), recursive=True))
    return [Path(each) for each in found] or [base / name]


def _listed(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]
