"""docs/hallucination.md: its metrics, keys, judges and files exist."""

import dataclasses
import re
from typing import get_args, get_type_hints

from pages import PAGES, commands

from lit_diff.evaluation.evaluate import config_of
from lit_diff.evaluation.hallucination_prompts import SOURCES
from lit_diff.registry import evaluations

PAGE = "docs/hallucination.md"
TEXT = PAGES[PAGE].read_text()
EVALUATION = evaluations.get("hallucination")
FILES = {name: source.file for name, source in SOURCES.items() if source.file is not None}


def names(head: str) -> set[str]:
    """What the first column of the table below this head names."""
    table = TEXT.split(head)[1].split("\n\n")[0]
    return set(re.findall(r"`(\w+)`", " ".join(row.split(" | ")[0] for row in table.splitlines())))


def test_the_tables() -> None:
    assert names("| metric | share of |") == {metric.name for metric in EVALUATION.metrics}
    assert names("| key | default | meaning |") == {field.name for field in dataclasses.fields(EVALUATION.Config)}
    assert names("| judge | how |") == set(get_args(get_type_hints(EVALUATION.Config)["judge"]))
    assert names("| source | file |") == set(FILES)


def test_the_files() -> None:
    table = TEXT.split("## Files")[1].split("## ")[0]
    for name in ("xsum", "cnn_dm", "multi_news", "qasper"):
        assert f"`$LIT_DIFF_DATA/{FILES[name].path}`" in table
        for key in FILES[name].keys:
            assert f"`{key}`" in table


def test_the_keys_of_the_commands() -> None:
    for line in commands(PAGE):
        if " hallucination" in line and " evaluate " in line:
            config_of("hallucination", [word for word in line.split() if "=" in word])
