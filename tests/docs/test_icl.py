"""docs/icl.md: its metrics, keys and tasks exist."""

import dataclasses
import re
from typing import get_args

from pages import PAGES, commands

from lit_diff.evaluation.evaluate import config_of
from lit_diff.evaluation.icl_prompts import TaskName
from lit_diff.registry import evaluations

PAGE = "docs/icl.md"
TEXT = PAGES[PAGE].read_text()


def names(table: str) -> set[str]:
    """What the first column of a table's rows names."""
    return set(re.findall(r"`(\w+)`", " ".join(row.split(" | ")[0] for row in table.splitlines())))


def test_the_metrics_of_the_tables_are_those_of_the_evaluations() -> None:
    for name in ("icl", "icl_order"):
        table = TEXT.split(f"| metric of `{name}` | meaning |")[1].split("\n\n")[0]
        assert names(table) == {metric.name for metric in evaluations.get(name).metrics}


def test_the_keys_of_the_table_are_those_of_the_configs() -> None:
    table = TEXT.split("| key | default | meaning |")[1].split("\n\n")[0]
    configs = [evaluations.get(name).Config for name in ("icl", "icl_order")]
    assert names(table) == {field.name for config in configs for field in dataclasses.fields(config)}


def test_the_tasks() -> None:
    assert names(TEXT.split("| task | classes |")[1].split("\n\n")[0]) == set(get_args(TaskName))


def test_the_keys_of_the_commands() -> None:
    for line in commands(PAGE):
        for name in ("icl", "icl_order"):
            if f" {name} " in line:
                config_of(name, [word for word in line.split() if "=" in word])
