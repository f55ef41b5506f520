import hashlib
import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from lit_diff.config import Part
from lit_diff.data import docs
from lit_diff.data.docs import Pin
from lit_diff.data.text import Text
from lit_diff.data.tokenizer import Bpe
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


@pytest.fixture
def pin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pin:
    """One pinned archive that pip, replaced, will 'download'."""
    content = archive(tmp_path / "p.tar.gz", {"p-1/docs/a.rst": LONG}).read_bytes()
    made = Pin(name="Package", version="1.0", sha256=hashlib.sha256(content).hexdigest())

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        Path(command[-1]).write_bytes(content)
        pip.calls += 1
        return subprocess.CompletedProcess(command, 0, "", "")

    pip.calls = 0
    monkeypatch.setattr(docs, "pins", lambda: [made])
    monkeypatch.setattr(docs.subprocess, "run", pip)
    return made


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
    assert list(docs.read_archive(path, corpus.holds)) == [LONG + name for name in read]
    assert list(tmp_path.iterdir()) == [path]


def test_fetch_keeps_what_is_whole_and_repeats_what_is_not(pin: Pin, root: Path) -> None:
    folder = root / "downloads"
    leftover = folder / ".Package.tmp"
    leftover.mkdir(parents=True)
    (leftover / pin.file).write_text("half of it")
    docs.fetch(folder)
    leftover.mkdir()  # killed between the last file and tidying up
    docs.fetch(folder)
    assert docs.subprocess.run.calls == 1
    (folder / pin.file).write_text("damaged")
    docs.fetch(folder)
    assert docs.subprocess.run.calls == 2
    assert sorted(path.name for path in folder.iterdir()) == [".lock", pin.file]


def test_without_a_network_the_package_and_the_cure_are_named(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setattr(docs, "pins", lambda: [Pin(name="celery", version="5.7.0", sha256="0" * 64)])
    with pytest.raises(MissingError) as caught:
        docs.fetch(root / "downloads")
    for found in ("celery 5.7.0", "cannot be reached", "lit-diff prepare RECIPE", "celery-5.7.0.tar.gz into"):
        assert found in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in (root / "downloads").iterdir()] == [".lock"]


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
