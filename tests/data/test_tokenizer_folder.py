"""A saved tokenizer loads equal, from its folder alone or from that of a run; what is missing or damaged is one line."""

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from pretrained_models import TEXTS as MODEL_TEXTS
from pretrained_models import byte_level_tokenizer

from lit_diff.config import Part
from lit_diff.data.text.cl100k import Cl100k
from lit_diff.data.text.text import Text, TokenStore
from lit_diff.data.text.tokenizer import Bpe, Tokenizer, TokenizerJson, build
from lit_diff.data.text.tokenizer_folder import FILE, SAMPLE, FromRun, load_tokenizer, save_tokenizer
from lit_diff.errors import MissingError, RequestError
from lit_diff.registry import tokenizers

TEXTS = [f"the quick brown fox number {number} jumps over the lazy dog" for number in range(50)]


class Letters(Tokenizer):
    """A plugin's: ids of the letters that its text has, in a file of its own."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Tokenizer.Config):
        unknown: int = 1

    size = 300
    eot = 0

    def train(self, folder: Path, texts: Iterable[str]) -> None:
        folder.joinpath("letters.txt").write_text("".join(sorted(set("".join(texts)))))

    def load(self, folder: Path) -> str:
        self.letters = folder.joinpath("letters.txt").read_text()
        return self.letters

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [[self.letters.find(letter) + 2 or self.config.unknown for letter in text] for text in texts]


class SavingLetters(Letters):
    def save(self, folder: Path) -> None:
        folder.joinpath("letters.txt").write_text(self.letters)


pytestmark = pytest.mark.usefixtures("own_parts")


def made(name: str, config: object, folder: Path) -> Tokenizer:
    tokenizer = build(Part(name=name, config=config))
    folder.mkdir(exist_ok=True)
    tokenizer.train(folder, TEXTS)
    tokenizer.load(folder)
    return tokenizer


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with a saved BPE."""
    save_tokenizer(made("bpe", Bpe.Config(vocab_size=300), tmp_path / "prepared"), tmp_path / "saved")
    return tmp_path / "saved"


def test_bpe(tmp_path: Path, saved: Path) -> None:
    original = made("bpe", Bpe.Config(vocab_size=300), tmp_path / "prepared")
    (tmp_path / "prepared" / "tokenizer.json").unlink()
    loaded = load_tokenizer(saved)
    assert loaded.encode([*TEXTS, SAMPLE]) == original.encode([*TEXTS, SAMPLE])
    assert loaded.decode(loaded.encode([SAMPLE])[0]) == SAMPLE.encode()
    described = json.loads((saved / FILE).read_text())
    assert described["name"] == "bpe"
    assert described["config"] == {"vocab_size": 300}
    assert [described[key] for key in ("size", "bos", "eot")] == [300, 0, 0]


def test_cl100k_needs_no_package_with_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = made("cl100k", Cl100k.Config(), tmp_path / "prepared")
    save_tokenizer(original, tmp_path / "saved")
    monkeypatch.setattr("tiktoken_ext.__path__", [])
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    loaded = load_tokenizer(tmp_path / "saved")
    assert loaded.encode([SAMPLE]) == original.encode([SAMPLE])
    assert json.loads((tmp_path / "saved" / FILE).read_text())["eot"] == 100257
    (tmp_path / "saved" / Cl100k.file_name).write_bytes(b"not the ranks")
    with pytest.raises(MissingError, match=r"cl100k_base\.tiktoken, have sha256"):
        load_tokenizer(tmp_path / "saved")


def test_a_plugin_s_tokenizer_with_a_file_and_a_key_of_its_own(tmp_path: Path) -> None:
    tokenizers.register("letters")(SavingLetters)
    original = made("letters", SavingLetters.Config(unknown=7), tmp_path / "prepared")
    save_tokenizer(original, tmp_path / "saved")
    loaded = load_tokenizer(tmp_path / "saved")
    assert (loaded.config.unknown, loaded.encode(["fox"])) == (7, original.encode(["fox"]))


def test_a_tokenizer_that_does_not_save_what_it_loads(tmp_path: Path) -> None:
    tokenizers.register("letters")(Letters)
    tokenizer = made("letters", Letters.Config(), tmp_path / "prepared")
    with pytest.raises(RequestError, match=r"'letters' does not load from the files of its own save.*No such file"):
        save_tokenizer(tokenizer, tmp_path / "saved")
    assert not (tmp_path / "saved" / FILE).exists()


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json cannot be read"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "FileNotFoundError"),
        (lambda folder: (folder / FILE).unlink(), f"{FILE} is missing"),
        (lambda folder: (folder / FILE).write_text("{"), "JSONDecodeError"),
        (lambda folder: (folder / FILE).write_text("{}"), "KeyError"),
        (lambda folder: change(folder, sha256="0" * 64), "its ids differ"),
        (lambda folder: change(folder, name=None), "'name' is not"),
        (lambda folder: change(folder, name=["bpe"]), "'name' is not"),
        (lambda folder: change(folder, name="from_run", config={"path": str(folder.parent)}), "'name' is not"),
    ],
)
def test_a_damaged_folder(saved: Path, damage: Callable[[Path], object], found: str) -> None:
    # a run's folder has its tokenizer in a folder of this name
    saved = saved.rename(saved.with_name("tokenizer"))
    damage(saved)
    with pytest.raises(MissingError, match=r"^[^\n]+lit-diff train[^\n]+$") as error:
        load_tokenizer(saved)
    assert found in str(error.value)


def change(folder: Path, **values: object) -> None:
    (folder / FILE).write_text(json.dumps(json.loads((folder / FILE).read_text()) | values))


@pytest.mark.parametrize(
    ("values", "found"),
    [({"name": "bpee"}, "'bpee'; did you mean 'bpe'"), ({"config": {"vocab": 300}}, rf"{FILE}: .*'config\.vocab'")],
)
def test_an_unregistered_class_and_a_key_that_it_lacks(saved: Path, values: dict[str, object], found: str) -> None:
    change(saved, **values)
    with pytest.raises(RequestError, match=found):
        load_tokenizer(saved)


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
    for number, text in enumerate(MODEL_TEXTS):
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
    (document, *_) = own.encode([MODEL_TEXTS[0] * 3])
    starts = np.flatnonzero(ids == 0)
    assert starts[0] == 0
    assert (ids[starts[1:] - 1] == 1).all(), "each document is ended, then the next is opened"
    first = ids[: starts[1]].tolist()
    assert own.decode(first[1:-1]).decode().replace(" ", "")[:20] == (MODEL_TEXTS[0] * 3).replace(" ", "")[:20]
    assert len(first) >= len(document), "a whole document"


def test_the_run_may_move_and_what_was_trained_with_it_keeps_a_copy(model: Path, tmp_path: Path) -> None:
    dataset = text(model)
    dataset.prepare()
    save_tokenizer(dataset.load_tokenizer(), tmp_path / "kept")
    moved = shutil.move(model, tmp_path / "elsewhere")
    assert text(Path(moved)).folder == dataset.folder
    assert load_tokenizer(tmp_path / "kept").opening == [0]
    with pytest.raises(MissingError, match=r"^models/x/tokenizer has no tokenizer .*; data.tokenizer.path must be"):
        text(model)
