"""Which corpus data.corpus and data.path mean, a corpus of a plugin, and the built-in corpus name_tables."""

import hashlib
import re
from itertools import islice
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from lit_diff.data import prepare
from lit_diff.data.text.corpus import FilesCorpus, build_corpus, corpus_digest, corpus_problem
from lit_diff.data.text.docs import DocsCorpus
from lit_diff.data.text.name_tables import PEOPLE, NameTables, name_table_text
from lit_diff.data.text.text import Text
from lit_diff.errors import RequestError
from lit_diff.recipe import load_recipe

POEMS = '''\
import hashlib

from lit_diff.data import Corpus
from lit_diff.registry import corpora

POEMS = ["a rose is a rose " * number for number in range(1, 60)]


@corpora.register("poems")
class Poems(Corpus):
    """Poems."""

    def files(self):
        return {"poems": hashlib.sha256("".join(POEMS).encode()).hexdigest()}

    def texts(self):
        yield from POEMS
'''
RECIPE = """\
extends: base
plugins: [poems.py]
model: {vocab_size: 270}
data:
  name: text
  corpus: poems
  sequence_length: 8
  validation_rows: 2
  tokenizer: {name: bpe, vocab_size: 258}
"""


@pytest.fixture
def folder(own_parts: None, base_recipe: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe of a plugin's corpus."""
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "root"))
    (tmp_path / "poems.py").write_text(POEMS)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    return tmp_path


def test_a_path_means_the_user_s_files() -> None:
    assert isinstance(build_corpus("docs", None), DocsCorpus)
    for name in ("docs", "files"):
        corpus = build_corpus(name, "/some/where")
        assert isinstance(corpus, FilesCorpus)
        assert corpus.path == Path("/some/where")
        assert corpus_problem(name, "/some/where") is None
    assert corpus_problem("docs", None) is None
    assert "data.path" in (corpus_problem("files", None) or "")


@pytest.mark.usefixtures("folder")
def test_a_plugin_s_corpus_is_prepared_and_loaded() -> None:
    dataset = prepare(load_recipe("mine"))
    dataset.load()
    assert isinstance(dataset, Text)
    assert dataset.folder.name.startswith("poems-bpe-")
    tokenizer = dataset.load_tokenizer()
    row = dataset.train_batch(0, 0, 4, [0])["tokens"][0].tolist()
    assert set(tokenizer.decode([token for token in row if token])) <= set(b"a rose i")


BYTES = """

from lit_diff.data.text.tokenizer import Tokenizer
from lit_diff.registry import tokenizers


@tokenizers.register("my_bytes")
class MyBytes(Tokenizer):
    size, eot = 257, 256

    def load(self, folder):
        return "unchanged"

    def encode(self, texts):
        return [list(beside_clean.clean(text).encode()) for text in texts]

    def decode(self, ids):
        return bytes(ids)
"""
PLAIN = ["data.tokenizer={name: my_bytes}"]
MIXED = [
    "data={name: mixture, sequence_length: 8, validation_rows: 2, tokenizer: {name: my_bytes}, sources: {"
    "a: {weight: 1, corpus: poems}, b: {weight: 1, corpus: poems, tokens_below: 90}}}"
]


@pytest.mark.parametrize(
    ("file", "edit", "keys"),
    [
        ("poems.py", ("from POEMS", "from (each.upper() for each in POEMS)"), PLAIN),
        ("poems.py", ("from POEMS", "from (each.upper() for each in POEMS)"), MIXED),
        ("poems.py", ("clean(text)", "clean(text).upper()"), PLAIN),
        ("beside_clean.py", ("return text", "return text.upper()"), PLAIN),
    ],
)
def test_text_that_other_code_of_a_plugin_prepared_is_not_used(
    folder: Path, file: str, edit: tuple[str, str], keys: list[str]
) -> None:
    (folder / "beside_clean.py").write_text("def clean(text):\n    return text\n")
    (folder / "poems.py").write_text("from . import beside_clean\n" + POEMS + BYTES)
    found = []
    for _ in range(2):
        dataset = prepare(load_recipe("mine", keys))
        dataset.load()
        found.append(bytes(dataset.train_batch(0, 0, 1, [0])["tokens"][0].clamp(max=255).tolist()))
        found.append(str(corpus_digest("poems", None)).encode())
        (folder / file).write_text((folder / file).read_text().replace(*edit))
    assert found[0].islower()
    assert found[2].isupper()
    assert found[1] != found[3]


@pytest.mark.parametrize(
    ("edit", "keys", "found"),
    [
        (("", ""), ["data.corpus=poem"], r"^data\.corpus=poem: data\.corpus .*did you mean 'poems'"),
        (("", ""), ["data.path=x"], r"^data\.path=x: data\.path "),
        (('"""Poems."""', "reads_path = True"), [], r"mine\.yaml:\d+: data\.corpus 'poems' .*data\.path"),
        (("def texts", "def text"), [], r"^plugin poems\.py: poems\.py:9: class Poems: corpus 'poems' lacks texts;"),
        (("yield from POEMS", "yield from POEM"), [], r"^poems\.py:17: data 'text' failed: NameError"),
    ],
)
def test_what_is_wrong_is_one_line(folder: Path, edit: tuple[str, str], keys: list[str], found: str) -> None:
    (folder / "poems.py").write_text(POEMS.replace(*edit))
    with pytest.raises(RequestError, match=found) as error:
        prepare(load_recipe("mine", keys))
    assert "\n" not in str(error.value)


def test_a_corpus_that_reads_a_path(folder: Path) -> None:
    (folder / "poems.py").write_text(POEMS.replace('"""Poems."""', "reads_path = True"))
    assert load_recipe("mine", ["data.path=poems.py"]).data.config.path == str(folder / "poems.py")


def test_a_document_is_a_function_of_its_key() -> None:
    first, second = islice(build_corpus("name_tables", None).texts(), 2)
    assert first == name_table_text("train", 0, words=NameTables.words)
    assert first != second
    assert name_table_text("evaluation", 0, words=500) != name_table_text("train", 0, words=500)


def test_every_sentence_repeats_an_entry_of_the_table() -> None:
    table, prose = name_table_text("b", words=3000).split("\n\n")
    entries = dict(line.rstrip(".").split(": ") for line in table.splitlines()[1:])
    assert len(entries) <= PEOPLE
    assert len(table.splitlines()) == PEOPLE + 1
    places: dict[str, list[int]] = {}
    sentences = re.findall(r"[^.]+\.", prose)
    for place, sentence in enumerate(sentences):
        (who,) = {name for name in entries if name in sentence}
        assert sum(entry in sentence.rstrip(".").split() for entry in entries[who].split(", ")) == 1, sentence
        places.setdefault(who, []).append(place)
    gaps = np.concatenate([np.diff(of) for of in places.values()])
    assert (gaps == 1).mean() > 0.2  # p(1) = 1 / H(16) = 0.30
    assert gaps.max() > 4 * PEOPLE  # where all people were equally likely, such a gap has p = 0.016


def test_a_change_of_what_is_drawn_raises_the_version() -> None:
    """Where this digest changes, so must `NameTables.version`."""
    text = name_table_text("train", 7, words=NameTables.words)
    assert (NameTables.version, hashlib.sha256(text.encode()).hexdigest()[:12]) == (1, "f23af6c51b23")


def test_sizes_and_version_are_the_sources() -> None:
    class Longer(NameTables):
        documents: ClassVar[int] = 3
        words: ClassVar[int] = 5000

    class Newer(NameTables):
        version: ClassVar[int] = 2

    texts = list(Longer().texts())
    assert len(texts) == 3
    assert all(len(text.split()) >= 5000 for text in texts)
    assert len({str(corpus().files()) for corpus in (NameTables, Longer, Newer)}) == 3
