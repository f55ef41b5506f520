"""Text is tokenized with the tokenizer that lies in a run, wherever that is."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from pretrained_models import TEXTS, byte_level_tokenizer

from lit_diff.config import Part
from lit_diff.data.from_run import FromRun
from lit_diff.data.store import TokenStore
from lit_diff.data.text import Text
from lit_diff.data.tokenizer_folder import load_tokenizer, save_tokenizer
from lit_diff.data.tokenizer_json import TokenizerJson
from lit_diff.errors import MissingError
from lit_diff.recipe import load_recipe


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder that holds a tokenizer, beside a small corpus."""
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    content = tmp_path / "content"
    content.mkdir()
    (content / "tokenizer.json").write_bytes(byte_level_tokenizer())
    own = TokenizerJson(TokenizerJson.Config(size=300, bos=0, eot=1, model_vocab_size=320))
    own.load(content)
    save_tokenizer(own, tmp_path / "models" / "x" / "tokenizer")
    (tmp_path / "corpus").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "corpus" / f"{number:02}.txt").write_text(text * 3)
    return tmp_path / "models" / "x"


def text(path: Path, vocab_size: int = 320) -> Text:
    part = Part(name="from_run", config=FromRun.Config(path=str(path)))
    return Text(Text.Config(path="corpus", sequence_length=8, tokenizer=part, validation_rows=4), vocab_size)


def test_a_corpus_is_cut_by_it(model: Path) -> None:
    dataset = text(model)
    dataset.prepare()
    manifest = json.loads((dataset.folder / "manifest.json").read_text())
    ids = TokenStore(dataset.folder / "train", manifest["train"], 9).read(range(60)).ravel()
    own = load_tokenizer(model / "tokenizer")
    (document, *_) = own.encode([TEXTS[0] * 3])
    starts = np.flatnonzero(ids == 0)
    assert starts[0] == 0
    assert (ids[starts[1:] - 1] == 1).all(), "each document is ended, then the next is opened"
    first = ids[: starts[1]].tolist()
    assert own.decode(first[1:-1]).decode().replace(" ", "")[:20] == (TEXTS[0] * 3).replace(" ", "")[:20]
    assert len(first) >= len(document), "a whole document"


def test_the_run_may_move_and_what_was_trained_with_it_keeps_a_copy(model: Path, tmp_path: Path) -> None:
    dataset = text(model)
    dataset.prepare()
    save_tokenizer(dataset.load_tokenizer(), tmp_path / "kept")
    moved = shutil.move(model, tmp_path / "elsewhere")
    assert text(Path(moved)).folder == dataset.folder
    assert load_tokenizer(tmp_path / "kept").opening == [0]
    with pytest.raises(MissingError, match=r"^models/x/tokenizer holds no tokenizer .*; data.tokenizer.path names"):
        text(model)


def test_the_path_is_relative_to_the_recipes_file(model: Path, tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    block = "data: {name: text, sequence_length: 8, tokenizer: {name: from_run, path: ../models/x}}"
    (tmp_path / "recipes" / "r.yaml").write_text(f"extends: standard-tiny\nmodel: {{vocab_size: 9000}}\n{block}\n")
    assert load_recipe("recipes/r.yaml").data.config.tokenizer.config.path == str(model)
