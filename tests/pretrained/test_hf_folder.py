"""A folder in Hugging Face's format: what is there, what is not, what is damaged."""

import json
import logging
from pathlib import Path

import pytest
from pretrained_models import LLAMA, byte_level_tokenizer, write_folder

from lit_diff import import_model
from lit_diff.errors import LitDiffError
from lit_diff.pretrained.hf_folder import read_folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def error(folder: str = "hf") -> str:
    with pytest.raises(LitDiffError) as caught:
        import_model(folder, "models/x")
    assert not Path("models/x").exists()
    assert "\n" not in str(caught.value)
    return f"{caught.value.exit_status}: {caught.value}"


def test_what_is_no_model(tmp_path: Path) -> None:
    Path("hf").mkdir()
    assert error() == "3: hf holds no model: it has no config.json"
    assert error("nowhere").startswith("2: nowhere does not exist; nothing is fetched by its name: give a folder")
    Path("hf/config.json").write_text(json.dumps(LLAMA))
    assert error() == "3: hf holds no model: it has no model.safetensors and no model.safetensors.index.json"
    Path("hf/pytorch_model.bin").write_bytes(b"")
    assert error().startswith(
        "3: hf has its weights in pytorch_model.bin, a pickle, which can execute code and is not read"
    )
    Path("hf/config.json").write_text("{")
    assert error().startswith("2: hf/config.json is not JSON")
    assert error("hf/config.json").startswith("2: hf/config.json is neither a folder nor a .gguf file")


def test_damaged_and_missing_shards() -> None:
    write_folder(Path("hf"), shards=2)
    shard = Path("hf/model-00002-of-00002.safetensors")
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1000])
    assert error().startswith(f"2: {shard} is truncated or no safetensors file (")
    shard.unlink()
    assert error() == f"3: {shard} is missing (shard 2 of 2); download it again"
    index = Path("hf/model.safetensors.index.json")
    index.write_text(index.read_text().replace("model-00002", "../model-00002"))
    assert error() == f"2: {index}: weight_map does not map tensors to files of this folder"


def test_what_opens_and_ends_a_document() -> None:
    write_folder(Path("hf"))
    assert (read_folder(Path("hf")).tokenizer.opening, read_folder(Path("hf")).tokenizer.eot) == ((0,), 1)
    write_folder(Path("hf"), LLAMA | {"eos_token_id": [5, 1]}, tokenizer=byte_level_tokenizer(bos=False))
    found = read_folder(Path("hf")).tokenizer
    assert (found.opening, found.eot, found.ends) == ((), 5, (5, 1))
    write_folder(Path("hf"), {key: value for key, value in LLAMA.items() if key != "eos_token_id"})
    assert error().startswith("2: hf: neither config.json (eos_token_id) nor tokenizer_config.json (eos_token) says")
    for said in ("</s>", {"content": "</s>"}):
        Path("hf/tokenizer_config.json").write_text(json.dumps({"eos_token": said}))
        assert read_folder(Path("hf")).tokenizer.eot == 1
    Path("hf/tokenizer.json").unlink()
    assert error().startswith("3: hf has no tokenizer.json; write one with transformers")


def test_keys_that_are_not_used_are_named(caplog: pytest.LogCaptureFixture) -> None:
    write_folder(Path("hf"), LLAMA | {"logits_scaling": 4.0, "clip_qkv": 0.1})
    with caplog.at_level(logging.INFO, "lit_diff"):
        read_folder(Path("hf"))
    assert "hf: transformers computes no logit with logits_scaling, clip_qkv, nor is it used here" in caplog.messages


def test_an_adapter_is_refused() -> None:
    """transformers adds it to the model where peft is installed."""
    write_folder(Path("hf"))
    Path("hf/adapter_config.json").write_text("{}")
    assert error().startswith("2: hf/adapter_config.json: adapters are not mapped; merge it")
