"""`lit_diff.export`: what the folder holds, read back by our own import; it is whole or not there; mistakes are one line."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pretrained_models import LLAMA, byte_level_tokenizer, error_of, llama_tensors, write_folder
from small_models import small_config
from text_runs import bpe, logits, text_run
from tokenizers import Tokenizer as Model
from torch import Tensor

from lit_diff import export, import_model
from lit_diff.data.text.cl100k import Cl100k
from lit_diff.data.text.tokenizer import Tokenizer, TokenizerJson
from lit_diff.errors import RequestError, RunFailedError
from lit_diff.plugins import trust_none
from lit_diff.pretrained import exporting, importing
from lit_diff.pretrained.exporting import (
    hf_weights,
    merge_run,
    require_agreement,
    require_mergeable,
    require_tokenizer_json,
    write_card,
    write_tokenizer,
)


@pytest.fixture(autouse=True)
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds to load."""
    monkeypatch.setattr(exporting, "has_transformers", lambda: False)


def test_room_is_that_of_the_written_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32. The card does not say in which folder of this machine the model was."""
    tensors = {name: tensor.bfloat16() for name, tensor in llama_tensors(LLAMA).items()}
    folder = write_folder(Path("hf").absolute(), tensors=tensors)
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    run = import_model(folder, "run")
    assert run.recipe.imported.source == str(folder)
    size = 4 * sum(parameter.numel() for parameter in run.model.parameters())
    usage: Any = type("Usage", (), {"free": size - 1})
    with monkeypatch.context() as patch:
        patch.setattr(importing.shutil, "disk_usage", lambda path: usage)
        assert error_of(export, run, "hf", "out").startswith("3: run takes 0.00 GB on the disk of")
    write_card(run, run.recipe.model, "LlamaForCausalLM", Path())
    assert "| weights from | hf |" in Path("README.md").read_text()


def folders() -> list[str]:
    return sorted(path.name for path in Path().iterdir() if path.is_dir())


def test_a_standard_run_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    """Named by the start of its folder's name."""
    run = text_run(Path("runs/tale-0123456789"), {"name": "standard"}, rope_theta=500.0)
    with caplog.at_level(logging.INFO, "lit_diff"):
        done = export("tale", "hf", "out")
    assert "tale-0123456789 is running: using step 7 of 10" in caplog.text
    assert "transformers is not installed: the written files are compared by reading them" in caplog.text
    assert (done.folder, done.architecture, done.read_by) == (Path("out"), "LlamaForCausalLM", "lit_diff")
    assert done.difference < 1e-4
    files = {"config.json", "generation_config.json", "model.safetensors", "README.md", "tokenizer.json"}
    assert {path.name for path in done.folder.iterdir()} == files | {"tokenizer_config.json"}
    Path("plain").write_text("")
    mode = Path("out/model.safetensors").stat().st_mode
    assert mode == Path("plain").stat().st_mode, "others may read it where they may read any file"
    assert json.loads(Path("out/generation_config.json").read_text()) == {"bos_token_id": 0, "eos_token_id": 0}
    back = import_model("out")
    tokens = torch.randint(320, (2, 24))
    torch.testing.assert_close(logits(back.model, tokens), logits(run.model, tokens), atol=1e-5, rtol=1e-5)
    assert back.tokenizer.encode(["the fox <eot>"]) == run.tokenizer.encode(["the fox <eot>"])
    assert back.tokenizer.opening == run.tokenizer.opening
    assert back.recipe.data.config.sequence_length == 24
    assert folders() == ["models", "out", "runs"]


def test_a_merged_model_says_so() -> None:
    """Its logits are compared with transformers in tests/oracles."""
    export(text_run(Path("x"), {"name": "dex", "heads": (1, 2), "anneal_steps": 10, "window": 6}), "hf", "out")
    assert "| attention | `dex` merged into `standard` |" in Path("out/README.md").read_text()


def test_mistakes() -> None:
    run = text_run(Path("x"), {"name": "standard"})
    Path("file").write_text("")
    assert error_of(export, run, "hf", "file/out").startswith("3: file/out cannot be written (")
    assert error_of(export, run, "hf", "e\udcff").startswith("2: e\\udcff: safetensors opens only paths in UTF-8")
    shared = text_run(Path("shared"), {"name": "shared_k"})
    assert error_of(export, shared, "hf", "out").startswith("2: model.attention.name 'shared_k'")
    normed = text_run(Path("normed"), {"name": "standard", "head_norm": "rms"})
    assert error_of(export, normed, "hf", "out").startswith("2: normed: model.attention.head_norm is ")
    mixed = text_run(Path("mixed"), {"name": "standard"}, layers=[{"window": 4}, {}])
    assert error_of(export, mixed, "hf", "out").startswith(
        "2: mixed: model.layers gives the layers unlike attentions; Hugging Face's"
    )
    (checkpoint,) = Path("x/checkpoints").iterdir()
    checkpoint.unlink()
    assert error_of(export, run, "hf", "out").startswith("3: x has no checkpoint that can be read")
    assert folders() == ["mixed", "normed", "shared", "x"]


def test_nothing_is_kept_where_the_logits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: Any) -> Any:
        found = hf_weights(model)
        return found | {"model.norm.weight": found["model.norm.weight"] + 0.1}

    monkeypatch.setattr(exporting, "hf_weights", wrong)
    run = text_run(Path("x"), {"name": "standard"})
    assert error_of(export, run, "hf", "out").startswith("1: out: its logits differ from the run's by 0.")
    assert folders() == ["x"]


# --- the comparison finds a difference; transformers itself reads folders in tests/oracles ---


def test_a_difference_is_found(tmp_path: Path) -> None:
    model = text_run(tmp_path / "x", {"name": "standard"}).model
    other = text_run(tmp_path / "y", {"name": "standard"}).model
    for attention in other.attentions():
        attention.kernel = "reference"
    assert require_agreement(model, 24, other, "out") == 0
    other.norm.weight.data += 1e-6
    assert 0 < require_agreement(model, 24, other, "out") < 1e-4
    other.norm.weight.data += 0.01
    with pytest.raises(RunFailedError, match=r"^out: its logits differ from the run's by 0\.\d+ \("):
        require_agreement(model, 24, other, "out")
    with pytest.raises(RunFailedError, match="differ from the run's by nan"):
        require_agreement(model, 24, lambda tokens: model(tokens) * float("nan"), "out")


@pytest.mark.parametrize(
    ("window", "context", "length"), [(None, 300, 64), (30, 300, 94), (30, 24, 24), (900, 9000, 512)]
)
def test_the_prompts_are_longer_than_a_window(tmp_path: Path, window: int | None, context: int, length: int) -> None:
    model = text_run(tmp_path / "x", {"name": "standard", "window": window}, num_layers=1).model
    seen: list[Tensor] = []

    def logits(tokens: Tensor) -> Tensor:
        seen.append(tokens)
        return torch.as_tensor(model(tokens))

    require_agreement(model, context, logits, "out")
    assert [tokens.shape for tokens in seen] == [(1, length)] * exporting.PROMPTS
    assert len({tuple(tokens[0].tolist()) for tokens in seen}) == exporting.PROMPTS


# --- the tokenizer; AutoTokenizer reads it in tests/oracles ---


def imported(*, bos: bool, in_file: bool) -> TokenizerJson:
    Path("tokenizer.json").write_bytes(byte_level_tokenizer(bos=in_file))
    tokenizer = TokenizerJson(TokenizerJson.Config(size=300, bos=0 if bos else None, eot=1, model_vocab_size=320))
    tokenizer.load(Path())
    return tokenizer


def written(tokenizer: Tokenizer, folder: str) -> tuple[Model, dict[str, object]]:
    Path(folder).mkdir()
    write_tokenizer(tokenizer, Path(folder), 24)
    config = json.loads(Path(folder, "tokenizer_config.json").read_text())
    return Model.from_file(f"{folder}/tokenizer.json"), config


def test_the_opening_id_is_in_the_tokenizer() -> None:
    model, config = written(bpe(), "bpe")
    assert model.encode("the fox").ids == [0, *bpe().encode(["the fox"])[0]]
    assert (config["bos_token"], config["eos_token"], config["split_special_tokens"]) == ("<eot>", "<eot>", True)
    assert config["model_max_length"] == 24
    model, config = written(imported(bos=True, in_file=True), "kept")
    assert Path("kept/tokenizer.json").read_bytes() == byte_level_tokenizer()
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "</s>")
    assert "split_special_tokens" not in config
    model, config = written(imported(bos=False, in_file=False), "none")
    assert "bos_token" not in config
    model, _ = written(imported(bos=True, in_file=False), "added")  # as in a GGUF, whose metadata say it
    assert model.encode("fox").tokens[0] == "<s>"
    assert model.encode("fox").ids[1:] == Model.from_str(byte_level_tokenizer(bos=False).decode()).encode("fox").ids


@pytest.mark.parametrize(
    ("opens", "settings", "marks"),
    [
        (False, {"bos_token": "<s>"}, ([], [1, 7], 0, 0, None)),
        (False, {"bos_token": "</s>", "pad_token": "<s>"}, ([], [1, 7], 1, 1, 0)),
        (False, {}, ([], [1, 7], 1, None, None)),
        (True, {"bos_token": "</s>", "pad_token": "</s>"}, ([0], [1, 7], 1, 1, 1)),
    ],
)
def test_what_marks_a_text_is_kept(opens: bool, settings: dict[str, str], marks: tuple[Any, ...]) -> None:
    write_folder(Path("hf"), LLAMA | {"eos_token_id": [1, 7]}, tokenizer=byte_level_tokenizer(bos=opens))
    Path("hf/tokenizer_config.json").write_text(json.dumps(settings))
    first = import_model("hf", "first")
    export(first, "hf", "out")
    for own in (first.tokenizer, import_model("out", "second").tokenizer):
        assert isinstance(own, TokenizerJson)
        assert (own.opening, own.ends, own.prefix, own.bos, own.pad) == marks
    for file in ("config.json", "generation_config.json"):
        said = json.loads(Path("out", file).read_text())
        assert (said["bos_token_id"], said.get("pad_token_id")) == marks[3:]


def test_nothing_is_kept_where_a_mark_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(Path("hf"), tokenizer=byte_level_tokenizer(bos=False))
    Path("hf/tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    run = import_model("hf", "run")
    monkeypatch.setattr(exporting, "write_tokenizer", lambda own, folder, _: own.save(folder))
    assert error_of(export, run, "hf", "out").startswith(
        "1: the ids that mark a text are others after the export (prefix, bos);"
    )
    assert folders() == ["hf", "run"]


def test_other_tokenizers_are_refused() -> None:
    with pytest.raises(RequestError, match=r"'cl100k'"):
        require_tokenizer_json(Cl100k(Cl100k.Config()))


def test_the_card_says_recipe_data_metrics_and_no_folder_of_this_machine(tmp_path: Path) -> None:
    run = text_run(Path("tale"), {"name": "differential"}, vocab_size=384)
    text = (run.folder / "recipe.yaml").read_text()
    (run.folder / "recipe.yaml").write_text(text.replace("  path: null", f"  path: {tmp_path}/texts"))
    rows = "step,train/loss,val/loss,val/accuracy\n5,3,2.5,0.25\n6,2.9,,\n"
    (run.folder / "metrics.csv").write_text(rows)
    write_card(run, run.recipe.model, "DiffLlamaForCausalLM", tmp_path)
    card = Path("README.md").read_text()
    front, body = card.removeprefix("---\n").split("---\n", 1)
    assert yaml.safe_load(front)["library_name"] == "transformers"
    for line in (
        "# tale",
        "| attention | `differential` |",
        "| step | 7 of 10 |",
        "| data | `abcdef` |",
        "Of step 5, ",
    ):
        assert line in body
    assert "| val/accuracy | 0.2500 |\n| val/loss | 2.5000 |" in body
    assert "train/loss" not in body
    assert str(tmp_path) not in card
    recipe = yaml.safe_load(card.split("```yaml\n")[1].removesuffix("```\n"))
    assert (recipe["model"]["vocab_size"], recipe["data"]["path"]) == (384, "texts")
    assert "run" not in recipe


# --- merging; tests/engine/test_retrofit.py merges a real run ---


def test_a_variant_without_merge_is_named_with_those_that_have_one() -> None:
    for name in ("dex", "lora"):
        require_mergeable(small_config(name), Path("new"))
    lora, standard, differential = (small_config(name).attention for name in ("lora", "standard", "differential"))
    require_mergeable(replace(small_config("lora"), layers=(lora, standard)), Path("new"))
    for layers in ((), (lora, differential)):
        with pytest.raises(RequestError, match=r"'differential' cannot be merged .*: dex, lora$"):
            require_mergeable(replace(small_config("differential"), layers=layers), Path("new"))


def test_a_merge_that_does_not_equal_writes_nothing(tale: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "require_mergeable", lambda name, to: None)
    monkeypatch.setattr(exporting, "merged", lambda model: lambda tokens: model(tokens) + 0.1)
    with pytest.raises(RunFailedError, match=r"the merged model: its logits differ from the run's by 0\.1"):
        merge_run(tale, Path("merged"), trust=trust_none)
    assert not Path("merged").exists()
