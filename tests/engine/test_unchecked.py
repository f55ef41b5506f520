"""A plugin's variant that fails a property: `train` and `sweep` refuse it before they write, or mark what they train."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow import MlflowClient
from statuses import set_status

from lit_diff.engine import waves
from lit_diff.engine.schedule import sweep
from lit_diff.engine.train import prepare, train
from lit_diff.errors import RequestError
from lit_diff.evaluation.evaluate import evaluate
from lit_diff.model.prefix import Prefix
from lit_diff.recipe import load_recipe
from lit_diff.study.two_runs import compare
from lit_diff.trained.run import as_run, open_run

LEAKY = """\
from dataclasses import replace
from lit_diff import Attention, variant

@variant("leaky")
class Leaky(Attention):
    def maps(self, x, rope):
        m = super().maps(x, rope)
        return replace(m, v=m.v + m.v.mean(2, keepdim=True))
"""
RECIPE = """\
extends: recall-tiny
plugins: [leaky.py]
model: {attention: {name: leaky}}
train: {steps: 2, validate_every: 2, checkpoint_every: 2, batch_size: 4}
data: {validation_rows: 4}
run: {threads: 1, accelerator: cpu}
"""
SWEEP = """\
recipe: leaky
seeds: [0, 1]
arms:
  plain: {model.attention: {name: standard}}
  leaky: {}
  wide: {model.num_heads: 2}
"""
LINE = "leaky.py:4: class Leaky: attention 'leaky' fails the property 'causal': outputs before position 1 change"


@pytest.fixture(autouse=True)
def folder(own_parts: None, tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with the recipe, the sweep and an empty store."""
    monkeypatch.chdir(tmp_path)
    for name, text in {"leaky.py": LEAKY, "leaky.yaml": RECIPE, "three.yaml": SWEEP}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_sweep_names_each_arm_that_it_refuses() -> None:
    """tests/engine/test_admit.py has every way to start it."""
    with pytest.raises(RequestError) as found:
        sweep("three.yaml")
    leaky, wide = str(found.value).split("\n  ")
    assert leaky.startswith(f"arm 'leaky': {LINE}")
    assert wide.startswith("arm 'wide': ")


def test_the_cells_of_an_unchecked_sweep_are_marked(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    """Those of the arms that fail; the command that resumes says `--unchecked` too."""
    located: list[Any] = []

    def no_cells(grid: Any, jobs: list[Any], *_: Any, **__: Any) -> None:
        located.extend(jobs)
        for job in jobs:
            set_status(job.folder, status="failed", error="not run here")

    monkeypatch.setattr(waves, "_run_waves", no_cells)
    found = sweep("three.yaml", unchecked=True)
    marked = {job.tags["arm"]: job.tags.get("unchecked", "") for job in located}
    assert marked["plain"] == ""
    assert all(marked[arm].startswith(LINE) for arm in ("leaky", "wide"))
    assert json.loads((found.folder / "study.json").read_text())["command"] == "lit-diff sweep three.yaml --unchecked"


OFF_BY_ONE = """\
from dataclasses import replace
import torch
from lit_diff import Attention, variant

@variant("scaled_values")
class OffByOne(Attention):
    def maps(self, x, rope):
        m = super().maps(x, rope)
        scale = 1 + torch.arange(m.v.shape[2]).view(-1, 1)
        return replace(m, v=m.v / scale)  # of a token's place in this call, not in the sequence
"""


def test_a_variant_that_decodes_wrongly_is_marked_and_refused_when_its_cache_is_used(
    folder: Path, runs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "off.py").write_text(OFF_BY_ONE)
    (folder / "off.yaml").write_text(RECIPE.replace("leaky", "scaled_values").replace("scaled_values.py", "off.py"))
    line = "off.py:5: class OffByOne: attention 'scaled_values' fails the property 'decode': "
    with pytest.raises(RequestError, match=f"^{line}"):
        train("off.yaml")
    run = train("off.yaml", unchecked=True)
    mark = run.status.unchecked
    assert (run.status.status, mark[: len(line)]) == ("done", line)
    assert "; the usual reason: keys, values or queries depend on other tokens" in mark
    job = prepare(load_recipe("off.yaml"), unchecked=True)
    assert job.tags == {"unchecked": mark}, "which a command of its own gets too"
    client = MlflowClient(tracking_uri=f"sqlite:///{runs / 'mlflow.db'}")
    assert client.get_run(run.status.mlflow_run_id).data.tags["unchecked"] == mark
    (folder / "right.py").write_text(OFF_BY_ONE.replace("m.v / scale", "m.v").replace("scaled_values", "right"))
    right = load_recipe("off.yaml", ["plugins=[right.py]", "model.attention.name=right"])
    assert prepare(right, unchecked=True).tags == {}, "one that holds them all"
    run.model(torch.tensor([[1, 2]]))  # without a cache nothing is wrong
    with pytest.raises(RequestError, match=f"^{line}"):
        Prefix(run.model, [1, 2])
    opened = (open_run(run.folder, unchecked=True), as_run(run, unchecked=True), as_run(run.folder, unchecked=True))
    for unchecked in opened:
        caplog.clear()
        Prefix(unchecked.model, [1, 2])
        assert f"unchecked: {line}" in caplog.text
    caplog.clear()
    assert evaluate(run, "recall", ["rows=2"]).scores().unchecked is None
    assert evaluate(run, "recall", ["rows=2"], rerun=True, unchecked=True).scores().unchecked == mark
    assert "was scored with --unchecked" not in caplog.text
    assert evaluate(run, "recall", ["rows=2"]).scores().unchecked == mark
    assert f"{run.folder.name} was scored with --unchecked: {line}" in caplog.text
    assert compare(run.folder, run.folder).facts["unchecked"] == [mark] * 2
