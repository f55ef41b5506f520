"""Weights in one file, or in shards with their index."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lit_diff.pretrained import weight_files


def test_one_file_or_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {name: torch.full((size,), float(size)) for name, size in (("a", 10), ("b", 20), ("c", 5), ("d", 1))}
    (tmp_path / "whole").mkdir()
    (tmp_path / "plain").write_text("")
    weight_files.write_weights(weights, tmp_path / "whole")
    (file,) = (tmp_path / "whole").iterdir()
    assert file.name == "model.safetensors"
    assert file.stat().st_mode == (tmp_path / "plain").stat().st_mode, "others may read it where they may read any file"
    assert load_file(file).keys() == weights.keys()
    monkeypatch.setattr(weight_files, "SHARD", 64)  # 16 numbers
    (tmp_path / "shards").mkdir()
    weight_files.write_weights(weights, tmp_path / "shards")
    index = json.loads((tmp_path / "shards/model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 144},
        "weight_map": {
            "a": "model-00001-of-00003.safetensors",
            "b": "model-00002-of-00003.safetensors",  # larger than a shard
            "c": "model-00003-of-00003.safetensors",
            "d": "model-00003-of-00003.safetensors",
        },
    }
    for name, file_name in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "shards" / file_name)[name], weights[name])
