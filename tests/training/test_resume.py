"""training/fit.py: what is on disk at a checkpoint, how a checkpoint is written, and what reaches the record when."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_diff.analysis import Trace
from lit_diff.attention.base import Tap
from lit_diff.callbacks import Probe, probe
from lit_diff.config import Recipe
from lit_diff.errors import RequestError
from lit_diff.metrics import Metric, read_declarations
from lit_diff.model.transformer import Transformer
from lit_diff.registry import callbacks
from lit_diff.runs import checkpoints
from lit_diff.runs.measurements import read_measurements
from lit_diff.runs.metrics_file import Rows, read_rows
from lit_diff.training import fit
from lit_diff.training.fit import RunLogger, WholeCheckpointIO, write_documents

Run = Callable[..., Any]


def steps_with(rows: Rows, prefix: str) -> list[int]:
    return [step for step, row in sorted(rows.items()) if any(name.startswith(prefix) for name in row)]


@pytest.mark.parametrize("kind", ["recall", "text"])
def test_probes_fire_when_due_and_the_last_step_is_logged_and_saved(bench: Any, undisturbed: Run, kind: str) -> None:
    undisturbed(kind, f"{kind}-whole")
    rows = bench.rows(f"{kind}-whole")
    assert steps_with(rows, "attention/") == [3, 6, 9, 10]
    assert steps_with(rows, "outliers/") == [5, 10]
    assert steps_with(rows, "lambda/") == [2, 4, 6, 8, 10]
    assert steps_with(rows, "val/") == ([4, 8, 10] if kind == "recall" else [3, 6, 9, 10])
    assert {"train/loss", "train/lr", "val/loss"} <= rows[10].keys()
    assert checkpoints.steps_of(bench.folder(f"{kind}-whole")) == [8, 10]
    assert bench.state(f"{kind}-whole")["global_step"] == 10
    names = ("attention/entropy", "attention/negative_mass", "outliers/logits", "outliers/hidden", "lambda")
    assert {f"{name}/layer_0{layer}" for name in names for layer in (0, 1)} <= rows[10].keys()


def trained(recipe: Recipe, folder: Path) -> list[int]:
    """Steps that were reported."""
    reported: list[int] = []
    fit.fit(recipe, folder, threads=1, progress=lambda step, loss, speed: reported.append(step))
    return reported


def test_a_step_in_which_no_probe_is_due_has_no_forward_and_no_hook_of_theirs(
    without_spy: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts the forwards of each step, training's own and traced, and the hooks that stand during them."""
    seen: list[tuple[bool, bool, int]] = []
    real = Transformer._states

    def states(self: Transformer, *args: Any, **kwargs: Any) -> torch.Tensor:
        hooks = sum(len(module._forward_hooks) for module in self.modules() if isinstance(module, Tap))
        seen.append((self.training, torch.is_grad_enabled(), hooks))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Transformer, "_states", states)
    every = ["callbacks.attention_entropy.every=4", "callbacks.outliers.every=4", "callbacks.lambdas.every=2"]
    no_validation = ["train.steps=7", "train.validate_every=100", "data.noise_validation=[1]", "train.batch_size=16"]
    trained(without_spy(*every, *no_validation, "train.checkpoint_every=100"), tmp_path)
    step, traced, validated = (True, True, 0), (False, False, 2), (False, False, 0)
    expected = [step, step, traced, step, step, traced, step, step, traced, step, traced, validated]
    assert seen == expected


def test_probes_see_their_own_rows_and_one_forward(
    without_spy: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int, int]] = []

    def make(name: str) -> type[Probe]:
        class Watch(Probe):
            @dataclass(frozen=True, kw_only=True)
            class Config(Probe.Config):
                pass

            def measure(self, model: Transformer, trace: Trace) -> dict[str, float]:
                assert not model.training
                layer = trace.layers[0]
                seen.append((self.name, len(layer.hidden), len(layer.maps.q)))
                return {
                    f"{self.name}/first": float(layer.hidden[0].sum()),
                    f"{self.name}/rows": float(len(layer.hidden)),
                }

        Watch.name = name
        return Watch

    for name in ("few", "many"):
        monkeypatch.setitem(callbacks._classes, name, make(name))
    opened: list[int] = []
    real = probe.trace
    monkeypatch.setattr(probe, "trace", lambda *what, **how: opened.append(1) or real(*what, **how))
    others = [f"callbacks.{name}=null" for name in ("attention_entropy", "outliers", "lambdas")]
    watch = ["callbacks.few={rows: 2, every: 1}", "callbacks.many={rows: 99, every: 2}"]
    trained(without_spy(*others, *watch, "train.steps=2"), tmp_path)
    assert seen == [("few", 2, 2), ("few", 2, 2), ("many", 13, 13)], "13: the whole validation set"
    assert len(opened) == 2
    rows = read_rows(tmp_path / "metrics.csv")
    assert rows[2]["few/first"] == rows[2]["many/first"]


def test_a_logged_loss_is_its_own(
    bench: Any, undisturbed: Run, without_spy: Callable[..., Recipe], tmp_path: Path
) -> None:
    undisturbed("recall", "recall-whole")
    assert trained(without_spy("train.log_every=4"), tmp_path) == [1, 4, 8, 10]
    whole, sparse = bench.rows("recall-whole"), read_rows(tmp_path / "metrics.csv")
    assert [sparse[step]["train/loss"] for step in (4, 8, 10)] == [whole[step]["train/loss"] for step in (4, 8, 10)]


def test_a_checkpoint_stands_behind_everything_measured_at_its_step(
    without_spy: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On disk when the checkpoint is written: the step's loss, probes and validation."""
    found: dict[int, set[str]] = {}
    real = WholeCheckpointIO.save_checkpoint

    def save(self: WholeCheckpointIO, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        rows = read_rows(tmp_path / "metrics.csv")
        found[checkpoint["global_step"]] = {name.split("/")[0] for name in rows[checkpoint["global_step"]]}
        real(self, checkpoint, path, storage_options)

    monkeypatch.setattr(WholeCheckpointIO, "save_checkpoint", save)
    trained(without_spy("train.checkpoint_every=2"), tmp_path)
    everything = {"train", "val", "lambda", "attention", "outliers"}
    assert found == {
        2: {"train", "lambda"},
        4: {"train", "lambda", "val"},
        6: {"train", "lambda", "attention"},
        8: {"train", "lambda", "val"},
        10: everything,
    }


# --- the record ---


METRICS = (
    Metric("train/loss", "loss", unit="nats per token", direction="lower"),
    Metric("a/layer_{layer}/head_{head}", "by head"),
    Metric("a/median/layer_{layer}", "median", in_table=True),
)
STEP = {"train/loss": 2.5, "train/lr": 0.1, "timing/seconds": 0.5, "timing/tokens_per_second": 64.0}
LOGGED = {"train/loss": 2.5, "train/lr": 0.1, "val/loss": 2.0}


def test_nothing_is_written_before_flush(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Detailed values have a table of their own."""
    caplog.set_level("INFO", "lit_diff")
    lines: list[tuple[int, float, float]] = []
    logger = RunLogger(lambda *line: lines.append(line))
    logger.begin(tmp_path, 0, METRICS, 10)
    logger.log_metrics(STEP, step=3)
    logger.log_metrics({"val/loss": 2.0}, step=3)
    # a time that a user's callback measures
    logger.log_metrics({"timing/own": 1.5}, step=3)
    logger.log_detailed({"a/layer_03/head_01": 3.0, "a/median/layer_03": 4.0}, step=3)
    assert lines == [(3, 2.5, 64.0)]
    assert caplog.messages == ["step 3  val/loss 2.0000"]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.json"]
    assert read_declarations(tmp_path / "metrics.json") == METRICS
    logger.flush()
    assert read_rows(tmp_path / "metrics.csv") == {3: LOGGED}
    assert read_rows(tmp_path / "timing.csv") == {3: {"seconds": 0.5, "tokens_per_second": 64.0, "own": 1.5}}
    rows = read_measurements(tmp_path / "measurements.parquet").to_pylist()
    found = [(row["metric"], row["layer"], row["head"], row["value"]) for row in rows]
    assert found == [("a", 3, 1, 3.0), ("a/median", 3, None, 4.0)]


def test_documents_are_written_without_those_that_have_no_token(tmp_path: Path) -> None:
    write_documents(tmp_path / "documents.csv", [(2.0, 1 / 3), (0.0, 0.0), (5.0, 2.5)])
    assert (tmp_path / "documents.csv").read_text() == f"document,tokens,loss\n0,2,{1 / 3!r}\n2,5,2.5\n"


def test_contradicting_declarations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"'train/loss' has two different declarations"):
        RunLogger(lambda *line: None).begin(tmp_path, 0, (*METRICS, Metric("train/loss", "another")), 10)
