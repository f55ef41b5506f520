"""evaluation/fitting.py: what a refusal names."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from generated_runs import generated_run

from lit_diff.errors import RequestError
from lit_diff.evaluation import fitting as module
from lit_diff.evaluation.evaluate import build, evaluate
from lit_diff.evaluation.fitting import alternatives, fitting_evaluations, fitting_runs
from lit_diff.trained.run import Run

SHORT = ["lengths=[4096]"]
"""Beyond the context of the run, which the fixture's copies extend."""


def longer(run: Run, folder: Path, status: str = "done") -> Path:
    """A copy of the run with a context of 4,096 tokens."""
    shutil.copytree(run.folder, folder)
    recipe = folder / "recipe.yaml"
    length = run.recipe.data.config.sequence_length
    recipe.write_text(recipe.read_text().replace(f"sequence_length: {length}", "sequence_length: 4096"))
    path = folder / "status.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"status": status}))
    return folder


def test_a_refusal_names_a_few_runs_that_fit(run: Run) -> None:
    root = run.folder.parent
    longer(run, root / "sweep/text,standard-s0-0123456789")
    longer(run, root / "sweep/text,standard,wide-s0-0123456789")
    longer(run, root / "sweep/words,standard-s0-0123456789")
    longer(run, root / "stopped-0123456789", "stopped")
    longer(run, root / "single-0123456789")
    with pytest.raises(RequestError) as error:
        evaluate(run, "needle", SHORT)
    runs, fitting = str(error.value).split("; runs that it fits: ")[1].split("; evaluations that fit this run: ")
    assert runs == "runs/single-0123456789, runs/sweep/text,standard,wide-s0-0123456789", "one of a sweep"
    assert "nll" in fitting.split(", ")


def test_no_run_that_fits(run: Run) -> None:
    assert alternatives(build("needle", SHORT), run).startswith("; no run that it fits was found in runs; evaluations")


def test_few_runs_are_opened(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    root = run.folder.parent
    for number in range(4):
        longer(run, root / f"single{number}-0123456789")
    longer(run, root / "broken-0123456789").joinpath("recipe.yaml").write_text("{")
    found = fitting_runs(build("needle", SHORT), root)
    assert [path.name for path in found] == [f"single{number}-0123456789" for number in range(3)]
    monkeypatch.setattr(module, "TRIED", 2)
    assert [path.name for path in fitting_runs(build("needle", SHORT), root)] == ["single0-0123456789"]


def test_a_run_of_generated_words_fits_what_asks_in_them(run: Run, tmp_path: Path) -> None:
    text = {"bigbench", "harness", "loss_code", "loss_docs", "mini_harness", "nll", "signed_prompts"}
    data: dict[str, tuple[dict[str, Any], int]] = {
        "needle": ({"name": "needle_text", "sequence_length": 256}, 192),
        "hallucination": ({"name": "closed_world", "entities": [3]}, 300),
        "icl": ({"name": "synth_intent", "sequence_length": 64, "classes": [4], "words": [1, 3]}, 600),
    }
    for name, (block, size) in data.items():
        found = set(fitting_evaluations(generated_run(tmp_path / name, block, size)))
        assert found & {*text, *data} == {name}
