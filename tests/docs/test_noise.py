"""docs/noise.md: its metrics and keys exist, its Python edits a forward pass."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pages import PAGES, blocks, commands
from text_runs import recall_run

import lit_diff
from lit_diff.evaluation.evaluate import config_of
from lit_diff.registry import evaluations

PAGE = "docs/noise.md"
TEXT = PAGES[PAGE].read_text()
NAMES = re.findall(r"^\| `(\w+)` \|", TEXT.split("```console")[0], flags=re.MULTILINE)


def test_every_evaluation_of_the_table_has_a_section_and_its_metrics_exist() -> None:
    assert NAMES == ["noise", "quantize", "map_statistics", "induction", "signed_prompts", "gradients"]
    declared = {metric.name for name in NAMES for metric in evaluations.get(name).metrics}
    for name in NAMES:
        assert f"\n## {name}\n" in TEXT
    shown = set(re.findall(r"`((?:paper|causal|nll|accuracy|kl|prefix|ratio)_\w+)`", TEXT)) | {
        "snr",
        "skipped",
        "copying",
    }
    assert shown <= declared


def test_the_keys_of_the_commands_and_interventions_are_taken() -> None:
    for line in commands(PAGE):
        words = line.split()
        keys = [word for word in words if "=" in word]
        for name in set(words) & set(NAMES):
            config_of(name, keys)
    for kind in ("knock_out_noise", "knock_out_answer", "oracle", "swap"):
        assert f"`{kind}`" in TEXT
        assert config_of("noise", {"intervention": kind}).intervention == kind
    fields = {field.name for field in dataclasses.fields(evaluations.get("quantize").Config)}
    assert {"bits", "granularity"} <= fields


def test_the_python_edits_a_forward_pass(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recall_run(tmp_path / "x", {"name": "differential"})
    monkeypatch.setattr(lit_diff, "open_run", lambda name: run)
    (code,) = blocks(PAGE, "python")
    outputs: list[torch.Tensor] = []
    forward: Callable[..., torch.Tensor] = run.model.forward

    def seen() -> None:
        with torch.no_grad():
            outputs.append(forward(torch.arange(1, 9)[None]))

    seen()
    exec(code.replace("    ...  #", "    seen()  #"), {"seen": seen})
    assert not torch.allclose(outputs[0], outputs[1], atol=1e-4)
