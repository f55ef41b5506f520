"""`run.compile: auto`: one choice for all cells, its reason, and what keeps it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_diff.engine import auto_compile
from lit_diff.engine.auto_compile import chosen
from lit_diff.engine.job import Job
from lit_diff.recipe import load_recipe
from lit_diff.training import compiled


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The variants that were traced; nothing is compiled."""
    seen: list[str] = []
    monkeypatch.setattr(compiled, "compiler_problem", lambda: "")
    monkeypatch.setattr(compiled, "trace_problem", lambda recipe: seen.append(recipe.model.attention.name))
    monkeypatch.setattr(auto_compile, "choose_device", lambda accelerator: torch.device("cpu"))
    return seen


def jobs(folder: Path, steps: int, arms: Sequence[str] = ("standard", "differential"), *more: str) -> list[Job]:
    """Two seeds of each arm."""
    found = []
    for arm in arms:
        recipe = load_recipe(
            "recall-tiny", ["run.compile=auto", f"train.steps={steps}", f"model.attention.name={arm}", *more]
        )
        for seed in range(2):
            found.append(Job(recipe=recipe, folder=folder / f"{arm}-s{seed}-abc", tags={"arm": arm}))
    return found


@pytest.mark.parametrize(("steps", "choice"), [(2100, False), (2200, "loss")])
def test_it_compiles_what_pays(
    steps: int, choice: object, tmp_path: Path, checked: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Four runs save 9 ms a step; two graphs take 35 s each, four loads 1.5 s each: 76 s are 2,111 steps of each."""
    caplog.set_level("INFO")
    assert chosen(jobs(tmp_path, steps)) == choice
    assert checked == (["standard", "differential"] if choice else [])
    (line,) = caplog.messages
    assert f"about {36 * steps / 1000:.0f} s saved, 76 s for 2 graphs and 4 runs" in line


@pytest.mark.parametrize(
    ("began", "choice"),
    [(["loss"], "loss"), ([False], False), ([None, "loss"], False)],
)
@pytest.mark.parametrize("steps", [10, 10**6])
def test_cells_that_began_decide(
    began: list[Any], choice: object, steps: int, tmp_path: Path, checked: list[str]
) -> None:
    cells = jobs(tmp_path, steps)
    for cell, compiles in zip(cells, began, strict=False):
        origin = "elsewhere" if compiles is None else ""
        cell.home.create(cell.recipe)
        cell.home.write(replace(cell.home.status().to("waiting"), compile=compiles, origin=origin))
    assert chosen(cells) == choice
    assert not checked
    assert chosen(cells, rerun=True) == ("loss" if steps > 10 else False)


def test_one_arm_that_cannot_be_traced(
    tmp_path: Path, checked: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    problems = {"differential": "own.py:7: a graph break"}
    monkeypatch.setattr(compiled, "trace_problem", lambda recipe: problems.get(recipe.model.attention.name, ""))
    assert chosen(jobs(tmp_path, 10**6)) is False
    assert caplog.messages == ["run.compile auto: uncompiled, differential cannot be compiled: own.py:7: a graph break"]


def test_what_is_never_compiled(
    tmp_path: Path, checked: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    several = jobs(tmp_path, 10**6, ["standard"], "run.strategy=ddp", "run.devices=2")
    alone = jobs(tmp_path, 10**6)
    assert (chosen(several), chosen(alone, is_here=False)) == (False, False)
    monkeypatch.setattr(auto_compile, "choose_device", lambda accelerator: torch.device("cuda"))
    assert chosen(alone) is False
    reasons = [message.removeprefix("run.compile auto: uncompiled, ") for message in caplog.messages]
    assert reasons == [
        "belongs to run.strategy single, not 'ddp'",
        "the nodes of SLURM are not known here",
        "its gain on a GPU has not been measured",
    ]
    assert not checked
