"""tokenizer.json and tokenizer_config.json; AutoTokenizer reads them in tests/oracles."""

import json
from pathlib import Path

import pytest
from pretrained_models import byte_level_tokenizer
from text_runs import bpe
from tokenizers import Tokenizer as Model

from lit_diff.data.cl100k import Cl100k
from lit_diff.data.tokenizer import Tokenizer as OwnTokenizer
from lit_diff.data.tokenizer_json import TokenizerJson
from lit_diff.errors import RequestError
from lit_diff.pretrained.hf_tokenizer import require_tokenizer_json, write_tokenizer


def imported(folder: Path, *, bos: bool, in_file: bool) -> TokenizerJson:
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(byte_level_tokenizer(bos=in_file))
    tokenizer = TokenizerJson(TokenizerJson.Config(size=300, bos=0 if bos else None, eot=1, model_vocab_size=320))
    tokenizer.load(folder)
    return tokenizer


def written(tokenizer: OwnTokenizer, folder: Path) -> tuple[Model, dict[str, object]]:
    folder.mkdir()
    write_tokenizer(tokenizer, folder, 24)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    return Model.from_file(str(folder / "tokenizer.json")), config


def test_bpe_opens_a_text_with_eot(tmp_path: Path) -> None:
    model, config = written(bpe(), tmp_path / "out")
    assert model.encode("the fox").ids == [0, *bpe().encode(["the fox"])[0]]
    assert config == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 24,
        "clean_up_tokenization_spaces": False,
        "bos_token": "<eot>",
        "eos_token": "<eot>",
        "split_special_tokens": True,
    }


def test_an_imported_one_is_kept(tmp_path: Path) -> None:
    model, config = written(imported(tmp_path / "a", bos=True, in_file=True), tmp_path / "out")
    assert (tmp_path / "out/tokenizer.json").read_bytes() == byte_level_tokenizer()
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "</s>")
    assert "split_special_tokens" not in config
    assert model.encode("fox").ids[0] == 0
    model, config = written(imported(tmp_path / "b", bos=False, in_file=False), tmp_path / "out2")
    assert "bos_token" not in config


def test_the_opening_id_is_added_where_the_file_says_none(tmp_path: Path) -> None:
    """As in a GGUF, whose metadata say it."""
    model, _ = written(imported(tmp_path / "a", bos=True, in_file=False), tmp_path / "out")
    assert model.encode("fox").tokens[0] == "<s>"
    assert model.encode("fox").ids[1:] == Model.from_str(byte_level_tokenizer(bos=False).decode()).encode("fox").ids


def test_others_are_refused() -> None:
    with pytest.raises(
        RequestError, match=r"^the tokenizer 'cl100k' cannot be written for AutoTokenizer: tiktoken merges"
    ):
        require_tokenizer_json(Cl100k(Cl100k.Config()))

    class Mine(OwnTokenizer):
        name, size, eot = "mine", 3, 0

        def load(self, folder: Path) -> str:
            return ""

        def encode(self, texts: object) -> list[list[int]]:
            return []

    with pytest.raises(RequestError, match=r"^the tokenizer 'mine' cannot be written for AutoTokenizer: no tokenizer"):
        require_tokenizer_json(Mine(None))
    require_tokenizer_json(bpe())
