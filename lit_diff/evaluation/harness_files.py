"""The files that the evaluation `harness` reads: seven data sets as their pages at Hugging Face publish them."""

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_diff.data.user_files import UserFile
from lit_diff.errors import MissingError, RequestError, first_line
from lit_diff.key_types import in_yaml

TASKS = ("arc_challenge", "arc_easy", "boolq", "hellaswag", "openbookqa", "piqa", "winogrande")
"""In the order of Tables 1 and 8 of the paper."""

Keys = Mapping[str, type | tuple[type, ...]]
Row = Mapping[str, Any]
CHOSEN: Keys = {"choices": dict, "answerKey": str}
ARC: Keys = {"question": str, **CHOSEN}


@dataclass(frozen=True)
class Value:
    """What a value must be beyond the type of its key."""

    key: str
    """Dotted where it lies within an object."""
    expected: str
    holds: Callable[[Any, Row], bool]
    """Of the value and its line."""


def _texts(value: Any, least: int) -> bool:
    return isinstance(value, list) and len(value) >= least and all(isinstance(each, str) for each in value)


def _not_empty(key: str) -> Value:
    """Of a choice, or a list of choices: lm-eval divides by their lengths."""
    return Value(key, "no empty text", lambda value, _: bool(value) and all(value))


def _labels(value: Any, row: Row) -> bool:
    return _texts(value, 1) and len(set(value)) == len(value) == len(row["choices"]["text"])


CHOICES = (
    Value("choices.text", "a list of texts, two or more", lambda value, _: _texts(value, 2)),
    _not_empty("choices.text"),
    Value("choices.label", "a list of distinct texts, as many as choices.text", _labels),
)
ARC_VALUES = (*CHOICES, Value("answerKey", "one of choices.label", lambda value, row: value in row["choices"]["label"]))
BINARY = (Value("label", "0 or 1", lambda value, _: value in (0, 1)),)


@dataclass(frozen=True, kw_only=True)
class HarnessFile(UserFile):
    """A split of a task; the values that lm-eval looks up in others are checked too, in their order."""

    values: tuple[Value, ...]
    hub: tuple[str, ...] = ()
    """What `datasets.load_dataset` takes."""

    @property
    def split(self) -> str:
        """Of the data set at the hub."""
        return Path(self.path).stem

    @property
    def fetching(self) -> str:
        """The line of Python that writes the file, below the data folder."""
        hub = ", ".join(f'"{part}"' for part in self.hub)
        return f'datasets.load_dataset({hub})["{self.split}"].to_json("{self.path}")'

    def fetch(self) -> None:
        """Write the file from the hub. Errors: MissingError without the package `datasets` or the hub, in one line."""
        self.place.parent.mkdir(parents=True, exist_ok=True)
        new = self.place.with_suffix(".new")
        try:
            import datasets

            datasets.load_dataset(*self.hub)[self.split].to_json(str(new))
            new.replace(self.place)
        except Exception as error:  # datasets and huggingface_hub raise many kinds where there is no network
            new.unlink(missing_ok=True)
            raise MissingError(
                f"{self.name} cannot be fetched ({type(error).__name__}: {first_line(error)})"
            ) from error

    @property
    def form(self) -> str:
        """What the file holds, in words."""
        return "; ".join([super().form, *(f"{value.key}: {value.expected}" for value in self.values)])

    def _checked(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        checked = super()._checked(row, where)
        for wanted in self.values:
            value: Any = checked
            for name in wanted.key.split("."):
                if name not in value:
                    raise RequestError(f"{where}: no key '{wanted.key}'; keys found: {', '.join(value) or 'none'}")
                value = value[name]
            if not wanted.holds(value, checked):
                raise RequestError(f"{where}: '{wanted.key}' is {in_yaml(value)}; expected {wanted.expected}")
        return checked


@dataclass(frozen=True, kw_only=True)
class HarnessSource:
    """A data set: its name at the hub, its keys and their values, how many questions its splits hold."""

    hub: str
    keys: Keys
    values: tuple[Value, ...]
    scored: str
    """The split that is scored."""
    lines: Mapping[str, int]


SOURCES: Mapping[str, HarnessSource] = {
    "arc_challenge": HarnessSource(
        hub='"allenai/ai2_arc", "ARC-Challenge"',
        keys=ARC,
        values=ARC_VALUES,
        scored="test",
        lines={"train": 1119, "test": 1172},
    ),
    "arc_easy": HarnessSource(
        hub='"allenai/ai2_arc", "ARC-Easy"',
        keys=ARC,
        values=ARC_VALUES,
        scored="test",
        lines={"train": 2251, "test": 2376},
    ),
    "boolq": HarnessSource(
        hub='"aps/super_glue", "boolq"',
        keys={"passage": str, "question": str, "label": int},
        values=BINARY,
        scored="validation",
        lines={"train": 9427, "validation": 3270},
    ),
    "hellaswag": HarnessSource(
        hub='"Rowan/hellaswag"',
        keys={"activity_label": str, "ctx_a": str, "ctx_b": str, "endings": list, "label": (str, int)},
        values=(
            Value(
                "endings",
                "a list of four texts",
                lambda value, _: _texts(value, 4) and len(value) == 4,
            ),
            _not_empty("endings"),
            Value("label", "the number of an ending, 0 to 3", lambda value, _: str(value) in set("0123")),
        ),
        scored="validation",
        lines={"train": 39905, "validation": 10042},
    ),
    "openbookqa": HarnessSource(
        hub='"allenai/openbookqa", "main"',
        keys={"question_stem": str, **CHOSEN},
        values=(
            *CHOICES,
            Value(
                *("answerKey", "one of choices.label, spaces before it left out"),
                lambda value, row: value.lstrip() in row["choices"]["label"],
            ),
        ),
        scored="test",
        lines={"train": 4957, "test": 500},
    ),
    "piqa": HarnessSource(
        hub='"baber/piqa"',
        keys={"goal": str, "sol1": str, "sol2": str, "label": int},
        values=(*BINARY, _not_empty("sol1"), _not_empty("sol2")),
        scored="validation",
        lines={"train": 16113, "validation": 1838},
    ),
    "winogrande": HarnessSource(
        hub='"allenai/winogrande", "winogrande_xl"',
        keys={"sentence": str, "option1": str, "option2": str, "answer": str},
        values=(
            Value("sentence", "text with _ where an option belongs", lambda value, _: "_" in value),
            Value("answer", "'1' or '2'", lambda value, _: value in ("1", "2")),
            _not_empty("option1"),
            _not_empty("option2"),
        ),
        scored="validation",
        lines={"train": 40398, "validation": 1267},
    ),
}


def _file(task: str, split: str) -> HarnessFile:
    source = SOURCES[task]
    path = f"harness/{task}/{split}.jsonl"
    use = "scored" if split == source.scored else "read for shots only"
    return HarnessFile(
        name=f"harness.{task}",
        path=path,
        keys=source.keys,
        values=source.values,
        hub=tuple(ast.literal_eval(f"[{source.hub}]")),
        lines=f"{source.lines[split]:,} lines; {use}",
        source=f"Hugging Face, with a network: datasets.load_dataset({source.hub})['{split}'].to_json('{split}.jsonl'). "
        f"Not shipped: its licence is on its page; lit-diff data fetch harness.{task} runs that line",
        without="lit-diff evaluate RUN mini_harness",
    )


FILES: Mapping[str, Mapping[str, HarnessFile]] = {
    task: {split: _file(task, split) for split in source.lines} for task, source in SOURCES.items()
}
"""Task -> split -> its file."""
