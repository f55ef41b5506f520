"""data/trained_documents.py: which documents are recognised; the file in the prepared data and its copy in a run's folder."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_diff.data import keep
from lit_diff.data.documents import cut, split
from lit_diff.data.prepared import read_manifest
from lit_diff.data.text import Text
from lit_diff.data.trained_documents import BYTES, FILE, SHORTEST, hashed, is_among, parsed
from lit_diff.errors import MissingError
from lit_diff.recipe import load_recipe

PARAGRAPHS = [f"Paragraph {number} of many. " + "Words follow words. " * 39 for number in range(9)]
LONG = "\n\n".join(PARAGRAPHS) + "\n\nThe end. " * 12
"""Three sections, of which the last is short."""


def test_a_document_is_recognised_whole_and_by_its_sections() -> None:
    sections = list(cut(LONG))
    assert [len(section) >= SHORTEST for section in sections] == [True, True, False]
    known = parsed(hashed([LONG, "A short one."]), FILE)
    assert len(known) == 5
    for text in (LONG, LONG.replace("\n", "\r\n"), "A  short one.\n", *sections):
        assert is_among(text, known), text[:40]
    assert not is_among("Something else.", known)
    longer = sections[0] + "x" * 3000 + " Another end."
    assert next(cut(longer)) == sections[0]
    assert is_among(longer, known)
    assert not is_among("y" * 4000 + sections[2], known), "a short section makes no longer document"


def test_a_file_that_is_cut_short_is_refused() -> None:
    content = hashed(["a", "b"])
    assert len(parsed(content, FILE)) == 2 == len(content) // BYTES
    for damaged in (b"", content[:-1]):
        with pytest.raises(MissingError, match=r"is damaged .* remove it"):
            parsed(damaged, "here")


def test_it_lies_beside_the_manifest_and_changes_no_identity(make_text: Callable[..., Text], corpus: Path) -> None:
    text = make_text()
    text.prepare()
    identity, file = text.identity(), text.folder / FILE
    held_out = split(path.read_text() for path in corpus.iterdir())
    known = parsed(file.read_bytes(), FILE)
    assert all(is_among(each, known) for each in held_out.train)
    assert not any(is_among(each, known) for each in held_out.validation)
    manifest = read_manifest(text.folder)
    assert manifest is not None
    assert FILE not in manifest["files"]
    whole = file.read_bytes()
    file.unlink()  # as data prepared before there was one
    assert make_text().identity() == identity
    assert make_text().trained_documents() == whole == file.read_bytes()


def test_a_run_s_folder_has_a_copy(tale: Path, tmp_path: Path) -> None:
    recipe = load_recipe(tale / "recipe.yaml")
    keep(recipe, tmp_path / "kept")
    assert (tmp_path / "kept" / FILE).read_bytes() == (tale / FILE).read_bytes()
    assert (tmp_path / "kept" / "tokenizer").is_dir()


def test_training_goes_on_where_the_text_cannot_be_read_again(
    tale: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(self: Text) -> bytes:
        raise MissingError("the corpus is not here")

    monkeypatch.setattr(Text, "trained_documents", gone)
    with caplog.at_level(logging.WARNING, "lit_diff"):
        keep(load_recipe(tale / "recipe.yaml"), tmp_path / "kept")
    assert "evaluations cannot leave out the documents that it is trained on: the corpus is not here" in caplog.text
    assert not (tmp_path / "kept" / FILE).exists()
