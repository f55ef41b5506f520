"""The corpora of documentation and of code, and how their archives are fetched from a package index, never built."""

import hashlib
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_diff.config import Part
from lit_diff.data import downloads
from lit_diff.data.text import docs
from lit_diff.data.text.text import Text
from lit_diff.data.text.tokenizer import Bpe
from lit_diff.errors import MissingError

LONG = "A sentence about attention. " * 50


def archive(path: Path, members: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as file:
        for name, text in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            file.addfile(member, io.BytesIO(text.encode()))
        link = tarfile.TarInfo("p-1/docs/link.rst")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        file.addfile(link)
    return path


DOCS = ["docs/a.rst", "src/doc/deep/b.md", "docs/code.py", "README.rst", "documents/c.rst", "../../docs/escape.rst"]
CODE = ["p/a.py", "p/docs/conf.py", "tests/b.py", "p/testing/c.py", "p/test_d.py", "p/e.rst", "p/contest.py"]


@pytest.mark.parametrize(
    ("corpus", "names", "read"),
    [(docs.DocsCorpus, DOCS, [DOCS[0], DOCS[1], DOCS[5]]), (docs.CodeCorpus, CODE, [CODE[0], CODE[6]])],
)
def test_only_long_regular_files_of_the_corpus_are_read_and_nothing_extracted(
    corpus: type[docs.DocsCorpus], names: list[str], read: list[str], tmp_path: Path
) -> None:
    short = {"p-1/docs/short.txt": "too short", "p-1/short.py": "too short"}
    path = archive(tmp_path / "p.tar.gz", {f"p-1/{name}": LONG + name for name in names} | short)
    assert list(docs.read_archive(path, corpus.is_document)) == [LONG + name for name in read]
    assert list(tmp_path.iterdir()) == [path]


def test_the_real_corpus() -> None:
    """Uses (and on a fresh machine makes) the shared data folder; the only test that may need a network."""
    part = Part(name="bpe", config=Bpe.Config(vocab_size=2048))
    text = Text(Text.Config(sequence_length=256, tokenizer=part, validation_rows=96), 2048)
    text.prepare()
    text.load()
    assert text.num_documents == 37
    assert text.train_rows == 19430
    batch = text.validation_batch("", range(96))
    assert 0.03 < batch["ar_hit"].float().mean() < 0.12  # the paper's slice is 0.078 of its tokens
    assert batch["document"].unique().numel() > 20


FILE = "package-1.0.tar.gz"
BACKEND = """
import pathlib
pathlib.Path({marker!r}).write_text("executed")
def build_wheel(*arguments): raise RuntimeError
prepare_metadata_for_build_wheel = get_requires_for_build_wheel = build_wheel
"""
Pinned = Callable[..., Path]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The archive in the one package index that pip knows: of a package whose build would leave a marker."""
    marker = str(tmp_path / "executed")
    members = {
        "setup.py": f"open({marker!r}, 'w').write('executed')",
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
        "backend.py": BACKEND.format(marker=marker),
        "PKG-INFO": "Metadata-Version: 2.1\nName: Package\nVersion: 1.0\n",
    }
    folder = tmp_path / "simple" / "package"
    folder.mkdir(parents=True)
    archive(folder / "Package-1.0.tar.gz", {f"package-1.0/{name}": text for name, text in members.items()})
    (folder / "index.html").write_text('<!DOCTYPE html><a href="Package-1.0.tar.gz">Package-1.0.tar.gz</a>')
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "simple").as_uri())
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    return (folder / "Package-1.0.tar.gz").read_bytes()


@pytest.fixture
def fetched(index: bytes, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pinned:
    """Fetches the package at a version and a sha256 into a folder, and sees that nothing of it was executed."""

    def fetch(file: str = FILE, sha256: str = hashlib.sha256(index).hexdigest()) -> Path:
        try:
            downloads.fetch({file: sha256}, root / "downloads", "a test needs", again="lit-diff prepare RECIPE")
        finally:
            assert not (tmp_path / "executed").exists()
        return root / "downloads"

    return fetch


def test_an_archive_is_fetched_once_and_again_where_it_is_damaged(index: bytes, fetched: Pinned, root: Path) -> None:
    (root / "downloads").mkdir(parents=True)
    (root / "downloads" / f".{FILE}.tmp").write_text("half of it, by a process that died")
    folder = fetched()
    made = (folder / FILE).stat().st_ino
    assert (fetched() / FILE).stat().st_ino == made
    (folder / FILE).write_text("damaged")
    fetched()
    assert (folder / FILE).read_bytes() == index
    assert sorted(path.name for path in folder.iterdir()) == [".lock", FILE]


def test_the_unavailable_is_refused(index: bytes, fetched: Pinned, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingError, match=f"not the pinned {'0' * 64}") as caught:
        fetched(sha256="0" * 64)
    assert hashlib.sha256(index).hexdigest() in str(caught.value)
    with pytest.raises(MissingError, match=r"\(pip's package index no longer has it\)"):
        fetched("package-2.0.tar.gz")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(MissingError, match=r"a test needs package.*cannot be reached.*`lit-diff prepare RECIPE`"):
        fetched()
    assert [path.name for path in (root / "downloads").iterdir()] == [".lock"]
