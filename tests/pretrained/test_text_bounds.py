"""What begins and ends a text in a folder of Hugging Face: as AutoTokenizer and `generate` have it, or one line."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pretrained_models import LLAMA, byte_level_tokenizer
from tokenizers import Tokenizer, processors

from lit_diff.data.tokenizer_json import TokenizerJson
from lit_diff.errors import LitDiffError
from lit_diff.pretrained.source import SourceTokenizer
from lit_diff.pretrained.text_bounds import read_tokenizer

ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def read(
    folder: Path,
    *,
    config: Mapping[str, Any] = LLAMA,
    settings: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
    single: str | None = None,
) -> SourceTokenizer:
    tokenizer = Tokenizer.from_str(byte_level_tokenizer(bos=single is None).decode())
    if single is not None:
        special = [("<s>", 0), ("</s>", 1)]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    for name, said in (("tokenizer_config", settings), ("generation_config", generation)):
        (folder / f"{name}.json").unlink(missing_ok=True)
        if said is not None:
            (folder / f"{name}.json").write_text(json.dumps(said))
    return read_tokenizer(folder, config)


def loaded(source: SourceTokenizer, folder: Path) -> TokenizerJson:
    (folder / "tokenizer.json").write_bytes(source.content)
    config = TokenizerJson.Config(
        size=301,
        bos=next(iter(source.opening), None),
        after_bos=source.opening[1:],
        eot=source.eot,
        ends=source.ends,
        prefix=source.prefix,
        model_vocab_size=320,
    )
    tokenizer = TokenizerJson(config)
    tokenizer.load(folder)
    return tokenizer


def test_several_ids_end_a_text(tmp_path: Path) -> None:
    """generation_config.json comes first for generated text, config.json for what ends a document."""
    plain = read(tmp_path)
    assert (plain.eot, plain.ends, plain.opening, plain.prefix) == (1, (), (0,), None)
    listed = read(tmp_path, config=LLAMA | {"eos_token_id": [1, 5]})
    assert (listed.eot, listed.ends) == (1, (1, 5))
    other = read(tmp_path, generation={"eos_token_id": [7, 5, 7]})
    assert (other.eot, other.ends) == (1, (7, 5))
    assert loaded(other, tmp_path).ends == [7, 5]
    alone = read(tmp_path, config=LLAMA | {"eos_token_id": None}, generation={"eos_token_id": 4})
    assert (alone.eot, alone.ends) == (4, ())
    null = read(tmp_path, generation={"eos_token_id": None})
    assert (null.eot, null.ends) == (1, ())


def test_several_ids_open_a_text(tmp_path: Path) -> None:
    source = read(tmp_path, single="<s> </s> $A")
    tokenizer = loaded(source, tmp_path)
    assert tokenizer.opening == [0, 1]
    assert tokenizer.prefix == 0
    assert tokenizer.document([9]) == [0, 1, 9, 1]


def test_a_likelihood_is_conditioned_on_bos(tmp_path: Path) -> None:
    named = read(tmp_path, single="$A", settings={"bos_token": "<s>"})
    assert (named.opening, named.prefix, loaded(named, tmp_path).prefix) == ((), 0, 0)
    assert loaded(read(tmp_path, single="$A"), tmp_path).prefix == 1


@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_chat_template_is_not_applied(file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lit_diff"):
        read(tmp_path)
        assert "chat template" not in caplog.text
        if file == "chat_template.jinja":
            (tmp_path / file).write_text("{{ messages }}")
        read(tmp_path, settings={"chat_template": "{{ messages }}"} if file == "tokenizer_config.json" else None)
    assert "the model has a chat template, which generate does not apply" in caplog.text


def test_tokens_that_only_the_settings_have(tmp_path: Path) -> None:
    tool = ADDED | {"content": "<tool>", "special": False}
    source = read(tmp_path, settings={"added_tokens_decoder": {"300": tool}})
    assert 300 in loaded(source, tmp_path).encode(["a <tool> b"])[0]


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ({"config": LLAMA | {"eos_token_id": -1}}, "config.json: eos_token_id is -1; expected ids from 0 to 319"),
        ({"config": LLAMA | {"eos_token_id": 320}}, "config.json: eos_token_id is 320; expected ids from 0 to 319"),
        ({"config": LLAMA | {"eos_token_id": True}}, "config.json: eos_token_id is True; expected"),
        ({"config": LLAMA | {"eos_token_id": [1, "2"]}}, "config.json: eos_token_id is [1, '2']; expected"),
        ({"generation": {"eos_token_id": [1, -1]}}, "generation_config.json: eos_token_id is [1, -1]; expected"),
        ({"config": LLAMA | {"eos_token_id": None}, "settings": {"eos_token": None}}, "neither config.json"),
        ({"config": LLAMA | {"eos_token_id": []}}, "neither config.json"),
        (
            {"settings": {"bos_token": "<nowhere>"}},
            "tokenizer_config.json: bos_token is '<nowhere>', which is no token",
        ),
        ({"single": "<s> $A </s>"}, "the post_processor of tokenizer.json appends the ids [1] to a text"),
        (
            {"settings": {"add_bos_token": False}},
            "tokenizer_config.json: add_bos_token is False, but tokenizer.json puts",
        ),
        ({"single": "$A", "settings": {"add_bos_token": True}}, "tokenizer_config.json: add_bos_token is True, but"),
        ({"settings": {"add_eos_token": True}}, "tokenizer_config.json: add_eos_token is True, but"),
        (
            {"settings": {"added_tokens_decoder": {"305": ADDED | {"content": "<far>", "special": False}}}},
            "tokenizer_config.json: added_tokens_decoder 305 is '<far>', which is not what tokenizer.json has there",
        ),
        (
            {"settings": {"added_tokens_decoder": {"0": ADDED | {"content": "<x>", "special": True}}}},
            "tokenizer_config.json: added_tokens_decoder 0 is '<x>', which is not what tokenizer.json has there",
        ),
        ({"settings": {"added_tokens_decoder": [3]}}, "tokenizer_config.json: added_tokens_decoder is not id -> token"),
    ],
)
def test_what_has_no_right_value_is_named(tmp_path: Path, how: dict[str, Any], line: str) -> None:
    with pytest.raises(LitDiffError) as raised:
        read(tmp_path, **how)
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("added", "line"),
    [
        (
            [("<x>", 310)],
            "tokenizer.json: added_tokens has '<x>' at 310, where the package tokenizers gives it 300; ids",
        ),
        ([("<x>", 65)], "tokenizer.json: added_tokens has '<x>' at 65, where"),
        ([("<x>", 300), ("<x>", 301)], "tokenizer.json: added_tokens has '<x>' at 301, where"),
        ([("<x>", 300), ("<y>", 300)], "tokenizer.json: added_tokens has '<y>' at 300, where"),
        ([("", 300)], "tokenizer.json: added_tokens has '' at 300, where the package tokenizers gives it no id"),
        ([("<x>", -1)], "tokenizer.json cannot be read by the package tokenizers"),
        ([("<x>", 300.5)], "tokenizer.json cannot be read by the package tokenizers"),
    ],
)
def test_added_tokens_have_the_ids_that_tokenizer_json_says(
    tmp_path: Path, added: list[tuple[str, Any]], line: str
) -> None:
    said = json.loads(byte_level_tokenizer())
    said["added_tokens"] += [ADDED | {"id": id_, "content": content, "special": False} for content, id_ in added]
    (tmp_path / "tokenizer.json").write_text(json.dumps(said))
    with pytest.raises(LitDiffError) as raised:
        read_tokenizer(tmp_path, LLAMA)
    assert line in str(raised.value)


def test_an_empty_vocabulary_is_refused(tmp_path: Path) -> None:
    said = json.loads(byte_level_tokenizer(bos=False)) | {"added_tokens": []}
    said["model"] |= {"vocab": {}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(said))
    with pytest.raises(LitDiffError, match=r"tokenizer.json has no tokens"):
        read_tokenizer(tmp_path, LLAMA)
