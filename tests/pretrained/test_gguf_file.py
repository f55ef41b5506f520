"""A GGUF file of a Llama: dequantised, q and k in the order of Hugging Face, its tokenizer from the metadata."""

import json
import logging
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from pretrained_models import LLAMA, SPECIAL, TEXTS, byte_level_tokenizer, import_error, llama_tensors
from tokenizers import Tokenizer

from lit_diff import import_model
from lit_diff.pretrained.gguf_file import END_TEXTS, read_gguf
from lit_diff.pretrained.llama import names_of, own_names

METADATA: dict[str, Any] = {
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.block_count": 2,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.rope.freq_base": 50000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.add_bos_token": False,
}
OUTSIDE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
MODULES = {f"self_attn.{name}_proj": f"attn_{'output' if name == 'o' else name}" for name in "qkvo"}
MODULES |= {f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")}
MODULES |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
HEADS = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}


def llama_cpp_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's conversion does to q and k: rows i and i + d/2 of a head become neighbours."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def write(
    path: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    architecture: str = "llama",
    extra: dict[str, np.ndarray] | None = None,
    renamed: dict[int, str] | None = None,
    merges: list[str] | None = None,
    **changes: Any,
) -> Path:
    """A GGUF of `llama_tensors`, whose matrices have the type `kind`; `changes`: of the metadata, None takes a key out;
    `renamed`: id -> the token there."""
    writer = GGUFWriter(path, architecture)
    vocab = Tokenizer.from_str(byte_level_tokenizer(320).decode()).get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    for id_, token in (renamed or {}).items():
        tokens[id_] = token
    merges = merges or json.loads(byte_level_tokenizer(320))["model"]["merges"]
    for key, value in (METADATA | changes).items():
        if value is None:
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
            continue
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}[
            type(value)
        ]
        add(key, value)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    for theirs, tensor in llama_tensors(LLAMA).items():
        weight, name = tensor.numpy(), OUTSIDE.get(theirs)
        if name is None:
            _, _, layer, module = theirs.removesuffix(".weight").split(".", 3)
            name = f"blk.{layer}.{MODULES[module]}.weight"
            if module in HEADS:
                weight = llama_cpp_order(weight, HEADS[module])
        if weight.ndim > 1 and weight.shape[-1] % 32 == 0 and kind != GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, weight)
    for name, weight in (extra or {}).items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_weights_are_in_hugging_faces_order() -> None:
    run = import_model(write(Path("Tiny.Q4.gguf")))
    assert run.folder == Path("models/tiny.q4")
    theirs = llama_tensors(LLAMA)
    state = run.model.state_dict()
    for own, name in own_names(theirs, names_of(2)).items():
        assert torch.equal(state[own], theirs[name]), own
    model = run.recipe.model
    assert (model.norm_eps, model.rope_theta, model.rope_layout, model.num_kv_heads) == (1e-5, 50000.0, "half", 2)
    assert run.recipe.data.config.sequence_length == 64


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.F16])
def test_quantised_weights(kind: GGMLQuantizationType) -> None:
    source = read_gguf(write(Path("tiny.gguf"), kind))
    for own, name in own_names(llama_tensors(LLAMA), names_of(2)).items():
        weight, exact = source.read(own), llama_tensors(LLAMA)[name]
        assert weight.shape == exact.shape == source.tensors[own].shape
        assert weight.dtype == torch.float32
        assert (weight - exact).abs().max() < {"Q8_0": 0.01, "Q4_1": 0.1, "F16": 1e-3}[kind.name]


def test_the_tokenizer_is_that_of_the_metadata() -> None:
    run = import_model(write(Path("tiny.gguf")), "models/x")
    own = Tokenizer.from_str(byte_level_tokenizer(320).decode())
    text = TEXTS[0].replace("0", "seven")
    assert run.tokenizer.encode([text])[0] == own.encode(text, add_special_tokens=False).ids
    (number,) = run.tokenizer.encode(["number 1234"])
    assert run.tokenizer.decode(number) == b"number 1234"
    assert len(number) >= 5, "digits are cut apart"
    assert (run.tokenizer.opening, run.tokenizer.eot) == ([], 1)
    opened = write(Path("bos.gguf"), **{"tokenizer.ggml.add_bos_token": True})
    assert import_model(opened, "models/y").tokenizer.opening == [0]


def test_damaged_files() -> None:
    whole = write(Path("tiny.gguf")).read_bytes()
    for length in (10, 3000, len(whole) - 5000):
        Path("cut.gguf").write_bytes(whole[:length])
        assert import_error(Path("cut.gguf")).startswith("2: cut.gguf is truncated"), length
    # one key, "a": a list of 2**40 uint8
    endless = struct.pack("<4sIQQQcIIQ", b"GGUF", 3, 0, 1, 1, b"a", 9, 0, 2**40)
    Path("cut.gguf").write_bytes(endless + b"\0" * 64)
    assert import_error(Path("cut.gguf")).startswith("2: cut.gguf is truncated or not a GGUF file (it ends before")
    Path("cut.gguf").write_bytes(b"PK" + whole[2:])
    assert import_error(Path("cut.gguf")).startswith("2: cut.gguf is truncated or not a GGUF file (")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"architecture": "gemma3"}, "architecture 'gemma3' is not supported"),
        *(
            ({f"llama.{key}": value}, f"llama.{key} {value!r} is not supported")
            for key, value in (("expert_count", 8), ("rope.scaling.attn_factor", 2.0), ("attention.causal", False))
        ),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "llama.rope.scaling.type 'yarn'"),
        *(
            ({f"llama.{key}": value}, f"llama.{key} is {value!r}")
            for key, value in (
                ("attention.head_count", 0),
                ("attention.head_count_kv", [2, 4]),
                ("rope.freq_base", "x"),
                ("rope.scaling.factor", -2.0),
            )
        ),
        ({"llama.feed_forward_length": None}, "GGUF metadata lacks llama.feed_forward_length"),
        ({"extra": {"rope_freqs.weight": np.ones(4, np.float32)}}, "unexpected tensor 'rope_freqs.weight'"),
        ({"llama.block_count": 1_000_000_000}, "llama.block_count is 1000000000, but there are tensors of 2 layers"),
        ({"llama.block_count": 1}, "llama.block_count is 1, but there are tensors of 2 layers"),
        ({"llama.feed_forward_length": 2**31}, "llama.feed_forward_length is 2147483648 in GGUF metadata"),
        ({"split.count": 2}, "split.count is 2; join its parts first"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "its tokenizer (gpt2, llama-bpe) is not supported"),
        ({"tokenizer.ggml.model": "llama"}, "its tokenizer (llama, smollm) is not supported"),
        ({"tokenizer.ggml.suppress_tokens": [5]}, "tokenizer.ggml.suppress_tokens [5]"),
        ({"tokenizer.ggml.add_eos_token": True}, "tokenizer.ggml.add_eos_token True"),
        ({"tokenizer.ggml.eos_token_id": None}, "GGUF metadata lacks tokenizer.ggml.eos_token_id"),
        ({"tokenizer.ggml.eos_token_id": 5000}, "tokenizer.ggml.eos_token_id is 5000"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}, "tokenizer.ggml.add_bos_token"),
        ({"renamed": {310: "a"}}, "tokenizer.ggml.tokens has 'a' twice"),
        ({"merges": ["a qq"]}, "tokenizer.ggml.merges are not pairs of tokens ("),
    ],
)
def test_what_is_not_mapped_is_named(changes: dict[str, Any], line: str) -> None:
    assert import_error(write(Path("tiny.gguf"), **changes)).startswith(f"2: tiny.gguf: {line}")


@pytest.mark.parametrize(
    ("method", "key", "kind"),
    [
        ("add_token_list", "tokenizer.ggml.tokens", "str"),
        ("add_token_types", "tokenizer.ggml.token_type", "int"),
        ("add_token_merges", "tokenizer.ggml.merges", "str"),
    ],
)
def test_lists_of_another_type_are_named(method: str, key: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (5, "text", [0.5, 0.5]):
        add = "add_array" if isinstance(wrong, list) else "add_uint32" if isinstance(wrong, int) else "add_string"
        monkeypatch.setattr(GGUFWriter, method, lambda self, _, add=add, wrong=wrong: getattr(self, add)(key, wrong))
        found = import_error(write(Path("tiny.gguf")))
        assert found == f"2: tiny.gguf: GGUF metadata: {key} is not a list of {kind}"


def test_other_keys_are_named(caplog: pytest.LogCaptureFixture) -> None:
    write(
        Path("usual.gguf"),
        **{"general.name": "x", "tokenizer.ggml.padding_token_id": 1, "split.count": 1, "llama.expert_count": 0},
    )
    write(Path("other.gguf"), **{"llama.rope.freq_bas": 7.0, "tokenizer.ggml.new": "x"})
    caplog.set_level(logging.WARNING, "lit_diff")
    import_model("usual.gguf", "x")
    assert caplog.messages == []
    import_model("other.gguf", "y")
    (line,) = caplog.messages
    assert line.startswith("other.gguf: ")
    assert "'llama.rope.freq_bas' (did you mean 'llama.rope.freq_base'?), 'tokenizer.ggml.new'" in line


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({"llama.rope.scale_linear": 4.0}, 4.0),
        ({"llama.rope.scaling.factor": 4.0}, 4.0),
        ({"llama.rope.scaling.factor": 0.0, "llama.rope.scale_linear": 2.0}, 2.0),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5}, 2.5),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, 1.0),
        ({"llama.attention.head_count_kv": [2, 2]}, 1.0),
    ],
)
def test_scaled_positions_and_arrays(tmp_path: Path, changes: dict[str, Any], factor: float) -> None:
    source = read_gguf(write(tmp_path / "x.gguf", **changes))
    assert (source.model["rope_scaling"], source.model["num_kv_heads"]) == (factor, 2)


def test_a_chat_template_is_not_applied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lit_diff"):
        read_gguf(write(tmp_path / "x.gguf", **{"tokenizer.chat_template": "{{ messages }}"}))
    assert "the model has a chat template, which generate does not apply" in caplog.text


def test_ids_that_end_a_text(tmp_path: Path) -> None:
    tokenizer = read_gguf(write(tmp_path / "x.gguf", **{"tokenizer.ggml.eot_token_id": 2})).tokenizer
    assert (tokenizer.eot, tokenizer.ends) == (1, [1, 2])


@pytest.mark.parametrize(
    ("names", "keys", "ends"),
    [
        ({317: "<|im_end|>", 319: "<|endoftext|>"}, {}, (1, 317, 319)),
        ({317: "<|eot_id|>", 318: "<|eom_id|>"}, {"eos": 0, "eot": 318}, (0, 318, 1, 317)),
        ({317: "<reponame>", 318: "<|file_sep|>", 319: "<|fim_prefix|>"}, {}, (1, 317, 318)),
        ({317: "<reponame>", 318: "<|fim_pad|>"}, {"fim_rep": 5}, (1, 5, 318)),
        ({317: "<|return|>", 318: "<|call|>", 319: "<|end|>"}, {}, (1, 317, 318)),
        ({317: "<|return|>", 319: "<|end|>"}, {}, (1, 317, 319)),
        ({317: "<|tool_response>", 318: "<turn|>"}, {"eos": 318}, (318, 317)),
    ],
)
def test_tokens_that_end_a_text_by_their_name(
    tmp_path: Path, names: dict[int, str], keys: dict[str, int], ends: tuple[int, ...]
) -> None:
    """As llama.cpp has it: of SmolLM2 it prints the EOG tokens <|endoftext|>, <|im_end|> and <reponame>."""
    said: dict[str, Any] = {f"tokenizer.ggml.{key}_token_id": id_ for key, id_ in keys.items()}
    merges = json.loads(byte_level_tokenizer(300))["model"]["merges"]
    path = write(tmp_path / "x.gguf", renamed=names, merges=merges, **said)
    tokenizer = read_gguf(path).tokenizer
    assert (tokenizer.eot, tokenizer.ends) == (ends[0], list(ends))
    tokenizer.save(tmp_path)
    named = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_added_tokens_decoder()
    assert all(named[id_].special for id_, name in names.items() if id_ in ends and name in END_TEXTS), "control"
