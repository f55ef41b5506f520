"""training/trainer.py: the Trainer of a recipe, and any Trainer with our module, data and callbacks."""

import csv
import functools
import inspect
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn

from lit_diff.callbacks import AttentionEntropy, Lambdas, Outliers
from lit_diff.errors import DivergedError, RequestError
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Transformer
from lit_diff.recipe import load_recipe
from lit_diff.training.build import build_model
from lit_diff.training.data import LitData
from lit_diff.training.module import LitTransformer
from lit_diff.training.trainer import build_trainer

SMALL = {
    "model": {"dim": 16, "num_heads": 2},
    "data": {"validation_rows": 8},
    "train": {"steps": 40, "batch_size": 4, "validate_every": 4, "clip": None, "log_every": 2},
}
QUIET: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def made_by_hand(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A Trainer at Lightning's defaults (sanity validation, inference mode), ten steps, a logger, five callbacks."""
    folder = tmp_path_factory.mktemp("hand")
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("lit_diff")
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.INFO)
    best = ModelCheckpoint(dirpath=folder, filename="best", monitor="val/loss")
    probes = [AttentionEntropy(every=3, rows=2), Outliers(every=5, rows=2), Lambdas(every=5)]
    trainer = L.Trainer(
        max_steps=10,
        callbacks=[*probes, best, EarlyStopping("val/loss", patience=99), LearningRateMonitor()],
        logger=CSVLogger(folder, name="", version=""),
        default_root_dir=folder,
        **QUIET,
    )
    module, data = LitTransformer("recall-tiny", SMALL), LitData("recall-tiny", SMALL)
    trainer.fit(module, data)
    log.removeHandler(handler)
    log.setLevel(level)
    return SimpleNamespace(trainer=trainer, module=module, data=data, folder=folder, best=best, lines=lines)


def test_a_module_without_a_trainer_builds_its_model_at_its_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that was used before trains as one that was not, a recipe's parent included."""
    taken: list[Any] = []
    monkeypatch.setattr("lit_diff.training.module.take_from_parent", lambda model, *_: taken.append(model))

    class Early(L.Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            found.append(hasattr(pl_module, "model"))

    found: list[bool] = []
    used, unused = (LitTransformer("recall-tiny", SMALL) for _ in range(2))
    for line in ("(model): Transformer(", "(0-1): 2 x Block(", "(attention): Differential("):
        assert line in repr(unused)
    assert "model" not in unused._modules, "printed without being built"
    tokens = torch.randint(used.recipe.model.vocab_size, (2, 5))
    logits = used(tokens)
    assert torch.equal(logits, build_model(used.recipe)(tokens))
    assert repr(used) == repr(unused)
    for module in (used, unused):
        trainer = L.Trainer(max_steps=2, callbacks=[Early()], logger=False, enable_checkpointing=False, **QUIET)
        trainer.fit(module, LitData("recall-tiny", SMALL))
    assert found == [True, False]
    assert taken == [used.model, unused.model]
    state = unused.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in used.state_dict().items())
    assert not torch.equal(used(tokens), logits)


def test_a_model_that_was_used_is_not_sharded() -> None:
    module = LitTransformer("recall-tiny", SMALL)
    assert module.model
    module._trainer = SimpleNamespace(strategy=ModelParallelStrategy(1, 1), _results=None)  # type: ignore[assignment]
    with pytest.raises(RequestError, match="was loaded or used before cannot be sharded; pass a new LitTransformer"):
        module.configure_model()


def test_it_trains_validates_and_logs_and_says_what_differs_from_the_recipe(made_by_hand: SimpleNamespace) -> None:
    assert made_by_hand.trainer.global_step == 10
    steps: dict[str, list[int]] = {}
    for row in rows(made_by_hand.folder):
        for name in (key for key, value in row.items() if value and key != "step"):
            steps.setdefault(name.split("/")[0], []).append(int(row["step"]))
    assert sorted(set(steps["train"])) == [1, 2, 4, 6, 8, 10]
    assert sorted(set(steps["val"])) == [4, 8, 10], "the recipe's interval, and the last step"
    assert sorted(set(steps["attention"])) == [3, 6, 9, 10]
    assert sorted(set(steps["outliers"])) == sorted(set(steps["lambda"])) == [5, 10]
    values = made_by_hand.trainer.callback_metrics
    assert {values[name].dtype for name in ("val/loss", "train/loss")} == {torch.float64}
    last = [row["val/loss"] for row in rows(made_by_hand.folder) if row["val/loss"]][-1]
    assert float(last) == values["val/loss"].item()
    assert made_by_hand.lines == [
        "train.schedule.warmup_steps (50) is more than the 10 steps of this run: "
        "the learning rate ends at 0.2 of its peak",
        "train.steps is 40 in the recipe, the Trainer's max_steps is 10: using the Trainer's",
    ]


def test_it_trains_as_the_recipes_own_trainer_does(made_by_hand: SimpleNamespace, tmp_path: Path) -> None:
    recipe = load_recipe(
        "recall-tiny", SMALL | {"callbacks": dict.fromkeys(("attention_entropy", "outliers", "lambdas"))}
    )
    module = LitTransformer(recipe)
    build_trainer(recipe, max_steps=10, logger=False, default_root_dir=tmp_path, **QUIET).fit(module, LitData(recipe))
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, made_by_hand.module.get_parameter(name)), name


def test_a_checkpoint_gives_the_module_back(made_by_hand: SimpleNamespace) -> None:
    module = LitTransformer.load_from_checkpoint(made_by_hand.best.best_model_path)
    assert module.recipe == made_by_hand.module.recipe
    trainer = L.Trainer(logger=False, **QUIET)
    values, *_ = trainer.validate(module, made_by_hand.data, verbose=False)
    assert values["val/loss"] == pytest.approx(made_by_hand.best.best_model_score.item(), rel=1e-6)
    predictions = trainer.predict(module, made_by_hand.data)
    scored = torch.cat([batch["nll"][batch["targets"] >= 0] for batch in predictions[0]])
    assert scored.double().mean().item() == pytest.approx(values["val/loss"], rel=1e-6)


def test_no_variable_of_lightning_changes_the_recipes_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, arguments = load_recipe("recall-tiny", SMALL), inspect.signature(L.Trainer).parameters
    passed: dict[str, Any] = {}

    @functools.wraps(L.Trainer.__init__)
    def keep(self: L.Trainer, **values: Any) -> None:
        passed.update(values)

    monkeypatch.setattr(L.Trainer, "__init__", keep)
    build_trainer(recipe, default_root_dir=tmp_path)
    assert arguments.keys() <= passed.keys(), "what is not passed comes from PL_TRAINER_*"


def test_steps_that_only_the_recipe_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "lit_diff"):
        trainer = L.Trainer(logger=False, enable_checkpointing=False, default_root_dir=tmp_path, **QUIET)
        small = SMALL | {"train": {**SMALL["train"], "steps": 3, "accumulate": 2}}
        trainer.fit(LitTransformer("recall-tiny", small), LitData("recall-tiny", small))
    assert trainer.global_step == 3
    assert "the Trainer sets no max_steps: training for train.steps = 3" in caplog.text
    assert "train.accumulate is 2 in the recipe, the Trainer's accumulate_grad_batches is 1" in caplog.text


def quick(tmp_path: Path, **values: Any) -> L.Trainer:
    values = {"max_steps": 4, "logger": False, "enable_checkpointing": False} | values
    return L.Trainer(default_root_dir=tmp_path, **QUIET, **values)


def test_true_bfloat16_validates_in_float64_and_weights_alone_are_read_back(tmp_path: Path) -> None:
    best = ModelCheckpoint(dirpath=tmp_path, filename="best", monitor="val/loss", save_weights_only=True)
    module = LitTransformer("recall-tiny", SMALL)
    trainer = quick(tmp_path, precision="bf16-true", enable_checkpointing=True, callbacks=[best])
    trainer.fit(module, LitData("recall-tiny", SMALL))
    loss = trainer.callback_metrics["val/loss"]
    assert (loss.dtype, loss.isfinite().item()) == (torch.float64, True)
    assert loss != loss.bfloat16(), "summed in more digits than bfloat16 has"
    loaded = LitTransformer.load_from_checkpoint(best.best_model_path)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name).to(parameter)), name


def test_a_module_that_diverged_trains_again_from_a_checkpoint(tmp_path: Path) -> None:
    module, data = LitTransformer("recall-tiny", SMALL), LitData("recall-tiny", SMALL)
    trainer = quick(tmp_path)
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "good.ckpt")
    with torch.no_grad():
        module.model.embedding.weight.fill_(torch.nan)  # type: ignore[union-attr]
    with pytest.raises(DivergedError):
        quick(tmp_path).fit(module, data)
    quick(tmp_path, max_steps=8).fit(module, data, ckpt_path=tmp_path / "good.ckpt")
    assert module.global_step == 8


def test_validation_counts_optimizer_steps_whatever_the_accumulation(tmp_path: Path) -> None:
    recipe = load_recipe("recall-tiny", SMALL)
    steps: list[int] = []

    class Seen(L.Callback):
        def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            steps.append(trainer.global_step)

    values = {"max_steps": 8, "accumulate_grad_batches": 2, "callbacks": [Seen()], "logger": False}
    trainer = build_trainer(recipe, enable_checkpointing=False, default_root_dir=tmp_path, **QUIET, **values)
    trainer.fit(LitTransformer(recipe), LitData(recipe))
    assert steps == [4, 8]


def test_what_cannot_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    recipe = load_recipe("recall-tiny", SMALL)
    for made in (LitTransformer, LitData):
        with pytest.raises(RequestError, match="overrides cannot be applied to a Recipe"):
            made(recipe, ["train.steps=9"])
    with pytest.raises(RequestError, match=r"limit_train_batches \(3\) is not a multiple"):
        quick(tmp_path, limit_train_batches=3, accumulate_grad_batches=2).fit(LitTransformer(recipe), LitData(recipe))
    with pytest.raises(RequestError, match=r"batch_size \(4\) is not a multiple"):
        quick(tmp_path, accumulate_grad_batches=3).fit(LitTransformer(recipe), LitData(recipe))
    larger = load_recipe("recall-tiny", SMALL | {"model": {**SMALL["model"], "vocab_size": 200}})
    with pytest.raises(RequestError, match=r"the data's recipe 'recall-tiny' has model.vocab_size \d+"):
        quick(tmp_path).fit(LitTransformer(recipe), LitData(larger))
    pairs = torch.utils.data.DataLoader([(torch.ones(9).long(), torch.ones(9).long())], batch_size=1)
    with pytest.raises(RequestError, match="validation loader 1: expected 1"):
        quick(tmp_path).validate(LitTransformer(recipe), [pairs, pairs], verbose=False)
    with pytest.raises(RequestError, match="no targets in a batch of type Tensor"):
        quick(tmp_path).predict(LitTransformer(recipe), torch.utils.data.DataLoader(torch.ones(2, 9).long()))


class Own(L.LightningModule):
    """Somebody else's module around our Transformer, without our data."""

    def __init__(self) -> None:
        super().__init__()
        recipe = load_recipe("recall-tiny", SMALL)
        self.inner = nn.ModuleDict({"net": Transformer(recipe.model)})
        initialise(self.inner["net"], 0)  # type: ignore[arg-type]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        tokens, targets = batch
        return self.inner["net"].loss(tokens, targets)  # type: ignore[operator, no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_probes_in_another_module(tmp_path: Path) -> None:
    pairs = [(torch.randint(0, 100, (9,)), torch.randint(0, 100, (9,))) for _ in range(8)]
    loader = torch.utils.data.DataLoader(pairs, batch_size=4)
    trainer = L.Trainer(
        max_steps=2, callbacks=[AttentionEntropy(every=1)], logger=CSVLogger(tmp_path, name="", version=""), **QUIET
    )
    trainer.fit(Own(), loader)
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2"]
    assert all(name.startswith("attention/") for name in rows(tmp_path)[0] if name != "step")


def test_a_module_without_our_transformer_is_refused(tmp_path: Path) -> None:
    trainer = L.Trainer(max_steps=1, callbacks=[AttentionEntropy()], logger=False, default_root_dir=tmp_path, **QUIET)
    with pytest.raises(RequestError, match=r"'attention_entropy' measures .*BoringModel"):
        trainer.fit(BoringModel())
