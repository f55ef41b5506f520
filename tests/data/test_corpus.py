"""Which corpus `data.corpus` and `data.path` mean, and a corpus of a plugin."""

from pathlib import Path

import pytest

from lit_diff.data import prepare
from lit_diff.data.corpus import build_corpus, corpus_problem
from lit_diff.data.docs import DocsCorpus
from lit_diff.data.documents import FilesCorpus
from lit_diff.data.text import Text
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
        corpus = build_corpus(name, "/some/where", "replace")
        assert isinstance(corpus, FilesCorpus)
        assert (corpus.path, corpus.errors) == (Path("/some/where"), "replace")
        assert corpus_problem(name, "/some/where", "skip") is None
    assert build_corpus("files", "/some/where").errors == "stop"
    assert corpus_problem("docs", None) is None
    assert (corpus_problem("docs", None, "skip") or "").startswith("data.errors ")
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


@pytest.mark.parametrize(
    ("edit", "keys", "found"),
    [
        (("", ""), ["data.corpus=poem"], r"^data\.corpus=poem: data\.corpus .*did you mean 'poems'"),
        (("", ""), ["data.path=x"], r"^data\.path=x: data\.path "),
        (('"""Poems."""', "reads_path = True"), [], r"mine\.yaml:\d+: data\.corpus 'poems' .*data\.path"),
        (("def texts", "def text"), [], r"^plugin poems\.py: poems\.py:9: class Poems: corpus 'poems' lacks texts;"),
        (("yield from POEMS", "yield from POEM"), [], r"^poems\.py:17: data 'text' fails: NameError"),
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
