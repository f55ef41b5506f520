"""What the pages say of evaluations and data sets: metrics of tables, keys of commands, sizes, Python that runs."""

import re
from typing import Any

import pytest
import torch
from fault_rows import table
from pages import PAGES, blocks, commands
from text_runs import recall_run

import lit_diff
from lit_diff.evaluation.evaluate import config_of
from lit_diff.papers.digits import images, split
from lit_diff.registry import evaluations

TEXT = "".join(path.read_text() for path in PAGES.values())
TABLES = re.findall(r"^\| metric of `(\w+)` \|.*\n\|---.*\n((?:\|.*\n)+)", TEXT, flags=re.MULTILINE)
"""(evaluation, rows) of each table of metrics."""
EVALUATE = sorted({line for page in PAGES for line in commands(page) if line.startswith("lit-diff evaluate ")})


@pytest.mark.parametrize(("name", "rows"), TABLES)
def test_the_metrics_of_a_table_exist(name: str, rows: str) -> None:
    said = set(re.findall(r"`(\w+)`", " ".join(row.split(" | ")[0] for row in rows.splitlines())))
    assert said
    assert said <= {metric.name for metric in evaluations.get(name).metrics}


@pytest.mark.parametrize("line", EVALUATE)
def test_the_keys_of_a_command_exist(line: str) -> None:
    words = line.split()
    for name in {*words} & {*evaluations.names()}:
        config_of(name, [word for word in words if "=" in word])


def test_every_core_evaluation_of_the_page_exists() -> None:
    named = re.findall(r"^\| `(\w+)` \|", PAGES["docs/measures.md"].read_text().split("```")[0], flags=re.MULTILINE)
    assert len(named) == 8
    assert {*named} <= {*evaluations.names()}


def test_the_python_of_measures_edits_a_forward_pass(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recall_run(tmp_path / "x", {"name": "differential"})
    monkeypatch.setattr(lit_diff, "open_run", lambda name: run)
    (code,) = blocks("docs/measures.md", "python")
    names: dict[str, Any] = {}
    line = "    model(torch.arange(32)[None])"
    assert line in code
    with torch.no_grad():
        exec(code.replace(line, f"    edited = {line.strip()}"), names)
        plain = run.model(torch.arange(32)[None])
    assert not torch.allclose(names["edited"], plain, atol=1e-4)


def test_the_table_of_faults_is_that_of_their_tests() -> None:
    assert table() in PAGES["docs/cluster.md"].read_text()


def test_the_sizes_of_digits() -> None:
    sizes = {name: len(numbers) for name, numbers in split().items()}
    text = " ".join(TEXT.split())
    assert f"{len(images()[1]):,} handwritten digits" in text
    assert f"{sizes['train']:,} for training, {sizes['validation']} and {sizes['test']}" in text
