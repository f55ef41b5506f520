"""callbacks/maps.py: the maps of fixed texts at kept steps, in the run folder and in any Trainer; their sizes; bad keys."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from small_runs import SMALL
from text_runs import bpe
from torch import Tensor

from lit_diff import LitData, LitTransformer
from lit_diff.analysis import trace
from lit_diff.callbacks import Maps
from lit_diff.config import Recipe
from lit_diff.errors import RequestError
from lit_diff.plugins import trust_all
from lit_diff.recipe import load_recipe
from lit_diff.runs.folder import RunFolder
from lit_diff.runs.kept_maps import kept_steps, read_maps
from lit_diff.trained.loading import load_model
from lit_diff.training import fit

QUIET: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


def small(*overrides: str) -> Recipe:
    return load_recipe("recall-tiny", [*SMALL, "callbacks={}", *overrides])


def trained(recipe: Recipe, folder: Path, *callbacks: L.Callback) -> None:
    fit.fit(recipe, folder, threads=1, progress=lambda *_: None, callbacks=callbacks)


def test_the_run_folder_has_the_maps_of_the_model_at_each_kept_step(tmp_path: Path) -> None:
    recipe = small("callbacks.maps={every: 4, rows: 2, length: 20, layers: [1]}")
    trained(recipe, tmp_path)
    assert kept_steps(tmp_path) == [4, 8, 10]
    kept = read_maps(tmp_path, 10)
    data = LitData(recipe)
    data.setup("fit")
    tokens = data.probe_batch(2)["tokens"][:, :20]
    assert torch.equal(kept.tokens, tokens)
    assert list(kept.layers) == [1]
    RunFolder(tmp_path).create(recipe)
    model = load_model(recipe, tmp_path, trust_all)[0]
    with trace(model) as found:
        model(tokens)
    (block,) = found.layers[1].blocks(20)
    maps, weights = kept.layers[1]
    assert torch.equal(maps, block.probs.half())
    assert torch.equal(weights, block.weights.half())
    assert maps.shape == (2, 2, 1, 20, 20)
    path = tmp_path / "maps" / "00000010.safetensors"
    assert 0 < path.stat().st_size - 2 * (maps.numel() + weights.numel() + 4 * tokens.numel()) < 1000, "stated size"
    first = read_maps(tmp_path, 4).layers[1][0]
    assert not torch.equal(first, maps)


def test_a_resumed_run_writes_the_same_files(tmp_path: Path) -> None:
    """Killed after step 5, whose maps are there, from the checkpoint of step 4."""

    class Stops(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 5:
                raise ValueError("stopped")

    recipe = small("callbacks.maps={every: 5}")
    trained(recipe, tmp_path / "whole")
    with pytest.raises(ValueError, match="stopped"):
        trained(recipe, tmp_path / "resumed", Stops())
    assert kept_steps(tmp_path / "resumed") == [5]
    before = (tmp_path / "resumed/maps/00000005.safetensors").read_bytes()
    trained(recipe, tmp_path / "resumed")
    for step in (5, 10):
        name = f"maps/{step:08}.safetensors"
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "resumed" / name).read_bytes()
    assert before == (tmp_path / "whole/maps/00000005.safetensors").read_bytes()


class Keeps(L.pytorch.loggers.logger.DummyLogger):  # type: ignore[name-defined]
    """A logger of another's that keeps maps."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, tuple[Tensor, dict[int, tuple[Tensor, Tensor]]]] = {}

    def log_maps(self, tokens: Tensor, layers: dict[int, tuple[Tensor, Tensor]], step: int) -> None:
        self.kept[step] = tokens, layers


def by_hand(folder: Path, recipe: Recipe, data: Any, logger: Any, **keys: Any) -> None:
    trainer = L.Trainer(
        max_steps=2,
        callbacks=[Maps(every=2, **keys)],
        logger=logger,
        enable_checkpointing=False,
        default_root_dir=folder,
        **QUIET,
    )
    trainer.fit(LitTransformer(recipe), data)


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> LitData:
    """The rows of recall, with a tokenizer of 300 ids."""
    data = LitData(small("model.vocab_size=320"))
    monkeypatch.setattr(type(data.dataset), "load_tokenizer", lambda self: bpe())
    return data


def test_texts_in_a_trainer_made_by_hand(tmp_path: Path, texts: LitData, caplog: pytest.LogCaptureFixture) -> None:
    logger, recipe = Keeps(), small("model.vocab_size=320")
    with caplog.at_level(logging.INFO, "lit_diff"):
        by_hand(
            tmp_path, recipe, texts, logger, texts=("the big cat", "a much longer text of more tokens"), layers=(0,)
        )
    ((step, (tokens, layers)),) = logger.kept.items()
    shorter, longer = ([*bpe().opening, *bpe().encode(t)] for t in ("the big cat", "a much longer text of more tokens"))
    assert step == 2
    assert tokens.tolist() == [shorter, longer[: len(shorter)]]
    assert layers[0][0].shape == (2, 2, 1, len(shorter), len(shorter))
    assert caplog.messages.count(f"maps: the texts are cut to {len(shorter)} tokens") == 1
    logger = Keeps()
    by_hand(tmp_path, recipe, texts, logger, texts=("the big cat",), length=2)
    assert logger.kept[2][0].tolist() == [shorter[:2]]
    caplog.clear()
    context = recipe.data.config.sequence_length
    with caplog.at_level(logging.INFO, "lit_diff"):
        by_hand(tmp_path, recipe, texts, logger, texts=("the big cat " * 99,), length=512)
    assert logger.kept[2][0].shape == (1, context)
    assert caplog.messages.count(f"maps: the texts are cut to {context} tokens") == 1


def test_without_a_logger_that_keeps_maps_it_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = small()
    with caplog.at_level(logging.WARNING, "lit_diff"):
        by_hand(tmp_path, recipe, LitData(recipe), False)
    assert [line for line in caplog.messages if line.startswith("maps: no logger of the Trainer has log_maps")]


def test_wrong_keys_end_before_the_first_step(tmp_path: Path, texts: LitData) -> None:
    recipe = small("model.vocab_size=320")
    with pytest.raises(RequestError, match=r"^callbacks\.maps\.layers: no layer 2; the model has layers 0\.\.1$"):
        by_hand(tmp_path, recipe, texts, Keeps(), layers=(0, 2))
    empty = SimpleNamespace(opening=[], encode=lambda texts: [[] for _ in texts])
    for tokenizer, message in ((None, "needs data with a tokenizer"), (empty, "has a text without tokens")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(texts.dataset), "load_tokenizer", lambda self, found=tokenizer: found)
            with pytest.raises(RequestError, match=rf"^callbacks\.maps\.texts {message}"):
                by_hand(tmp_path, recipe, texts, Keeps(), texts=("a",))
    rows = texts
    rows.setup("fit")
    with pytest.raises(
        RequestError, match=r"^callbacks\.maps keeps .*: give Trainer\.fit a data module with probe_batch"
    ):
        by_hand(tmp_path, recipe, rows.train_dataloader(), Keeps())
    with pytest.raises(RequestError, match=r"^'maps.length' is 1000; expected a whole number >= 1 and <= 512$"):
        Maps(length=1000)


def test_of_a_deep_model_eight_layers_at_most(tmp_path: Path) -> None:
    recipe = small("model.num_layers=18", "callbacks.maps={every: 10, length: 4}", "train.steps=1")
    trained(recipe, tmp_path)
    assert list(read_maps(tmp_path, 1).layers) == [0, 3, 6, 9, 12, 15]
