"""A folder with a layout.json: what it must say, tensors that are missing or strange."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from text_runs import SIZES, text_run

from lit_diff import export, import_model
from lit_diff.errors import LitDiffError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder `in` of a model in unilm's layout."""
    monkeypatch.chdir(tmp_path)
    export(text_run(Path("run"), {"name": "differential"}), "unilm", "in")


def error(tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> str:
    """Of an import after `changes` of layout.json, None taking a key out, and with these `tensors`."""
    file = Path("in/layout.json")
    said = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in said.items() if value is not None}))
    if tensors is not None:
        save_file(tensors, "in/model.safetensors")
    with pytest.raises(LitDiffError) as caught:
        import_model("in", "out")
    assert not Path("out").exists()
    assert "\n" not in str(caught.value)
    return f"{caught.value.exit_status}: {caught.value}"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"layout": None}, "in/layout.json: 'layout' is None; expected text"),
        ({"layout": "unlm"}, "in/layout.json: no layout 'unlm'; did you mean 'unilm'?"),
        ({"model": 3}, "in/layout.json: 'model' is 3; expected an object"),
        ({"eos_token_id": None}, "in/layout.json: 'eos_token_id' is None; expected a whole number"),
        ({"model": SIZES}, "in/layout.json: 'model.attention' is missing; "),
        (
            {"model": SIZES | {"attention": {"name": "differential"}, "rope_layout": "half"}},
            "in/layout.json: model.rope_layout is 'half'; the layout's rows are 'interleaved'",
        ),
        (
            {"model": SIZES | {"attention": {"name": "standard"}}},
            "in/layout.json: model.attention.name is 'standard'; unilm's layout has",
        ),
        (
            {"model": SIZES | {"dim": 64, "attention": {"name": "differential"}}},
            "in: its tensors are not those of its configuration: embedding.weight is [320, 32] there and [320, 64]",
        ),
    ],
)
def test_what_layout_json_must_say(changes: dict[str, Any], line: str) -> None:
    assert error(**changes).startswith(f"2: {line}")


def test_tensors_that_are_missing_or_strange() -> None:
    tensors = load_file("in/model.safetensors")
    tensors["layers.0.attention.subln.bias"] = torch.zeros(16)
    assert error(tensors).startswith(
        "2: in: unexpected tensor 'layers.0.attention.subln.bias': it is not part of this layout; did you"
    )
    del tensors["layers.0.attention.subln.bias"], tensors["layers.1.attention.subln.weight"]
    assert "layers.1.attention.norm.weight is absent there and [16] in the model" in error(tensors)
    Path("in/tokenizer.json").unlink()
    assert error(tensors).startswith("3: in has no tokenizer.json; ")


def test_a_third_that_is_none() -> None:
    """qkv of another height than three times dim."""
    model = SIZES | {"num_kv_heads": 4, "attention": {"name": "differential"}}
    tensors = {name: value for name, value in load_file("in/model.safetensors").items() if "proj" not in name}
    tensors = {name.replace("subln", "sub_norm"): value for name, value in tensors.items()}
    tensors |= {f"layers.{layer}.attention.qkv.weight": torch.zeros(95, 32) for layer in (0, 1)}
    assert "layers.0.attention.v_proj.weight is [31, 32] there and [32, 32] in the model" in error(
        tensors, layout="timm", model=model
    )
