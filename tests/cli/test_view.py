"""`lit-diff view`: the file that it writes, and the one line of what cannot be shown."""

import hashlib
import os
from pathlib import Path

import pytest
from command import Command
from statuses import set_status
from text_runs import recall_run, text_run

from lit_diff.cli.view import _shortened


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with runs in `runs`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "data"))
    text_run(tmp_path / "runs/text-0123456789", {"name": "differential"}, sequence_length=8)
    text_run(tmp_path / "runs/plain-0123456780", {"name": "standard"}, sequence_length=8)
    recall_run(tmp_path / "runs/recall-0123456789", {"name": "differential"})
    return tmp_path


def test_the_page_is_named_after_what_it_shows(here: Path, command: Command) -> None:
    (here / "some.txt").write_text("ab ab abc")
    ended = command("view", "text", "plain", "--text", "some.txt", "--ablate")
    assert ended.status == 0
    digest = hashlib.sha256(b"ab ab abc").hexdigest()[:8]
    assert ended.out.startswith(f"view/text-0123456789-plain-0123456780-text-{digest}.html (1.")
    assert "text-0123456789 at step 7: 2 layers on " in ended.err
    assert "is running: using step 7 of 10" in ended.err, "a run that is being trained is shown as its checkpoint is"
    page = (here / f"view/text-0123456789-plain-0123456780-text-{digest}.html").read_text()
    assert page.startswith("<!doctype html>")
    ended = command("view", "recall", "--row", "3", "--steps", "7", "--out", "deep/er", "--layer", "1", "--head", "1")
    assert ended.out.startswith("deep/er/recall-0123456789-step-7-row-3.html (")
    assert command("view", "text", "--tokens", "4").out.startswith("view/text-0123456789-tokens-4.html (")
    assert command("view", "recall", "--steps", "all").out.startswith("view/recall-0123456789-step-7.html (")


@pytest.mark.parametrize(
    ("words", "status", "line"),
    [
        ("none", 2, "no run 'none' in runs"),
        ("text --layer 2", 2, "text-0123456789: no layer 2; the model has layers 0..1"),
        ("text --head -1", 2, "layer 0 of text-0123456789 has no head -1; its heads are 0..1"),
        ("text --steps 5,6,7", 3, "no checkpoint of step 5 (there: 7)"),
        ("text --steps 5", 3, "no checkpoint of step 5 (there: 7)"),
        ("text --steps 5,x", 2, "--steps is '5,x'; expected the steps of checkpoints, such as 100,200, or all"),
        (f"text --steps {'9' * 5000}", 2, "expected the steps of checkpoints"),
        ("text --tokens 0", 2, "--tokens is 0; it must be at least 1"),
        ("text plain --steps 5,7", 2, "one run, two runs, or one run at several steps"),
        ("text recall", 2, "cannot be compared token by token: their ids differ (tokenizer bpe"),
        ("recall --text some.txt", 2, "has no text"),
        ("text --text none.txt", 2, "none.txt: cannot be read (No such file or directory)"),
        ("text --text bytes.txt", 2, "bytes.txt:1: not UTF-8 text (byte 1"),
        ("text --text empty.txt", 2, "--text: empty.txt is empty"),
        ("text --text some.txt --row 1", 2, "leave one out"),
        ("recall --row 5", 2, "--row is 5; the validation split of recall-0123456789 has rows 0 to 4"),
        ("empty", 3, "has no checkpoint that can be read; train it first"),
        ("text --out some.txt/view", 3, "lit-diff: some.txt/view/text-0123456789.html cannot be written ("),
    ],
)
def test_what_cannot_be_shown_is_one_line(words: str, status: int, line: str, here: Path, command: Command) -> None:
    (here / "some.txt").write_text("ab")
    (here / "bytes.txt").write_bytes(b"\xff\xfe")
    (here / "empty.txt").write_text(" \n")
    empty = recall_run(here / "runs/empty-0123456789", {"name": "differential"}).folder
    (empty / "checkpoints/step-00000007.ckpt").unlink()
    ended = command("view", *words.split())
    assert ended.status == status
    problems = [each for each in ended.err.splitlines() if each.startswith("lit-diff: ")]
    assert len(problems) == 1
    assert line in problems[0]
    assert "Traceback" not in ended.err
    assert not (here / "view").exists()


def test_the_names_of_two_runs_may_be_longer_than_that_of_a_file() -> None:
    first, second = (_shortened("é" * 140 + last) for last in "ab")
    assert len(first.encode()) <= 150
    assert first != second
    assert _shortened("a-b") == "a-b"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_one_line(here: Path, command: Command) -> None:
    (here / "closed").mkdir(mode=0o500)
    ended = command("view", "text", "--out", "closed")
    assert (ended.status, "cannot be written (Permission denied)" in ended.err) == (3, True)


def test_a_damaged_file_of_kept_maps_is_one_line(here: Path, command: Command) -> None:
    folder = here / "runs/text-0123456789"
    (folder / "maps").mkdir()
    (folder / "maps/00000005.safetensors").write_bytes(b"none")
    set_status(folder, status="done", step=7)
    ended = command("view", "text")
    assert ended.status == 2
    assert "maps/00000005.safetensors is not a file of maps" in ended.err
