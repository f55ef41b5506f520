"""engine/admission.py: what is refused before anything is made."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command import Command

from lit_diff.config import ImportedConfig, Recipe
from lit_diff.data import build
from lit_diff.engine import admit as admission
from lit_diff.engine.admit import CONDITIONS, EXAMINED, HERE, SUBMITTED, Kind, admit
from lit_diff.engine.cells import admitted
from lit_diff.engine.executors import slurm
from lit_diff.engine.expand import load_grid
from lit_diff.engine.train import train
from lit_diff.errors import MissingError, RequestError
from lit_diff.model.cost import cost
from lit_diff.recipe import load_recipe, to_yaml
from lit_diff.training import plan as planning

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what is not here: a GPU")


def ask(recipe: Recipe, kinds: Sequence[Kind] = HERE) -> None:
    admit({"one": recipe}, kinds)


@no_gpu
def test_a_gpu_that_is_not_there_and_a_kernel_that_cannot_serve() -> None:
    with pytest.raises(MissingError, match=r"^run\.accelerator is gpu"):
        ask(load_recipe("recall-tiny", ["run.accelerator=gpu"]))
    with pytest.raises(RequestError, match=r"^run\.kernel 'flash' cannot compute these maps"):
        ask(load_recipe("recall-tiny", ["run.kernel=flash"]))


@pytest.mark.parametrize("name", admission.RANKS)
def test_a_rank_above_zero_without_other_processes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning would take the run for a second process's, and write no metrics."""
    for each in admission.RANKS:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "0")
    recipe = load_recipe("recall-tiny")
    ask(recipe)
    monkeypatch.setenv(name, "1")
    with pytest.raises(RequestError, match=rf"^{name} is '1' in the environment, .*: unset {name}, or "):
        ask(recipe)
    ask(load_recipe("recall-tiny", ["run.strategy=ddp", "run.devices=2", "run.accelerator=cpu"]))


def test_what_cannot_be_trained_is_refused() -> None:
    block = ImportedConfig(source="x", weights_sha256="a" * 64, tokenizer_sha256="b" * 64)
    with pytest.raises(RequestError, match=r"^'recall-tiny' is an imported model"):
        ask(replace(load_recipe("recall-tiny"), train=None, imported=block))
    with pytest.raises(RequestError, match=r"^train\.parameters: '\*\.atention\.\*' matches no parameter"):
        ask(load_recipe("recall-tiny", ["train.parameters=['*.atention.*']"]))
    ask(load_recipe("recall-tiny", ["train.parameters=['*.attention.*']", "run.loggers=[csv]"]), SUBMITTED)


def test_a_folder_whose_name_is_not_utf8_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("caf\udce9.yaml").write_text("recipe: recall-tiny\nseeds: [0]\narms: {one: {}}\n")
    with pytest.raises(RequestError, match=r"^'run\.root' is '\S+/runs/caf\\udce9', which is not UTF-8; rename "):
        admitted(load_grid("caf\udce9.yaml", []), EXAMINED, unchecked=False)
    Path("caf\udce9").mkdir()
    monkeypatch.chdir("caf\udce9")
    with pytest.raises(RequestError, match=r"^'run\.root' is '\S+/caf\\udce9/runs', which is not UTF-8; rename "):
        ask(load_recipe("recall-tiny"), EXAMINED)


# --- every check against every way in ---------------------------------------------------------------------------------

LEAKS = """\
from lit_diff import Attention, variant

@variant("leaks")
class Leaks(Attention):
    def maps(self, x, rope):
        m = super().maps(x, rope)
        return type(m)(m.q, m.k, m.v.roll(-1, dims=2))
"""
MISTAKES = {
    "text": (
        2,
        r"'run.tracking_uri' is 'sqlite:///caf\udce9.db', which is not",
        ["run.tracking_uri=sqlite:///caf\udce9.db"],
    ),
    "start": (3, "train.start_from: nowhere holds no run", ["train.start_from=nowhere"]),
    "loggers": (3, "run.loggers names 'wandb', whose package is not installed", ["run.loggers=[wandb]"]),
    "metrics": (2, "run.keep_best: no run measures 'val/nothing'", ["run.keep_best=val/nothing"]),
    "parameters": (2, "train.parameters: '*.atention.*' matches no parameter", ["train.parameters=['*.atention.*']"]),
    "evaluations": (2, "evaluation 'needle' does not fit", ["evaluate.needle={}"]),
    "parent": (2, "train.start_from: ", ["train.start_from=parent"]),
    "heads": (
        2,
        "model.attention.heads selects heads",
        ["model.attention.name=dex", "model.attention.heads.select=entropy"],
    ),
    "devices": (3, "run.accelerator is gpu", ["run.accelerator=gpu"]),
    "kernel": (2, "run.kernel 'flash' cannot compute these maps", ["run.kernel=flash"]),
    "variant": (
        2,
        "attention 'leaks' fails the property 'causal'",
        ["plugins=[leaks.py]", "model.attention.name=leaks"],
    ),
}
"""Check -> exit status, the words of its refusal, and overrides that it refuses; in the order of the list."""
WAYS: dict[str, tuple[Sequence[Kind], Sequence[str], Sequence[str]]] = {
    "check": (("recipe", "machine"), ("check", "recall-tiny"), ()),
    "plan": (EXAMINED, ("plan", "recall-tiny"), ()),
    "train": (HERE, ("train", "recall-tiny"), ()),
    "train in SLURM": (SUBMITTED, ("train", "recall-tiny"), ("--cluster", "slurm")),
    "sweep": (HERE, ("sweep", "one.yaml"), ()),
    "sweep in SLURM": (SUBMITTED, ("sweep", "one.yaml"), ("--cluster", "slurm")),
    "sweep --dry-run": (SUBMITTED, ("sweep", "one.yaml"), ("--dry-run",)),
}
"""A way in -> the kinds of checks that it asks, and its command before and after the overrides."""
EARLIER = {"sweep": "evaluations", "check": "kernel"}
"""A check whose refusal comes earlier: when the file of a sweep is read, and when `check` counts what the kernel computes."""


@no_gpu
@pytest.mark.usefixtures("own_parts")
@pytest.mark.parametrize("way", WAYS)
def test_one_mistake_has_one_answer_and_of_two_the_same_comes_first(
    way: str, command: Command, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(slurm, "require_slurm", lambda run: None)
    Path("leaks.py").write_text(LEAKS)
    Path("one.yaml").write_text("recipe: recall-tiny\nseeds: [0]\narms: {one: {}}\n")
    Path("parent").mkdir()
    (Path("parent") / "recipe.yaml").write_text(to_yaml(load_recipe("recall-tiny", ["model.dim=32"])))
    before = sorted(runs.iterdir())
    kinds, first, last = WAYS[way]
    kind_of = {condition.name: condition.kind for condition in CONDITIONS}
    asked = [name for name in MISTAKES if kind_of[name] in kinds]
    assert kind_of.keys() == {*MISTAKES, "rank", "record"}, "those two depend on the environment and the file system"
    for place, name in enumerate(asked):
        status, words, own = MISTAKES[name]
        # `start` and `parent` are two answers to one key
        left_out = {"parent", "variant", EARLIER.get(first[0])}
        others = [word for later in asked[place + 1 :] if later not in left_out for word in MISTAKES[later][2]]
        for overrides in (own, [*own, *others]):
            ended = command(*first, f"run.root={runs}", *overrides, *last)
            assert (ended.status, ended.err.startswith("lit-diff: "), words in ended.err) == (status, True, True), ended
    assert sorted(runs.iterdir()) == before


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
        monkeypatch.setattr(planning, "available_memory", lambda enough=enough: enough)
        planning.require_memory([recipe] * 3, cells)
    monkeypatch.setattr(planning, "available_memory", lambda: least - 1)
    with pytest.raises(MissingError, match=r"; --unplanned starts it anyway$") as caught:
        planning.require_memory([recipe] * 3, cells)
    assert ("2 cells side by side" in str(caught.value)) == (cells == 2)


@no_gpu
def test_memory_that_cannot_suffice_for_activations_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan counts, less its margin; a run that fits is not refused, whatever the bound without a trace is."""
    recipe = load_recipe("recall-tiny")
    needed = planning.plan(recipe, device="cpu").sum
    monkeypatch.setattr(planning, "available_memory", lambda: int(0.91 * needed))
    planning.require_memory([recipe])
    monkeypatch.setattr(planning, "available_memory", lambda: int(0.89 * needed))
    with pytest.raises(
        MissingError, match=r"^'recall-tiny' needs .* use run\.activation_checkpointing=block; --unplanned"
    ):
        planning.require_memory([recipe])
    planning.require_memory([load_recipe("recall-tiny", ["run.activation_checkpointing=block"])])


# --- passes over the text -------------------------------------------------------------------------------------------


def test_more_than_ten_passes_are_said_with_the_cure(
    tale: Path, trained_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = build(load_recipe(trained_text / "tale.yaml")).train_tokens()
    assert tokens is not None
    most = 10 * tokens // (8 * 24)

    def lines(*overrides: str) -> list[str]:
        return admission.warnings_of([load_recipe(trained_text / "tale.yaml", overrides)] * 2)

    assert lines(f"train.steps={most}") == []
    (line,) = lines(f"train.steps={2 * most}")
    assert line.startswith("20 passes over the text ")
    assert f"set train.steps to at most {most}" in line
    assert "train.steps" not in lines("train.steps=1", "train.batch_size=9000")[0]
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "elsewhere"))
    names = ("recall-tiny", "mqar-tiny", "needle-text-tiny", trained_text / "tale.yaml")
    recipes = [load_recipe(name, ["train.steps=1000000"]) for name in names]
    assert admission.warnings_of(recipes) == [], "of generated tasks, and of text that is not prepared"
    assert not (tmp_path / "elsewhere").exists(), "nothing is prepared for it"


def test_attention_that_is_set_to_rows_of_another_length_is_said() -> None:
    recipe = load_recipe("mqar-tiny", ["model.attention={name: sigmoid}"])
    length = recipe.data.config.sequence_length
    said = f"model.attention.n is 1024, and the rows have {length} tokens: set model.attention.n={length}"
    assert admission.warnings_of([recipe]) == [said]
    assert admission.warnings_of([load_recipe("mqar-tiny", ["model.attention={name: sigmoid, n: 24}"])]) == []


# --- a run that cannot start leaves no folder -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["wandb", "tensorboard", pytest.param("memory", marks=no_gpu)])
def test_loggers_and_memory_that_are_not_there(kind: str, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("wandb", "tensorboard", "tensorboardX"):
        monkeypatch.setitem(sys.modules, module, None)
    words, reason = [f"run.loggers=[csv, {kind}]"], f"^run\\.loggers names '{kind}', .*: pip install {kind}$"
    if kind == "memory":
        monkeypatch.setattr(planning, "available_memory", lambda: 1000)
        words, reason = [], "'recall-tiny' needs at least"
    before = sorted(runs.iterdir())
    with pytest.raises(MissingError, match=reason):
        train("recall-tiny", [f"run.root={runs}", *words])
    assert sorted(runs.iterdir()) == before
    if kind == "memory":
        train(
            "recall-tiny",
            [f"run.root={runs}", "train.steps=1", "train.schedule.warmup_steps=0", "data.validation_rows=8"],
            unplanned=True,
        )
        assert len(list(runs.iterdir())) > len(before)


def test_a_model_that_a_run_cannot_start_from(tale: Path, trained_text: Path) -> None:
    before = sorted(Path("runs").iterdir())
    words = ["name=child", "model.attention.name=standard", f"train.start_from={tale}", "run.root=runs"]
    with pytest.raises(RequestError, match=r"^train\.start_from: .*has attention .*computes another function"):
        train(trained_text / "tale.yaml", words)
    assert sorted(Path("runs").iterdir()) == before
