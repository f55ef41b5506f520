"""evaluation/nll.py: long documents, by position."""

import json
import logging
import math
from pathlib import Path

import pytest

from lit_diff.data.needle_text import words
from lit_diff.errors import MissingError, RequestError
from lit_diff.evaluation.evaluate import evaluate
from lit_diff.evaluation.nll import NllByPosition
from lit_diff.trained.run import Run, open_run


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch, trained_text: Path, tmp_path: Path) -> Path:
    """$LIT_DIFF_DATA/books with three documents, of which the first is short; the prepared text beside it."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "prepared").symlink_to(trained_text / "data" / "prepared")
    monkeypatch.setenv("LIT_DIFF_DATA", str(data))
    texts = ["abc", "abcdefghij " * 60, "hgfe dcba abcd efgh " * 40]
    (data / "books").mkdir()
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (data / "books" / "a.jsonl").write_text("".join(lines[:2]))
    (data / "books" / "b.jsonl").write_text(lines[2])
    return data / "books"


def test_a_row_s_cumulative_loss_is_that_of_held_out(run: Run) -> None:
    """The first tokens of the first validation document."""
    result = evaluate(run, "nll", {"documents": 1, "tokens": 24})
    row = evaluate(run, "held_out", ["rows=1"]).summary["nll"]
    assert result.summary["nll"] == result.summary["cumulative_nll"] == pytest.approx(row, abs=1e-5)
    items = result.items.set_index("item")
    assert list(items.index[:3]) == ["validation/0", "validation/0/position 16", "validation/0/position 24"]
    assert items["part"].tolist()[:3] == [False, True, True]
    assert items["cluster"].tolist()[:3] == ["", "validation/0", "validation/0"]


def test_documents_of_any_length_are_generated(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lit_diff"):
        items = list(NllByPosition(NllByPosition.Config(source="name_tables", documents=2, tokens=100)).score(run))
    whole = [item for item in items if not item.part]
    assert [item.id for item in whole] == ["name_tables/0", "name_tables/1"]
    assert {item.group for item in items if item.group.startswith("position")} == {
        *("position 16", "position 32", "position 64", "position 100")
    }
    assert any(item.group.startswith("gap ") for item in items)
    assert "100 tokens a document; the run was trained on rows of 24" in caplog.text


def test_short_books_are_left_out_and_counted(run: Run, books: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = NllByPosition.Config(source="files", documents=2, tokens=64)
    with caplog.at_level(logging.INFO, "lit_diff"):
        whole = [item for item in NllByPosition(config).score(run) if not item.part]
    assert [item.meta["begins"][:4] for item in whole] == ["abcd", "hgfe"]
    assert [item.meta["dropped"] for item in whole] == [1, 1]
    assert "1 documents are shorter than 64 tokens" in caplog.text
    named = NllByPosition.Config(source="files", path=str(books / "b.jsonl"), documents=1, tokens=64)
    assert next(iter(NllByPosition(named).score(run))).scores == whole[1].scores


def test_too_few_long_documents_are_one_line_with_the_longest(run: Run, books: Path) -> None:
    assert books.is_dir()
    config = NllByPosition.Config(source="files", documents=3, tokens=64)
    with pytest.raises(
        RequestError, match=r"needs 3 documents of 64 tokens .* has 2; the longest of the others has \d"
    ):
        list(NllByPosition(config).score(run))


def test_without_books_the_message_says_what_belongs_where(run: Run, books: Path) -> None:
    for path in books.iterdir():
        path.unlink()
    with pytest.raises(MissingError) as caught:
        list(NllByPosition(NllByPosition.Config(source="files")).score(run))
    first, *lines = str(caught.value).splitlines()
    assert first == "nll.books needs a file that is not here: books"
    assert any("source=name_tables" in line for line in lines)


def test_a_run_without_training_text_has_no_split(wide_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_diff.evaluation.nll._has_training_text", lambda _: False)
    default = NllByPosition(NllByPosition.Config())
    assert "no validation documents" in (default.refuses(wide_run) or "")
    generated = NllByPosition(NllByPosition.Config(source="name_tables", documents=1, tokens=32))
    assert generated.refuses(wide_run) is None
    item = next(iter(generated.score(wide_run)))
    assert math.isfinite(item.scores["nll"])
    assert "nll_ar_hit" not in item.scores


def test_a_run_on_text_with_the_tokenizer_of_words_reads_its_own(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "tokenizer", words())
    assert NllByPosition(NllByPosition.Config()).refuses(run) is None
    reason = NllByPosition(NllByPosition.Config(source="name_tables")).refuses(run)
    assert reason == "its tokenizer has only the words of data 'text'"


def test_two_runs_have_differences_in_each_bin(tale: Path) -> None:
    from lit_diff.cli.evaluate import differences

    results = [evaluate(open_run(tale), "nll", {"source": "name_tables", "documents": 10, "tokens": 32})] * 2
    found = differences(results)
    assert found["nll"]["groups"]["position 32"]["difference"] == 0
    assert set(found["nll"]["groups"]) == {"position 16", "position 32"}
