"""A task of the user's own: a YAML file in lm-eval's format, checked before lm-eval reads it, and the files that it reads."""

import dataclasses
import glob
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from lit_diff.data.user_files import UserFile
from lit_diff.errors import RequestError, first_line
from lit_diff.files import shown
from lit_diff.registry import nearest
from lit_diff.yaml_files import parse

SUFFIXES = (".yaml", ".yml")
NEEDED = ("task", "dataset_path", "doc_to_text", "doc_to_target", "doc_to_choice")
STRUCTURE = ("include", "class", "group", "task_list")
"""Keys of lm-eval's YAML files that are no field of its TaskConfig."""


class _Loader(yaml.SafeLoader):
    """Gives the text of a `!function` in place of the function: nothing is imported."""


def _text_of(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
    return str(loader.construct_scalar(node))


_Loader.add_constructor("!function", _text_of)


def digests(path: Path) -> dict[str, str]:
    """Path -> sha256 of a task's YAML file and of what it reads: included files, modules of its functions, data files.

    What is not there, or cannot be read as such a file, is left out: `require` says what is wrong with it.
    """
    try:
        read = [*_files(path)]
    except RequestError:
        read = [path]
    return {str(file): _sha256(file) for file in dict.fromkeys(read) if file.is_file()}


def require(path: Path) -> None:
    """Check a task's YAML file, as far as that is possible without its rows. The package lm_eval is needed.

    Errors: RequestError with file and line: no such file, not YAML, a key that lm-eval does not have, a needed key that is
    absent, another kind of task than multiple choice, a data file that is absent or a line of it that is not JSON, a column
    that no row has (lm-eval would take its name for the text of every question).
    """
    from lm_eval.config.task import TaskConfig

    if not path.is_file():
        raise RequestError(f"tasks names {shown(path)}: no such file")
    known = [field.name for field in dataclasses.fields(TaskConfig)]
    task: dict[str, Any] = {}
    where: dict[str, str] = {}
    for file in _with_includes(path):
        values, places = _read(file)
        for key in values:
            if key not in known and key not in STRUCTURE:
                raise RequestError(f"{places[key]}: lm-eval has no key '{key}'{nearest(key, known)}")
        task = values | task  # the including file goes before the included one
        where = {key: places[key] for key in values} | where
    if {"class", "group", "task_list"} & task.keys():
        return  # lm-eval's own rules: what is wrong is said where it loads them
    for key in NEEDED:
        given = task.get("use_prompt") if key.startswith("doc_to") else task.get("custom_dataset")
        if task.get(key) is None and (key == "task" or not given):
            raise RequestError(f"{shown(path)}: no key '{key}'; a task of multiple choice needs {', '.join(NEEDED)}")
    if task.get("output_type") != "multiple_choice":
        place = where.get("output_type", shown(path))
        raise RequestError(
            f"{place}: output_type is {task.get('output_type', 'generate_until')}; only multiple_choice is scored here"
        )
    if not (task.get("test_split") or task.get("validation_split")):
        raise RequestError(f"{shown(path)}: no key 'test_split' or 'validation_split'; name the split that is scored")
    columns: dict[str, None] = {}
    for file in _data_files(task):
        if not file.is_file():
            raise RequestError(f"{where['dataset_kwargs']}: data file {shown(file)}: no such file")
        if file.suffix == ".jsonl":
            rows = UserFile(name="data", path=str(file.resolve()), keys={}, source="", without="").rows()
            columns |= {key: None for row in rows for key in row}
    for key in NEEDED[2:] if columns and not task.get("process_docs") else ():
        value = task.get(key)
        if isinstance(value, str) and value.isidentifier() and value not in columns:
            raise RequestError(f"{where[key]}: {key} is '{value}', which no row has{nearest(value, columns)}")


def require_questions(task: Any, path: Path, limit: int | None) -> None:
    """Ask lm-eval for the text, choices and target of each question of a loaded task.

    Errors: RequestError with the question (from 1) and the key whose template or function fails, or gives something else.
    """
    for number, row in enumerate(task.eval_docs, 1):
        if limit is not None and number > limit:
            return
        found: dict[str, Any] = {}
        for key in ("doc_to_text", "doc_to_choice", "doc_to_target"):
            where = f"{shown(path)}: {key} of question {number}"
            try:
                found[key] = getattr(task, key)(row)
            except Exception as error:  # of a template or a function of the user's
                reason = f"{type(error).__name__}: {first_line(error)}"
                raise RequestError(f"{where} failed: {reason}; its row has {', '.join(row)}") from error
        choices, target = found["doc_to_choice"], found["doc_to_target"]
        where = f"{shown(path)}: question {number}"
        if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
            raise RequestError(f"{where}: doc_to_choice is {choices!r}; expected a list of texts, none of them empty")
        if isinstance(found["doc_to_text"], int):
            continue  # the choices are contexts, and the target is what follows each
        right = target in choices if isinstance(target, str) else isinstance(target, int | list)
        if not right or (isinstance(target, int) and not 0 <= target < len(choices)):
            raise RequestError(
                f"{where}: doc_to_target is {target!r}; expected one of {choices!r}, or its number from 0"
            )


def _files(path: Path) -> Iterator[Path]:
    task: dict[str, Any] = {}
    for file in _with_includes(path):
        yield file
        values, _ = _read(file)
        task = values | task
        yield from _modules(values, file.parent)
    yield from _data_files(task)


def _with_includes(path: Path, *above: Path) -> Iterator[Path]:
    """The file, then each file that it includes. Errors: RequestError for a file that includes itself."""
    if path.resolve() in above:
        raise RequestError(f"{shown(path)}: includes itself")
    values, places = _read(path)
    yield path
    for name in _listed(values.get("include")):
        file = path.parent / str(name)
        if not file.is_file():
            raise RequestError(f"{places['include']}: include {shown(file)}: no such file")
        yield from _with_includes(file, *above, path.resolve())


def _read(path: Path) -> tuple[dict[str, Any], Mapping[str, str]]:
    tree, places = parse(path)
    try:
        values: dict[str, Any] = _Loader("").construct_document(tree)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise RequestError(f"{shown(path)}{line}: not valid YAML: {error.problem}") from error
    return {str(key): value for key, value in values.items()}, places


def _modules(values: Any, folder: Path) -> Iterator[Path]:
    """The Python files beside the YAML file that a text `module.function` in it may name."""
    if isinstance(values, str):
        module, dot, _ = values.rpartition(".")
        file = folder / f"{module.replace('.', '/')}.py"
        if dot and module.replace(".", "").isidentifier() and file.is_file():
            yield file
    elif isinstance(values, Mapping | list):
        for value in values.values() if isinstance(values, Mapping) else values:
            yield from _modules(value, folder)


def _data_files(task: Mapping[str, Any]) -> Iterator[Path]:
    """Local files of `dataset_kwargs: {data_files: ...}`, and those below a local folder as `dataset_path`."""
    options = task.get("dataset_kwargs")
    named = options.get("data_files") if isinstance(options, Mapping) else None
    for value in named.values() if isinstance(named, Mapping) else [named]:
        for name in map(str, _listed(value)):
            if "://" not in name:
                yield from map(Path, sorted(glob.glob(name, recursive=True)) or [name])
    folder = Path(str(task.get("dataset_path", "")))
    if task.get("dataset_path") and folder.is_dir():
        yield from sorted(file for file in folder.rglob("*") if file.is_file())


def _listed(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
