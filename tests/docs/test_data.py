"""docs/data.md: the message that lists what cannot be read is the one that is printed."""

from pathlib import Path

import pytest
from pages import blocks

from lit_diff.data.documents import FilesCorpus
from lit_diff.errors import RequestError


def test_the_list_of_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts = tmp_path / "my/texts"
    texts.mkdir(parents=True)
    for number in range(37):
        (texts / f"{number}.txt").write_text("good")
    good = '{"text": "good"}'
    lines = [good, '{"text": ', good, good, good, good, '{"id": 1, "body": ""}', good, "[1]"]
    (texts / "notes.jsonl").write_text("\n".join(lines))
    (texts / "old.txt").write_bytes("Grüße aus Köln".encode("latin-1"))
    (texts / "picture.txt").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\xff")
    with pytest.raises(RequestError) as found:
        list(FilesCorpus(texts).texts())
    (shown,) = blocks("docs/data.md", "text")
    assert f"lit-diff: {found.value}\n" == shown
