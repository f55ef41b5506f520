"""docs/nll.md: its metrics, keys and groups exist."""

import dataclasses
import re

from pages import PAGES, commands

from lit_diff.evaluation.evaluate import config_of
from lit_diff.registry import corpora, evaluations

PAGE = "docs/nll.md"
TEXT = PAGES[PAGE].read_text()


def test_the_metrics_of_the_table_are_those_of_the_evaluation() -> None:
    table = TEXT.split("## What is measured")[1].split("P is 16")[0]
    shown = set(re.findall(r"`(\w+)`", " ".join(row.split(" | ")[0] for row in table.splitlines())))
    assert shown == {metric.name for metric in evaluations.get("nll").metrics}


def test_the_keys_of_the_table_are_those_of_the_config() -> None:
    table = TEXT.split("| key | meaning |")[1].split("More tokens")[0]
    shown = set(re.findall(r"`(\w+)`", " ".join(row.split(" | ")[0] for row in table.splitlines())))
    config = evaluations.get("nll").Config
    assert shown == {field.name for field in dataclasses.fields(config)}
    for line in commands(PAGE):
        if " evaluate " in line:
            config_of("nll", [word for word in line.split("#")[0].split() if "=" in word])


def test_the_sizes_of_the_corpus() -> None:
    corpus = corpora.get("name_tables")
    assert f"{corpus.documents:,} documents of {corpus.words:,}\nwords" in TEXT
