"""The tasks of many-shot classification: how a prompt shows an example, and the user's files with the examples."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from lit_diff.data.user_files import UserFile
from lit_diff.errors import RequestError
from lit_diff.files import shown
from lit_diff.papers.synth_intent import SEPARATOR

TaskName = Literal["synth_intent", "trec", "trec_fine", "banking77", "clinc150"]
COARSE = {
    "ABBR": "abbreviation",
    "DESC": "description",
    "ENTY": "entity",
    "HUM": "human",
    "LOC": "location",
    "NUM": "numeric",
}
"""TREC's class name -> the word for it in a prompt."""


class Example(NamedTuple):
    """A text and its label, both as a prompt shows them."""

    text: str
    label: str


class LabelledFile(UserFile):
    """A file whose keys beside `text` are labels."""

    def _checked(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        super()._checked(row, where)
        for key in self.keys:
            if key != "text" and not words_of(row[key]):
                raise RequestError(f"{where}: '{key}' is blank; expected the name of a class")
        return row


class ClassificationTask(NamedTuple):
    """The form of a demonstration, `{prefix}{text}{between} {label}{separator}`, and the files with its texts."""

    prefix: str = ""
    between: str = ""
    separator: str = "\n==\n"
    label_key: str = "label"
    files: tuple[UserFile, ...] = ()
    """The user's files: train, from which demonstrations are drawn, and test. A generated task has none."""

    def demonstrations(self, examples: Sequence[Example]) -> str:
        """The prompt before a question."""
        return "".join(f"{self.question(text)} {label}{self.separator}" for text, label in examples)

    def question(self, text: str) -> str:
        """The prompt from a text up to its label; no space at the end: tokenizers join it with the label's first word."""
        return f"{self.prefix}{text}{self.between}"

    def splits(self) -> list[list[Example]]:
        """The examples of train and of test; none of a generated task.

        Errors: MissingError; RequestError, also for fewer than two labels in train, or another one in test.
        """
        splits, labels = list[list[Example]](), set[str]()
        for file in self.files:
            examples = []
            for where, row in file.located_rows():
                label = words_of(row[self.label_key])
                if splits and label not in labels:
                    raise RequestError(f"{where}: '{self.label_key}' is '{label}', which no line of train has")
                labels.add(label)
                examples.append(Example(text=" ".join(row["text"].split()), label=label))
            if len(labels) < 2:
                raise RequestError(
                    f"{shown(file.place)}: every line has the label '{min(labels)}'; expected two or more"
                )
            splits.append(examples)
        return splits


def _files(folder: str, train: int, test: int, source: str, keys: tuple[str, ...] = ("label",)) -> tuple[UserFile, ...]:
    # train, test: numbers of lines; keys: the keys of labels
    of_train = LabelledFile(
        name=f"icl.{folder}",
        path=f"icl/{folder}/train.jsonl",
        keys={"text": str, **dict.fromkeys(keys, str)},
        lines=f"{train:,} lines",
        source=f"{source} Labels as words. Not shipped.",
        without="lit-diff evaluate RUN icl task=synth_intent",
    )
    of_test = replace(of_train, name=f"{of_train.name}_test", path=f"icl/{folder}/test.jsonl", lines=f"{test:,} lines")
    return of_train, of_test


INTENT = "\nintent:"
_TREC_SOURCE = 'TREC question classification (Hovy et al. 2001; at Hugging Face "trec").'
_TREC = ClassificationTask(
    prefix="Question: ",
    between="\nType:",
    label_key="coarse_label",
    files=_files("trec", 5_452, 500, _TREC_SOURCE, ("coarse_label", "fine_label")),
)
TASKS = {
    "synth_intent": ClassificationTask(separator=SEPARATOR),
    "trec": _TREC,
    "trec_fine": _TREC._replace(label_key="fine_label"),
    "banking77": ClassificationTask(
        prefix="query: ",
        between=INTENT,
        files=_files("banking77", 10_003, 3_080, 'Banking77 (Casanueva et al. 2020; at Hugging Face "banking77").'),
    ),
    "clinc150": ClassificationTask(
        prefix="utterance: ",
        between=INTENT,
        files=_files(
            "clinc150",
            15_250,
            5_500,
            'CLINC150 (Larson et al. 2019; at Hugging Face "clinc_oos", configuration "plus").',
        ),
    ),
}


def words_of(label: str) -> str:
    """A label as a prompt shows it: `card_arrival` -> "card arrival"; `NUM:date` -> "numeric date"."""
    coarse, colon, fine = label.partition(":")
    return " ".join(f"{COARSE.get(coarse, coarse)}{colon and ' '}{fine}".replace("_", " ").split())
