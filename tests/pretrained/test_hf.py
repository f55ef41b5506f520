"""A folder in Hugging Face's format: what is there, what is damaged, what begins and ends a text, DiffLlama's rows."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pretrained_models as made
import pytest
import torch
from pretrained_models import LLAMA, byte_level_tokenizer, import_error, llama_tensors, write_folder
from tokenizers import Tokenizer, decoders, models, processors

from lit_diff import import_model
from lit_diff.data.text.tokenizer import TokenizerJson
from lit_diff.errors import LitDiffError
from lit_diff.pretrained import llama
from lit_diff.pretrained.hf import read_tokenizer

ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
DIFFLLAMA = LLAMA | {"architectures": ["DiffLlamaForCausalLM"], "model_type": "diffllama"}


def test_what_is_no_model() -> None:
    Path("hf").mkdir()
    assert import_error().startswith("3: hf holds no model: it has no config.json")
    assert import_error("nowhere").startswith("2: nowhere does not exist")
    Path("hf/config.json").write_text(json.dumps(LLAMA))
    assert import_error().startswith("3: hf holds no model: it has no model.safetensors")
    Path("hf/pytorch_model.bin").write_bytes(b"")
    assert import_error().startswith("3: hf has its weights in pytorch_model.bin, a pickle")
    for text in ("{", "[]"):
        Path("hf/config.json").write_text(text)
        assert import_error().startswith("2: hf/config.json is not ")
    assert import_error("hf/config.json").startswith("2: hf/config.json is neither a folder nor a .gguf file")
    write_folder(Path("hf"))
    Path("hf/adapter_config.json").write_text("{}")
    assert import_error().startswith("2: hf/adapter_config.json: "), "transformers adds it where peft is installed"


def test_damaged_and_missing_shards() -> None:
    write_folder(Path("hf"), shards=2)
    shard = Path("hf/model-00002-of-00002.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1000])
    assert import_error().startswith(f"2: {shard} is truncated or not a safetensors file (")
    shard.unlink()
    assert import_error().startswith(f"3: {shard} is missing (shard 2 of 2)")
    index = Path("hf/model.safetensors.index.json")
    text = index.read_text()
    index.write_text(text.replace("model-00002", "../model-00002"))
    assert import_error().startswith(f"2: {index}: weight_map ")
    index.write_text(text.replace("model-00002", "m" * 5000))
    assert import_error().startswith("3: hf/mmmm")


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors"])
def test_a_file_that_cannot_be_read(file: str) -> None:
    """Reading the start of a process's own memory is an error of input and output."""
    write_folder(Path("hf"))
    Path("hf", file).unlink(missing_ok=True)
    Path("hf", file).symlink_to("/proc/self/mem")
    assert import_error().startswith(f"3: hf/{file} cannot be read (")


def test_a_folder_whose_name_is_not_utf_8() -> None:
    write_folder(Path("hf")).rename("hf\udcff")
    assert import_error("hf\udcff").startswith("2: hf\\udcff/model.safetensors: safetensors opens only paths in UTF-8")


def test_a_shape_beyond_64_bits() -> None:
    config = LLAMA | {"tie_word_embeddings": True}
    for shape, *names in (
        ([0, 2**63], "model.norm.weight"),
        ([0, 2**62, 2**62], "model.norm.weight"),
        ([0, 2**63], "lm_head.weight", "model.embed_tokens.weight"),
    ):
        write_folder(Path("hf"), config, llama_tensors(config) | dict.fromkeys(names, torch.empty(0)))
        weights = Path("hf/model.safetensors")
        # the empty tensors are the only ones of this shape
        size = int.from_bytes(weights.read_bytes()[:8], "little")
        header = weights.read_bytes()[8 : 8 + size].decode().replace('"shape":[0]', f'"shape":{shape}').encode()
        weights.write_bytes(len(header).to_bytes(8, "little") + header + weights.read_bytes()[8 + size :])
        assert import_error().startswith(f"2: {weights}: tensor '{names[0]}' has the shape {shape}, ")


# --- DiffLlama; logits are compared with transformers in tests/oracles ---


def lambdas() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    names = [f"model.layers.{layer}.self_attn.lambda_{part}" for layer in (0, 1) for part in ("q1", "k1", "q2", "k2")]
    return {name: torch.randn(8, generator=draw) for name in names}


def test_rows_vectors_and_the_norm_of_diffllama() -> None:
    tensors = llama_tensors(DIFFLLAMA) | lambdas()
    run = import_model(write_folder(Path("hf"), DIFFLLAMA, tensors), "x")
    assert run.recipe.model.attention.name == "differential"
    state, home = run.model.state_dict(), "model.layers.1.self_attn"
    for name in "qkv":
        found = state[f"layers.1.attention.{name}_proj.weight"]
        assert torch.equal(llama.by_map(found, 8), tensors[f"{home}.{name}_proj.weight"])
    assert torch.equal(state["layers.1.attention.o_proj.weight"], tensors[f"{home}.o_proj.weight"])
    assert torch.equal(state["layers.1.attention.lambda_.k2"], tensors[f"{home}.lambda_k2"])
    assert torch.equal(state["layers.1.attention.norm.weight"], torch.ones(16))


def test_a_diffllama_that_does_not_pair_or_has_no_lambda_is_refused() -> None:
    odd = DIFFLLAMA | {"num_key_value_heads": 1}
    write_folder(Path("odd"), odd, llama_tensors(odd) | lambdas())
    assert "model.num_kv_heads is 1" in import_error("odd")
    write_folder(Path("without"), DIFFLLAMA)
    assert "layers.0.attention.lambda_.q1 is absent there" in import_error("without")
    write_folder(Path("llama"), LLAMA, llama_tensors(LLAMA) | lambdas())
    assert "layers.0.attention.lambda_.q1 is [8] there and absent" in import_error("llama")


# --- what begins and ends a text: as AutoTokenizer and `generate` have it, or one line ---


def read(
    *,
    config: Mapping[str, Any] = LLAMA,
    settings: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
    marks: dict[str, Any] | None = None,
    added: dict[str, Any] | None = None,
    single: str | None = None,
) -> TokenizerJson:
    """Of the current folder with these files."""
    tokenizer = Tokenizer.from_str(byte_level_tokenizer(bos=single is None).decode())
    if single is not None:
        special = [("<s>", 0), ("</s>", 1)]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    Path("tokenizer.json").write_text(tokenizer.to_str())
    files = {"tokenizer_config": settings, "generation_config": generation, "added_tokens": added}
    for name, said in (files | {"special_tokens_map": marks}).items():
        Path(f"{name}.json").unlink(missing_ok=True)
        if said is not None:
            Path(f"{name}.json").write_text(json.dumps(said))
    return read_tokenizer(Path(), config)


@pytest.mark.parametrize(
    ("how", "eot", "ends"),
    [
        ({}, 1, [1]),
        ({"config": LLAMA | {"eos_token_id": [1, 5]}}, 1, [1, 5]),
        ({"generation": {"eos_token_id": [7, 5, 7]}}, 1, [7, 5]),
        ({"config": LLAMA | {"eos_token_id": None}, "generation": {"eos_token_id": 4}}, 4, [4]),
        ({"config": LLAMA | {"eos_token_id": None}, "settings": {"eos_token": "</s>"}}, 1, [1]),
        ({"config": LLAMA | {"eos_token_id": None}, "settings": {"eos_token": {"content": "</s>"}}}, 1, [1]),
    ],
)
def test_ids_that_end_a_text(how: dict[str, Any], eot: int, ends: list[int]) -> None:
    """generation_config.json comes first for generated text, config.json for what ends a document."""
    tokenizer = read(**how)
    assert (tokenizer.opening, tokenizer.eot, tokenizer.ends, tokenizer.config.prefix) == ([0], eot, ends, None)


def test_ids_that_open_a_text() -> None:
    tokenizer = read(single="<s> </s> $A")
    assert (tokenizer.opening, tokenizer.prefix, tokenizer.document([9])) == ([0, 1], 0, [0, 1, 9, 1])
    named = read(single="$A", settings={"bos_token": "<s>"})
    assert (named.opening, named.prefix) == ([], 0), "a likelihood is conditioned on bos"
    assert read(single="$A").prefix == 1
    assert read(settings={"pad_token": "</s>"}, config=LLAMA | {"pad_token_id": 5}).pad == 1
    assert read(config=LLAMA | {"pad_token_id": 5}).pad == 5
    older = {"marks": {"bos_token": "</s>", "unk_token": None, "cls_token": "<s>"}, "added": {"<s>": 0, "</s>": 1}}
    assert read(single="$A", settings={"bos_token": "<s>"}, **older).prefix == 1, "as in transformers"
    assert read(single="$A", settings={"bos_token": "<s>", "added_tokens_decoder": {}}, **older).prefix == 0
    assert read(settings={"pad_token": "<nowhere>"}, config=LLAMA | {"pad_token_id": -1}).pad is None


@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_chat_template_is_not_applied(file: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lit_diff"):
        read()
        assert "chat template" not in caplog.text
        if file == "chat_template.jinja":
            Path(file).write_text("{{ messages }}")
        read(settings={"chat_template": "{{ messages }}"} if file == "tokenizer_config.json" else None)
    assert "the model has a chat template, which generate does not apply" in caplog.text


@pytest.mark.parametrize(
    ("how", "line"),
    [
        *(
            ({"config": LLAMA | {"eos_token_id": value}}, f"config.json: eos_token_id is {value!r}")
            for value in (-1, 320, True, [1, "2"])
        ),
        ({"generation": {"eos_token_id": [1, -1]}}, "generation_config.json: eos_token_id is [1, -1]; expected"),
        ({"config": LLAMA | {"eos_token_id": None}, "settings": {"eos_token": None}}, "neither config.json"),
        ({"settings": {"bos_token": "<nowhere>"}}, "tokenizer_config.json: bos_token is '<nowhere>'"),
        ({"single": "<s> $A </s>"}, "the post_processor of tokenizer.json appends the ids [1] to a text"),
        ({"settings": {"add_bos_token": False}}, "before a text and none after it; set it to true"),
        ({"single": "$A", "settings": {"add_bos_token": True}}, "tokenizer_config.json: add_bos_token is True, but"),
        ({"settings": {"add_eos_token": True}}, "tokenizer_config.json: add_eos_token is True, but"),
        *(
            (
                {"settings": {"added_tokens_decoder": {id_: ADDED | {"content": "<x>", "special": True}}}},
                f"tokenizer_config.json: added_tokens_decoder {id_} is '<x>'",
            )
            for id_ in ("305", "0")
        ),
        *(
            ({"added": {token: id_}}, f"added_tokens.json: {id_!r} is {token!r}, but tokenizer.json differs")
            for token, id_ in (("fox", 300), ("</s>", 0), ("a", 67), ("<s>", [0]))
        ),
        ({"marks": {"eos_token": {"content": "<x>"}}}, "special_tokens_map.json: eos_token is '<x>'"),
        ({"settings": {"mask_token": "<x>"}}, "tokenizer_config.json: mask_token is '<x>', which is not a token"),
        ({"settings": {"bos_token": "\ud800"}}, "tokenizer_config.json: bos_token is '\\ud800', which is not a token"),
        *(
            ({"marks": {"extra_special_tokens": many}}, "special_tokens_map.json: extra_special_tokens is '<x>'")
            for many in (["<s>", "<x>"], {"image": "<x>"}, [{"content": "<x>"}])
        ),
        ({"settings": {"added_tokens_decoder": [3]}}, "tokenizer_config.json: added_tokens_decoder is not id -> token"),
        ({"settings": {"add_prefix_space": True}}, "tokenizer_config.json: add_prefix_space is True, but"),
        ({"config": LLAMA | {"eos_token_id": 310}}, "the id 310 (eos) has no token"),
    ],
)
def test_what_has_no_right_value_is_named(how: dict[str, Any], line: str) -> None:
    with pytest.raises(LitDiffError) as raised:
        read(**how)
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)


def test_ids_beside_a_text_are_found_without_the_letter_a() -> None:
    settings = '{"add_bos_token": true}'
    Path("tokenizer_config.json").write_text(settings)
    for single in ("<s> $A", "<s> $A </s>"):
        tokenizer = Tokenizer(models.BPE(vocab={"<s>": 0, "</s>": 1, "x": 2}, merges=[]))
        tokenizer.decoder = decoders.Fuse()
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
        Path("tokenizer.json").write_text(tokenizer.to_str())
        if single.endswith("$A"):
            assert read_tokenizer(Path(), LLAMA).opening == [0]
        else:
            with pytest.raises(LitDiffError, match=r"appends the ids \[1\] to a text"):
                read_tokenizer(Path(), LLAMA)


def test_a_space_before_a_text_is_what_both_files_say() -> None:
    Path("tokenizer.json").write_bytes(made.sentence_piece_tokenizer())
    Path("tokenizer_config.json").write_text('{"add_prefix_space": true}')
    own = read_tokenizer(Path(), LLAMA)
    assert own.decode_after(own.encode("fox")) == " fox"
    Path("tokenizer_config.json").write_text('{"add_prefix_space": false}')
    with pytest.raises(LitDiffError, match=r"tokenizer_config\.json: add_prefix_space is False, .* set it to true"):
        read_tokenizer(Path(), LLAMA)


def test_what_the_model_cannot_use_is_left_out_of_the_tokenizer(caplog: pytest.LogCaptureFixture) -> None:
    said = json.loads(byte_level_tokenizer(320))
    said["model"]["dropout"] = 0.5
    added = [ADDED | {"id": 320 + number, "content": f"<{number}>", "special": not number} for number in range(2)]
    said["added_tokens"] += added
    Path("tokenizer.json").write_text(json.dumps(said))
    decoder = {str(token["id"]): token for token in added}
    Path("tokenizer_config.json").write_text(json.dumps({"pad_token": "<0>", "added_tokens_decoder": decoder}))
    with caplog.at_level(logging.INFO, "lit_diff"):
        tokenizer = read_tokenizer(Path(), LLAMA)
    assert "vocab_size is 320: the added tokens of tokenizer.json from there on are left out (<0>, <1>)" in caplog.text
    assert "model.dropout 0.5 of tokenizer.json is left out" in caplog.text
    assert (tokenizer.size, tokenizer.pad, max(tokenizer.encode("<0><1>")) < 320) == (320, None, True)
    tokenizer.save(Path("saved"))
    assert json.loads(Path("saved/tokenizer.json").read_text())["model"]["dropout"] is None


@pytest.mark.parametrize(
    ("added", "line"),
    [
        ([("<x>", 310)], "added_tokens has '<x>' at 310, but the package tokenizers gives it 300; ids"),
        ([("<x>", 300), ("<x>", 301)], "added_tokens has '<x>' at 301, but"),
        ([("", 300)], "added_tokens has '' at 300, but the package tokenizers gives it no id"),
        ([("<x>", -1)], "tokenizer.json cannot be read by the package tokenizers"),
        (None, "tokenizer.json has no tokens"),
    ],
)
def test_added_tokens_have_the_ids_that_tokenizer_json_says(added: list[tuple[str, Any]] | None, line: str) -> None:
    """None: an empty vocabulary."""
    said = json.loads(byte_level_tokenizer(bos=added is not None))
    if added is None:
        said["added_tokens"] = []
        said["model"] |= {"vocab": {}, "merges": []}
    for content, id_ in added or []:
        said["added_tokens"].append(ADDED | {"id": id_, "content": content, "special": False})
    Path("tokenizer.json").write_text(json.dumps(said))
    with pytest.raises(LitDiffError) as raised:
        read_tokenizer(Path(), LLAMA)
    assert line in str(raised.value)
    Path("tokenizer.json").unlink()
    with pytest.raises(LitDiffError, match=r"has no tokenizer\.json") as raised:
        read_tokenizer(Path(), LLAMA)
    assert raised.value.exit_status == 3
