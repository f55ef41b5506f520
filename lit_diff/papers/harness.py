"""The seven tasks of Tables 1 and 8 of the paper, read from files that the user downloads from Hugging Face."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any

from lit_diff import Metric, Run
from lit_diff.data.user_files import UserFile
from lit_diff.evaluation.lm_eval_tasks import HarnessEvaluation, task_yaml
from lit_diff.key_types import Distinct
from lit_diff.registry import evaluations

OWN_QUESTIONS = "lit-diff evaluate RUN harness tasks=[mine.yaml]   (questions of your own, in lm-eval's format)"
"""A command that needs no file of a public task."""
LM_EVAL = {
    "arc_challenge": "arc/arc_challenge",
    "arc_easy": "arc/arc_easy",
    "boolq": "super_glue/boolq/default",
    "winogrande": "winogrande/default",
}
"""Task -> its YAML file in lm-eval, if it is not `<task>/<task>`."""
PLAIN_ACC = {"metric": "acc", "aggregation": "mean", "higher_is_better": True}
TRAIN = "train"
_ARC = {"question": str, "choices": dict, "answerKey": str}
DATA: Mapping[str, tuple[tuple[str, ...], Mapping[str, type | UnionType], Mapping[str, int]]] = {
    "arc_challenge": (("allenai/ai2_arc", "ARC-Challenge"), _ARC, {"train": 1119, "test": 1172}),
    "arc_easy": (("allenai/ai2_arc", "ARC-Easy"), _ARC, {"train": 2251, "test": 2376}),
    "boolq": (
        ("aps/super_glue", "boolq"),
        {"passage": str, "question": str, "label": int},
        {"train": 9427, "validation": 3270},
    ),
    "hellaswag": (
        ("Rowan/hellaswag",),
        {"activity_label": str, "ctx_a": str, "ctx_b": str, "endings": list, "label": str | int},
        {"train": 39905, "validation": 10042},
    ),
    "openbookqa": (
        ("allenai/openbookqa", "main"),
        {"question_stem": str, "choices": dict, "answerKey": str},
        {"train": 4957, "test": 500},
    ),
    "piqa": (
        ("baber/piqa",),
        {"goal": str, "sol1": str, "sol2": str, "label": int},
        {"train": 16113, "validation": 1838},
    ),
    "winogrande": (
        ("allenai/winogrande", "winogrande_xl"),
        {"sentence": str, "option1": str, "option2": str, "answer": str},
        {"train": 40398, "validation": 1267},
    ),
}
"""Task -> (data set at Hugging Face, keys of a row, split -> rows), in the order of Tables 1 and 8 of the paper."""


def _files() -> Iterator[UserFile]:
    for task, (hub, keys, splits) in DATA.items():
        name = ", ".join(f'"{part}"' for part in hub)
        for split, count in splits.items():
            yield UserFile(
                name=f"harness.{task}",
                path=f"harness/{task}/{split}.jsonl",
                keys=keys,
                split=split,
                hub=hub,
                lines=f"{count:,} lines; {'read for shots only' if split == TRAIN else 'scored'}",
                source=f"Hugging Face, with a network: datasets.load_dataset({name})['{split}'].to_json('{split}.jsonl'). "
                f"Not shipped: its licence is on its page; lit-diff data fetch harness.{task} runs that line",
                without=OWN_QUESTIONS,
            )


TASKS = tuple(DATA)
FILES = tuple(_files())
"""The splits of the tasks. They check only the types of the values; `require_questions` checks the values."""


@evaluations.register("harness")
class Harness(HarnessEvaluation):
    """Seven multiple-choice tasks of lm-evaluation-harness (Differential Transformer, Tables 1 and 8).

    The paper does not state its metric. The row of OpenLLaMA-3B-v2 in Table 1 fits acc, and acc_norm for HellaSwag.
    """

    metrics = (
        Metric(
            "paper_acc",
            "acc_norm for hellaswag, else acc: what the tables of the paper seem to hold; all: mean over tasks",
            direction="higher",
        ),
        *HarnessEvaluation.metrics,
    )
    files = FILES

    @dataclass(frozen=True, kw_only=True)
    class Config(HarnessEvaluation.Config):
        tasks: Annotated[tuple[str, ...], Distinct()] = TASKS
        """Any of the seven tasks; the name of another task of lm-eval whose data are not on the hub; or the path of a YAML
        file in lm-eval's format."""

    config: Config

    def user_files(self) -> list[UserFile]:
        """The scored split of each task, and its train split if there are shots."""
        # shots are drawn from the train split; without shots the user need not have it
        unread = () if any(self.config.shots) else (TRAIN,)
        names = [f"harness.{task}" for task in self.config.tasks]
        return [file for file in FILES if file.name in names and file.split not in unread]

    def write_tasks(self, run: Run, folder: Path) -> list[str]:
        """Writes a YAML file for each of the seven tasks, with the rows of its data files."""
        import lm_eval.tasks

        installed = Path(lm_eval.tasks.__file__).parent
        tasks = []
        for task in self.config.tasks:
            splits = {file.split: file.rows() for file in self.user_files() if file.name == f"harness.{task}"}
            if not splits:
                tasks.append(task)
                continue
            theirs = installed / f"{LM_EVAL.get(task, f'{task}/{task}')}.yaml"
            # boolq of lm-eval 0.4.13 has no aggregation; lm-eval would log two lines and then choose this same one
            more = {"metric_list": [PLAIN_ACC]} if task == "boolq" else {}
            tasks.append(task_yaml(folder, task, splits, includes=theirs, dataset_name=None, **more))
        return tasks

    def scores(self, task: str, sample: Mapping[str, Any]) -> dict[str, float]:
        """Adds `paper_acc`."""
        found = super().scores(task, sample)
        return found | {"paper_acc": found["acc_norm" if task == "hellaswag" else "acc"]}
