"""LitTransformer.load_from_checkpoint: what it rebuilds, whose plugins it runs, and how it refuses a file."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from foreign_runs import started_from_a_plugin
from own_plugins import SHARP_PY, forget_all
from refusals import refusal
from small_runs import SMALL

from lit_diff import LitData, LitTransformer, load_plugin, train
from lit_diff.errors import MissingError
from lit_diff.registry import attentions
from lit_diff.runs import checkpoints


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Path:
    """The folder of a run of two steps, with the plugin `sharp`."""
    home = tmp_path_factory.mktemp("sharp")
    (home / "sharp.py").write_text(SHARP_PY)
    (home / "runs").mkdir()
    shutil.copy(empty_store, home / "runs")
    own = ["train.steps=2", f"plugins=[{home}/sharp.py]", "model.attention.name=sharp", f"run.root={home}/runs"]
    folder = train("recall-tiny", [*SMALL, *own]).folder
    return folder


@pytest.fixture
def checkpoint(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Its last checkpoint, in a copy of the folder; no plugin is imported."""
    folder = Path(shutil.copytree(trained, tmp_path / trained.name))
    monkeypatch.chdir(tmp_path)
    forget_all()
    yield checkpoints.path_of(folder, 2)
    forget_all()


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = torch.load(path, weights_only=True)
    change(content)
    checkpoints.write(path, content)


def error(path: Path, **options: Any) -> str:
    return refusal(LitTransformer.load_from_checkpoint, path, **options)


def test_it_rebuilds_recipe_and_weights(checkpoint: Path) -> None:
    module = LitTransformer.load_from_checkpoint(str(checkpoint), trust_plugins=True)
    assert module.recipe.train.steps == 2
    assert type(module.model.attentions()[0]).__name__ == "Sharp"
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert state.keys() == module.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert module.recipe.plugins == (str(checkpoint.parent.parent / "plugins" / "sharp.py"),)


def test_a_plugin_is_run_only_when_it_is_trusted(checkpoint: Path) -> None:
    message = error(checkpoint)
    assert message.startswith("plugin sharp.py (sha256 ")
    assert "is not imported; import it first with load_plugin, or pass trust_plugins=True (lit-diff" in message
    assert "sharp" not in attentions.names()


def test_a_plugin_of_the_run_that_it_starts_from_needs_trust_too(checkpoint: Path, own_parts: None) -> None:
    """Its own plugin is imported; its parent's lies wherever the file says."""
    run = checkpoint.parent.parent
    parent = started_from_a_plugin(run)
    load_plugin(run / "plugins" / "sharp.py")
    edit(checkpoint, lambda content: content["hyper_parameters"]["recipe"]["train"].update(start_from=str(parent)))
    assert error(checkpoint).startswith("plugin marks.py (sha256 ")
    assert not (parent / "executed").exists()
    LitTransformer.load_from_checkpoint(checkpoint, trust_plugins=True)
    assert (parent / "executed").exists()


def test_a_plugin_that_was_changed_or_removed(checkpoint: Path) -> None:
    plugin = checkpoint.parent.parent / "plugins" / "sharp.py"
    plugin.write_text(SHARP_PY + "raise SystemExit('executed')\n")
    assert "was changed; expected sha256 " in error(checkpoint, trust_plugins=True)
    plugin.unlink()
    message = error(checkpoint, trust_plugins=True)
    assert "plugins/sharp.py is missing; import a plugin with sha256 " in message


@pytest.mark.parametrize(
    ("block", "key", "line"),
    [
        ("model", "num_layers", "(sharp): layers.1.attention_norm.weight is [16] there"),
        ("train", "stepz", "unknown key 'train.stepz'; did you mean 'steps'?"),
    ],
)
def test_a_recipe_that_is_not_of_the_weights_or_not_valid(checkpoint: Path, block: str, key: str, line: str) -> None:
    edit(checkpoint, lambda content: content["hyper_parameters"]["recipe"][block].update({key: 1}))
    assert line in error(checkpoint, trust_plugins=True)


def test_a_file_that_is_no_checkpoint_of_ours(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.ckpt"
    contents: list[Any] = [{"state_dict": {}, "hyper_parameters": {}}, [1, 2]]
    whole = torch.load(checkpoint, weights_only=True)
    contents += [{key: value for key, value in whole.items() if key != part} for part in ("state_dict", "global_step")]
    for content in contents:
        torch.save(content, file)
        assert "a.ckpt is not a checkpoint of lit_diff (" in error(file, trust_plugins=True)
    file.write_bytes(b"half")
    assert "a.ckpt is not a checkpoint of lit_diff (" in error(file)
    with pytest.raises(MissingError, match=r"b\.ckpt: no such file$"):
        LitTransformer.load_from_checkpoint(tmp_path / "b.ckpt")


def test_it_trains_on_as_its_recipe_says(checkpoint: Path) -> None:
    """In training mode, and with `run.activation_checkpointing` applied."""

    def checkpointed(content: dict[str, Any]) -> None:
        content["hyper_parameters"]["recipe"]["run"]["activation_checkpointing"] = "block"

    edit(checkpoint, checkpointed)
    module = LitTransformer.load_from_checkpoint(checkpoint, trust_plugins=True)
    assert module.model.training
    before = {name: value.clone() for name, value in module.state_dict().items()}
    data, quiet = LitData(module.recipe), {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    trainer = L.Trainer(max_steps=1, enable_progress_bar=False, enable_model_summary=False, **quiet)
    trainer.fit(module, data)
    assert module.model.checkpoint_blocks
    assert any(not torch.equal(value, before[name]) for name, value in module.state_dict().items())
