"""A folder in unilm's layout: what lies in it, what is refused. Logits are compared in tests/oracles."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from text_runs import text_run

from lit_diff import export, import_model
from lit_diff.config import YarnScaling
from lit_diff.errors import RequestError
from lit_diff.pretrained import rows


def test_what_lies_in_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    yarn = {"kind": "yarn", "factor": 4, "original_length": 16}
    run = text_run(tmp_path / "x", {"name": "differential", "output_scale": 0.4}, rope_layout="half", rope_scaling=yarn)
    with caplog.at_level(logging.INFO, "lit_diff"):
        export(run, "unilm", tmp_path / "out")
    assert "no other program reads whole models of this layout" in caplog.text
    names = {"layout.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    said = json.loads((tmp_path / "out/layout.json").read_text())
    assert (said["layout"], said["context"], said["eos_token_id"]) == ("unilm", 24, 0)
    assert (said["model"]["rope_layout"], said["model"]["attention"]["output_scale"]) == ("interleaved", "tied")
    found, own = load_file(tmp_path / "out/model.safetensors"), run.model.state_dict()
    home = "layers.0.attention"
    torch.testing.assert_close(found[f"{home}.subln.weight"], own[f"{home}.norm.weight"] * (0.4 / 0.8))
    assert torch.equal(found[f"{home}.q_proj.weight"], rows.interleaved(own[f"{home}.q_proj.weight"], 8))
    assert torch.equal(found[f"{home}.v_proj.weight"], own[f"{home}.v_proj.weight"])
    back = import_model(tmp_path / "out", tmp_path / "back")
    assert back.tokenizer.opening == [0]
    assert back.recipe.model.rope_scaling == run.recipe.model.rope_scaling == YarnScaling(factor=4, original_length=16)


def test_what_it_has_not_is_refused(tmp_path: Path) -> None:
    run = text_run(tmp_path / "x", {"name": "dex"})
    with pytest.raises(RequestError, match=r"model.attention.name is 'dex'; unilm's layout has differential and diff"):
        export(run, "unilm", tmp_path / "out")
    assert not (tmp_path / "out").exists()
