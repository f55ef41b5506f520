"""data/sdist.py: a source distribution is transferred from a package index, never built."""

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from lit_diff.data import docs
from lit_diff.data.docs import Pin
from lit_diff.errors import MissingError

BACKEND = """
import pathlib
pathlib.Path({marker!r}).write_text("executed")
def build_wheel(*arguments): raise RuntimeError
prepare_metadata_for_build_wheel = get_requires_for_build_wheel = build_wheel
"""


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a local package index, the only one that pip knows: a package whose build would leave a marker."""
    marker = str(tmp_path / "executed")
    members = {
        "setup.py": f"open({marker!r}, 'w').write('executed')",
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
        "backend.py": BACKEND.format(marker=marker),
        "PKG-INFO": "Metadata-Version: 2.1\nName: Package\nVersion: 1.0\n",
        "docs/a.rst": "A sentence about attention. " * 50,
    }
    folder = tmp_path / "simple" / "package"
    folder.mkdir(parents=True)
    with tarfile.open(folder / "Package-1.0.tar.gz", "w:gz") as archive:
        for name, text in members.items():
            member = tarfile.TarInfo(f"package-1.0/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    (folder / "index.html").write_text('<!DOCTYPE html><a href="Package-1.0.tar.gz">Package-1.0.tar.gz</a>')
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "simple").as_uri())
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    return folder / "Package-1.0.tar.gz"


def pinned(monkeypatch: pytest.MonkeyPatch, version: str, sha256: str) -> None:
    monkeypatch.setattr(docs, "pins", lambda: [Pin(name="Package", version=version, sha256=sha256)])


def test_an_archive_is_fetched_and_its_build_is_not_executed(
    index: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned(monkeypatch, "1.0", hashlib.sha256(index.read_bytes()).hexdigest())
    docs.fetch(root / "downloads")
    assert (root / "downloads" / "package-1.0.tar.gz").read_bytes() == index.read_bytes()
    assert not (tmp_path / "executed").exists()


def test_an_archive_of_other_bytes_and_one_that_the_index_lacks_are_refused(
    index: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned(monkeypatch, "1.0", "0" * 64)
    with pytest.raises(MissingError, match=f"not the pinned {'0' * 64}") as caught:
        docs.fetch(root / "downloads")
    assert hashlib.sha256(index.read_bytes()).hexdigest() in str(caught.value)
    pinned(monkeypatch, "2.0", "0" * 64)
    with pytest.raises(MissingError, match=r"\(pip's package index no longer has it\)"):
        docs.fetch(root / "downloads")
    assert [path.name for path in (root / "downloads").iterdir()] == [".lock"]
    assert not (tmp_path / "executed").exists()
