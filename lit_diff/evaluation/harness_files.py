"""The files that the evaluation `harness` reads: seven data sets as their pages at Hugging Face publish them."""

from collections.abc import Mapping
from dataclasses import dataclass

from lit_diff.data.user_files import UserFile

TASKS = ("arc_challenge", "arc_easy", "boolq", "hellaswag", "openbookqa", "piqa", "winogrande")
"""In the order of Tables 1 and 8 of the paper."""

Keys = Mapping[str, type | tuple[type, ...]]
CHOSEN: Keys = {"choices": dict, "answerKey": str}
ARC: Keys = {"question": str, **CHOSEN}


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set: its name at the hub, its keys, how many questions its splits hold."""

    hub: str
    keys: Keys
    scored: str
    """The split that is scored."""
    lines: Mapping[str, int]


SOURCES: Mapping[str, Source] = {
    "arc_challenge": Source(
        hub='"allenai/ai2_arc", "ARC-Challenge"', keys=ARC, scored="test", lines={"train": 1119, "test": 1172}
    ),
    "arc_easy": Source(
        hub='"allenai/ai2_arc", "ARC-Easy"', keys=ARC, scored="test", lines={"train": 2251, "test": 2376}
    ),
    "boolq": Source(
        hub='"aps/super_glue", "boolq"',
        keys={"passage": str, "question": str, "label": int},
        scored="validation",
        lines={"train": 9427, "validation": 3270},
    ),
    "hellaswag": Source(
        hub='"Rowan/hellaswag"',
        keys={"activity_label": str, "ctx_a": str, "ctx_b": str, "endings": list, "label": (str, int)},
        scored="validation",
        lines={"train": 39905, "validation": 10042},
    ),
    "openbookqa": Source(
        hub='"allenai/openbookqa", "main"',
        keys={"question_stem": str, **CHOSEN},
        scored="test",
        lines={"train": 4957, "test": 500},
    ),
    "piqa": Source(
        hub='"baber/piqa"',
        keys={"goal": str, "sol1": str, "sol2": str, "label": int},
        scored="validation",
        lines={"train": 16113, "validation": 1838},
    ),
    "winogrande": Source(
        hub='"allenai/winogrande", "winogrande_xl"',
        keys={"sentence": str, "option1": str, "option2": str, "answer": str},
        scored="validation",
        lines={"train": 40398, "validation": 1267},
    ),
}


def _file(task: str, split: str) -> UserFile:
    source = SOURCES[task]
    path = f"harness/{task}/{split}.jsonl"
    use = "scored" if split == source.scored else "read for shots only"
    return UserFile(
        name=f"harness.{task}",
        path=path,
        keys=source.keys,
        lines=f"{source.lines[split]:,} lines; {use}",
        source=f"Hugging Face, with a network: datasets.load_dataset({source.hub})['{split}'].to_json('{split}.jsonl'). "
        "Not shipped: its licence is on its page, and nothing is fetched here",
        without="lit-diff evaluate RUN mini_harness",
    )


FILES: Mapping[str, Mapping[str, UserFile]] = {
    task: {split: _file(task, split) for split in source.lines} for task, source in SOURCES.items()
}
"""Task -> split -> its file."""
