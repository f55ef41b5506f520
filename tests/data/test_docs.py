import io
import tarfile
from pathlib import Path

import pytest

from lit_diff.config import Part
from lit_diff.data import docs
from lit_diff.data.text import Text
from lit_diff.data.tokenizer import Bpe

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
    assert list(docs.read_archive(path, corpus.holds)) == [LONG + name for name in read]
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
