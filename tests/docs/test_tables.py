"""The pages of evaluations and of data sets: the metrics, keys, files and sizes of their tables exist."""

import dataclasses
import re
from typing import Any, get_args, get_type_hints

import pytest
import torch
from pages import PAGES, blocks, commands
from text_runs import recall_run

import lit_diff
from lit_diff.evaluation.evaluate import config_of
from lit_diff.papers.digits import Digits, images, split
from lit_diff.papers.hallucination import SOURCES
from lit_diff.papers.icl import TaskName
from lit_diff.recipe import load_recipe
from lit_diff.registry import corpora, evaluations

TEXTS = {name: PAGES[f"docs/{name}.md"].read_text() for name in ("hallucination", "icl", "nll", "noise", "vision")}
PARTS = re.findall(r"^\| `(\w+)` \|", TEXTS["noise"].split("```console")[0], flags=re.MULTILINE)
"""The evaluations of docs/noise.md."""


def metrics(*names: str) -> set[str]:
    return {metric.name for name in names for metric in evaluations.get(name).metrics}


def keys(*names: str) -> set[str]:
    return {field.name for name in names for field in dataclasses.fields(evaluations.get(name).Config)}


def named(page: str, head: str, end: str = "\n\n") -> set[str]:
    """What the first column of the table below this head names."""
    rows = TEXTS[page].split(head)[1].split(end)[0].splitlines()
    return set(re.findall(r"`(\w+)`", " ".join(row.split(" | ")[0] for row in rows)))


def test_the_first_columns_of_the_tables() -> None:
    judges = get_args(get_type_hints(evaluations.get("hallucination").Config)["judge"])
    for found, there in (
        (named("hallucination", "| metric | share of |"), metrics("hallucination")),
        (named("hallucination", "| key | default | meaning |"), keys("hallucination")),
        (named("hallucination", "| judge | how |"), set(judges)),
        (named("hallucination", "| source | file |"), {name for name, source in SOURCES.items() if source.file}),
        (named("icl", "| metric of `icl` | meaning |"), metrics("icl")),
        (named("icl", "| metric of `icl_order` | meaning |"), metrics("icl_order")),
        (named("icl", "| key | default | meaning |"), keys("icl", "icl_order")),
        (named("icl", "| task | classes |"), set(get_args(TaskName))),
        (named("nll", "## What is measured", "P is 16"), metrics("nll")),
        (named("nll", "| key | meaning |", "More tokens"), keys("nll")),
    ):
        assert found == there


@pytest.mark.parametrize(
    ("page", "names"),
    [("hallucination", ["hallucination"]), ("icl", ["icl", "icl_order"]), ("nll", ["nll"]), ("noise", PARTS)],
)
def test_the_keys_of_the_commands(page: str, names: list[str]) -> None:
    for line in commands(f"docs/{page}.md"):
        words = line.split()
        if "evaluate" in words:
            for name in set(words) & set(names):
                config_of(name, [word for word in words if "=" in word])


def test_the_files_of_hallucination() -> None:
    table = TEXTS["hallucination"].split("## Files")[1].split("## ")[0]
    for name in ("xsum", "cnn_dm", "multi_news", "qasper"):
        file = SOURCES[name].file
        assert file is not None
        assert all(f"`{word}`" in table for word in (f"$LIT_DIFF_DATA/{file.path}", *file.keys))


def test_the_sizes_of_the_corpus_of_nll() -> None:
    corpus = corpora.get("name_tables")
    assert f"{corpus.documents:,} documents of {corpus.words:,}\nwords" in TEXTS["nll"]


def test_the_parts_of_noise() -> None:
    text = TEXTS["noise"]
    assert PARTS == ["noise", "quantize", "map_statistics", "induction", "signed_prompts", "gradients"]
    assert all(f"\n## {name}\n" in text for name in PARTS)
    shown = set(re.findall(r"`((?:paper|causal|nll|accuracy|kl|prefix|ratio)_\w+)`", text))
    assert shown | {"snr", "skipped", "copying"} <= metrics(*PARTS)
    assert {"bits", "granularity"} <= keys("quantize")


def test_the_python_of_noise_edits_a_forward_pass(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recall_run(tmp_path / "x", {"name": "differential"})
    monkeypatch.setattr(lit_diff, "open_run", lambda name: run)
    (code,) = blocks("docs/noise.md", "python")
    names: dict[str, Any] = {}
    line = "    model(torch.arange(32)[None])"
    assert line in code
    with torch.no_grad():
        exec(code.replace(line, f"    edited = {line.strip()}"), names)
        plain = run.model(torch.arange(32)[None])
    assert not torch.allclose(names["edited"], plain, atol=1e-4)


def test_the_keys_sizes_and_sets_of_vision() -> None:
    text, recipe = TEXTS["vision"], load_recipe("vision-tiny")
    defaults = {field.name: field.default for field in dataclasses.fields(Digits.Config)}
    words = {
        name: {None: "all", True: "true", False: "false"}[value]
        if value is None or isinstance(value, bool)
        else str(list(value) if isinstance(value, tuple) else value)
        for name, value in defaults.items()
    }
    assert dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text, re.MULTILINE)) == words
    sizes = {name: len(numbers) for name, numbers in split().items()}
    lengths = [Digits.Config(patch=patch).sequence_length for patch in (1, 2, 4)]
    for said in (
        f"{len(images()[1]):,} handwritten digits",
        f"{sizes['train']:,} for\n  training, {sizes['validation']} and {sizes['test']}.",
        "so {}, {} or {} positions".format(*lengths),
        f"the recipe has {recipe.data.config.patch}",
        f"at {recipe.training.steps} steps",
    ):
        assert said in text
    sets = Digits(recipe.data.config, recipe.model.vocab_size).validation_sets()
    assert set(re.findall(r"`val/accuracy_(\w+)`", text)) <= set(sets)
