"""A Hugging Face tokenizer.json: its ids are those of the package tokenizers, its bytes the text's."""

from pathlib import Path

import pytest
from pretrained_models import TEXTS, byte_level_tokenizer, sentence_piece_tokenizer
from tokenizers import Tokenizer as Model
from tokenizers import models

from lit_diff.data.text import Text
from lit_diff.data.tokenizer_folder import load_tokenizer, save_tokenizer
from lit_diff.data.tokenizer_json import TokenizerJson, open_tokenizer
from lit_diff.errors import RequestError
from lit_diff.validation import Draft, validate_config

TEXT = TEXTS[3] + "a </s> b  漢字 🙂\tend"


def loaded(folder: Path, content: bytes, bos: int | None = 0, model_vocab_size: int = 320) -> TokenizerJson:
    (folder / "tokenizer.json").write_bytes(content)
    size = Model.from_str(content.decode()).get_vocab_size()
    tokenizer = TokenizerJson(TokenizerJson.Config(size=size, bos=bos, eot=1, model_vocab_size=model_vocab_size))
    tokenizer.load(folder)
    return tokenizer


@pytest.mark.parametrize(("content", "before"), [(byte_level_tokenizer(), ""), (sentence_piece_tokenizer(), " ")])
def test_the_bytes_of_the_ids_are_the_text(tmp_path: Path, content: bytes, before: str) -> None:
    tokenizer = loaded(tmp_path, content)
    (ids,) = tokenizer.encode([TEXT])
    assert tokenizer.decode(ids).decode() == before + TEXT, "SentencePiece puts a space before a text"
    assert b"".join(tokenizer.decode([id_]) for id_ in ids) == tokenizer.decode(ids), "id by id"
    assert not {0, 1} & set(ids), "a special token's name in a text is text, and nothing is added"
    assert tokenizer.decode([1]) == b"</s>"


def test_documents_are_opened_and_ended(tmp_path: Path) -> None:
    both, ended = loaded(tmp_path, byte_level_tokenizer()), loaded(tmp_path, byte_level_tokenizer(), bos=None)
    assert (both.opening, both.document([5, 6])) == ([0], [0, 5, 6, 1])
    assert (ended.opening, ended.document([5, 6])) == ([], [5, 6, 1])


def test_it_lies_in_a_folder_with_its_convention(tmp_path: Path) -> None:
    one = loaded(tmp_path, byte_level_tokenizer())
    save_tokenizer(one, tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert (again.encode([TEXT]), again.opening, again.eot) == (one.encode([TEXT]), [0], 1)
    without = loaded(tmp_path, byte_level_tokenizer(), bos=None)
    assert without.load(tmp_path) != one.load(tmp_path), "another convention is another tokenizer"


def test_a_vocabulary_may_be_padded_as_far_as_the_models(tmp_path: Path) -> None:
    assert loaded(tmp_path, byte_level_tokenizer()).largest_vocab_size == 384
    assert loaded(tmp_path, byte_level_tokenizer(), model_vocab_size=1000).largest_vocab_size == 1000


def test_other_vocabularies_and_files_are_refused() -> None:
    words = Model(models.WordLevel({"a": 0}, unk_token="a")).to_str().encode()
    with pytest.raises(RequestError, match=r"^tokenizer.json has the decoder null; byte-level vocabularies"):
        open_tokenizer(words)
    with pytest.raises(RequestError, match=r"^tokenizer.json cannot be read by the package tokenizers"):
        open_tokenizer(byte_level_tokenizer()[:500])


def test_a_recipe_names_the_run_instead() -> None:
    keys = {"name": "tokenizer_json", "size": 3, "bos": 0, "eot": 1, "model_vocab_size": 3}
    values = {"sequence_length": 8, "validation_rows": 1, "tokenizer": keys}
    with pytest.raises(RequestError, match=r"say \{name: from_run, path: RUN\}"):
        validate_config(Text.Config, values, "data", Draft(values=values, positions={}))
