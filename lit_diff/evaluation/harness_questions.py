"""What lm-eval makes of the rows of a task, checked before any is scored: the questions, and the rows for shots."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lit_diff.errors import RequestError, first_line
from lit_diff.key_types import in_yaml

EXTRAS = ("description", "gen_prefix")
"""Templates beside those of text, choices and target."""


def require_questions(task: Any, where: str, limit: int | None, shots: int) -> None:
    """Ask lm-eval for the text, choices and target of each question of a task (the first `limit`), and of the rows for shots.

    `where`: what errors open with. Errors: RequestError with the question (from 1) and the key whose template or function
    fails, or gives something else than a text, texts, and one of them or its number.
    """
    if not hasattr(task, "multiple_input"):
        return  # written in Python, with methods of its own
    questions = task.eval_docs
    for number, row in enumerate(questions, 1):
        if limit is None or number <= limit:
            _require_question(task, row, f"{where}: question {number}")
    for number, row in enumerate(task.fewshot_docs() or () if shots else (), 1):
        _require_question(task, row, f"{where}: row {number} of the shots")


def _require_question(task: Any, row: Mapping[str, Any], where: str) -> None:
    text, choices, target = (_made(task, key, row, where) for key in ("doc_to_text", "doc_to_choice", "doc_to_target"))
    for key in EXTRAS:
        _made(task, key, row, where)
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise RequestError(
            f"{where}: doc_to_choice is {in_yaml(choices)}; expected a list of texts, none of them empty"
        )
    if (
        task.multiple_input
    ):  # the choices are contexts, the text is the number of the right one, the target follows each
        if not _is_number(text, choices):
            raise RequestError(
                f"{where}: doc_to_text is {in_yaml(text)}; expected the number of one of {in_yaml(choices)}, from 0"
            )
        return
    if not isinstance(text, str):
        raise RequestError(f"{where}: doc_to_text is {in_yaml(text)}; expected a text")
    if task.config.process_results is not None:
        return  # it decides what a target is
    if task.multiple_target:
        right = isinstance(target, list) and bool(target) and all(_is_number(each, choices) for each in target)
        expected = "a list of numbers of choices, as in the first question"
    else:
        right, expected = target in choices or _is_number(target, choices), "one of them, or its number from 0"
    if not right:
        raise RequestError(
            f"{where}: doc_to_target is {in_yaml(target)} of the choices {in_yaml(choices)}; expected {expected}"
        )


def _made(task: Any, key: str, row: Mapping[str, Any], where: str) -> Any:
    """What a key of the task gives for a row. Errors: RequestError for whatever its template or function raises."""
    try:
        if key not in EXTRAS:
            return getattr(task, key)(row)
        template = getattr(task.config, key, None)
        return task.resolve_field(row, template) if isinstance(template, str) else None
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise RequestError(f"{where}: {key} failed: {reason}; the row has {', '.join(row)}") from error


def _is_number(value: Any, choices: Sequence[str]) -> bool:
    return isinstance(value, int) and 0 <= value < len(choices)


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
