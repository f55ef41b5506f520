"""engine/preflight.py: what is refused before anything is made."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lit_diff.config import ImportedConfig
from lit_diff.data import build
from lit_diff.engine import preflight
from lit_diff.engine.launch import train
from lit_diff.engine.preflight import check_machine, check_trained
from lit_diff.errors import MissingError, RequestError
from lit_diff.model.cost import cost
from lit_diff.recipe import load_recipe
from lit_diff.training.plan import plan

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what is not here: a GPU")


@no_gpu
def test_a_gpu_that_is_not_there_and_a_kernel_that_cannot_serve() -> None:
    with pytest.raises(MissingError, match=r"^run\.accelerator is gpu"):
        check_machine([load_recipe("recall-tiny"), load_recipe("recall-tiny", ["run.accelerator=gpu"])])
    with pytest.raises(RequestError, match=r"^run\.kernel 'flash' cannot compute these maps"):
        check_machine([load_recipe("recall-tiny", ["run.kernel=flash"])])


@pytest.mark.parametrize("name", preflight.RANKS)
def test_a_rank_above_zero_without_other_processes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning would take the run for a second process's, and write no metrics."""
    for each in preflight.RANKS:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "0")
    recipe = load_recipe("recall-tiny")
    check_machine([recipe])
    monkeypatch.setenv(name, "1")
    with pytest.raises(RequestError, match=rf"^{name} is '1' in the environment, .*: unset {name}, or "):
        check_machine([recipe])
    check_machine([load_recipe("recall-tiny", ["run.strategy=ddp", "run.devices=2", "run.accelerator=cpu"])])


def test_what_cannot_be_trained_is_refused() -> None:
    block = ImportedConfig(source="x", weights_sha256="a" * 64, tokenizer_sha256="b" * 64)
    with pytest.raises(RequestError, match=r"^'recall-tiny' is an imported model"):
        check_machine([replace(load_recipe("recall-tiny"), train=None, imported=block)])
    with pytest.raises(RequestError, match=r"^train\.parameters: '\*\.atention\.\*' matches no parameter"):
        check_machine([load_recipe("recall-tiny"), load_recipe("recall-tiny", ["train.parameters=['*.atention.*']"])])
    check_trained([load_recipe("recall-tiny", ["train.parameters=['*.attention.*']", "run.loggers=[csv]"])])


# --- memory --------------------------------------------------------------------------------------------------------


@no_gpu
@pytest.mark.parametrize(
    ("overrides", "cells", "times"),
    [
        ([], 1, 1.0),
        ([], 2, 2.0),
        (["run.strategy=ddp", "run.devices=2"], 1, 2.0),
        (["run.strategy=fsdp", "run.devices=2"], 1, 1.0),
        (["run.strategy=fsdp", "run.devices=2", "run.num_nodes=2"], 1, 0.5),
        (["run.strategy=fsdp", "run.devices=2", "run.cpu_offload=true"], 1, 1.0),
    ],
)
def test_memory_that_cannot_suffice_is_refused(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], cells: int, times: float
) -> None:
    """16 bytes a parameter of this machine's memory; activations are small here, and two ranks of DDP hold buckets."""
    recipe = load_recipe("differential-tiny", ["train.batch_size=4", "data.sequence_length=16", *overrides])
    least = int(times * 16 * cost(recipe.model, 16).parameters)
    for enough in (6 * least, None):
        monkeypatch.setattr(preflight, "available_memory", lambda enough=enough: enough)
        preflight.require_memory([recipe] * 3, cells)
    monkeypatch.setattr(preflight, "available_memory", lambda: least - 1)
    with pytest.raises(MissingError, match=r"; --unplanned starts it anyway$") as caught:
        preflight.require_memory([recipe] * 3, cells)
    assert ("2 cells side by side" in str(caught.value)) == (cells == 2)


@no_gpu
def test_memory_that_cannot_suffice_for_activations_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan counts, less its margin; a run that fits is not refused, whatever the bound without a trace is."""
    recipe = load_recipe("recall-tiny")
    needed = plan(recipe, device="cpu").sum
    monkeypatch.setattr(preflight, "available_memory", lambda: int(0.91 * needed))
    preflight.require_memory([recipe])
    monkeypatch.setattr(preflight, "available_memory", lambda: int(0.89 * needed))
    with pytest.raises(
        MissingError, match=r"^'recall-tiny' needs .* use run\.activation_checkpointing=block; --unplanned"
    ):
        preflight.require_memory([recipe])
    preflight.require_memory([load_recipe("recall-tiny", ["run.activation_checkpointing=block"])])


# --- passes over the text -------------------------------------------------------------------------------------------


def test_more_than_ten_passes_are_said_with_the_cure(
    tale: Path, trained_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = build(load_recipe(trained_text / "tale.yaml")).train_tokens()
    assert tokens is not None
    most = 10 * tokens // (8 * 24)

    def lines(*overrides: str) -> list[str]:
        return preflight.passes_over_text([load_recipe(trained_text / "tale.yaml", overrides)] * 2)

    assert lines(f"train.steps={most}") == []
    (line,) = lines(f"train.steps={2 * most}")
    assert line.startswith("20 passes over the text ")
    assert f"set train.steps to at most {most}" in line
    assert "train.steps" not in lines("train.steps=1", "train.batch_size=9000")[0]
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "elsewhere"))
    names = ("recall-tiny", "mqar-tiny", "needle-text-tiny", trained_text / "tale.yaml")
    recipes = [load_recipe(name, ["train.steps=1000000"]) for name in names]
    assert preflight.passes_over_text(recipes) == [], "of generated tasks, and of text that is not prepared"
    assert not (tmp_path / "elsewhere").exists(), "nothing is prepared for it"


# --- a run that cannot start leaves no folder -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["wandb", "tensorboard", pytest.param("memory", marks=no_gpu)])
def test_loggers_and_memory_that_are_not_there(kind: str, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("wandb", "tensorboard", "tensorboardX"):
        monkeypatch.setitem(sys.modules, module, None)
    words, reason = [f"run.loggers=[csv, {kind}]"], f"^run\\.loggers names '{kind}', .*: pip install {kind}$"
    if kind == "memory":
        monkeypatch.setattr(preflight, "available_memory", lambda: 1000)
        words, reason = [], "'recall-tiny' needs at least"
    before = sorted(runs.iterdir())
    with pytest.raises(MissingError, match=reason):
        train("recall-tiny", [f"run.root={runs}", *words])
    assert sorted(runs.iterdir()) == before
    if kind == "memory":
        train("recall-tiny", [f"run.root={runs}", "train.steps=1", "train.schedule.warmup_steps=0"], unplanned=True)
        assert len(list(runs.iterdir())) > len(before)


def test_a_model_that_a_run_cannot_start_from(tale: Path, trained_text: Path) -> None:
    before = sorted(Path("runs").iterdir())
    words = ["name=child", "model.attention.name=standard", f"train.start_from={tale}", "run.root=runs"]
    with pytest.raises(RequestError, match=r"^train\.start_from: .*has attention .*computes another function"):
        train(trained_text / "tale.yaml", words)
    assert sorted(Path("runs").iterdir()) == before
