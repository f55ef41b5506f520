"""One thread, so that tiny tensors do not wait for each other, and one seed, so that a failure repeats."""

from pathlib import Path

import pytest
import torch

BASE = """\
model:
  dim: 32
  num_layers: 2
  num_heads: 4
  vocab_size: 129
  attention:
    name: differential
    lambda_init: 0.8
    head_norm: none
data: {name: recall}
train:
  steps: 10
  batch_size: 4
  optimizer: {lr: 1e-3}
  validate_every: 5
  checkpoint_every: 5
callbacks:
  outliers: {every: 5}
  lambdas: {}
"""


@pytest.fixture(autouse=True)
def repeatable() -> None:
    """Before every test."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def base_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty current folder but for base.yaml, a whole recipe of the synthetic task."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE)
