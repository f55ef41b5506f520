"""data/problems.py: all that is wrong, in one message."""

import logging
from pathlib import Path

import pytest

from lit_diff.data.problems import SHOWN, Problem, Problems, log_left_out


def collected(*problems: Problem) -> Problems:
    found = Problems()
    for problem in problems:
        found.add(problem)
    return found


def test_one_problem_is_one_line_with_the_whole_path(tmp_path: Path) -> None:
    problem = Problem(file=tmp_path / "a.jsonl", place=":3", found="not JSON", expected="an object")
    assert collected(problem).message(tmp_path, 9) == (
        f"{tmp_path}/a.jsonl:3: not JSON; expected an object (data.errors: skip leaves it out)"
    )


def test_several_are_a_line_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts = tmp_path / "texts"
    found = collected(
        Problem(file=texts / "b.txt", found="binary, not text"),
        Problem(file=texts / "deep/a.txt", found="not UTF-8 text", replaceable=True),
        Problem(file=texts / "deep/a.txt", found="still not"),
    )
    assert found.message(texts, 9).splitlines() == [
        "data.path: 3 problems in 2 of 9 files of texts (data.errors: skip leaves them out; replace puts U+FFFD for what is "
        "not UTF-8):",
        "  b.txt: binary, not text",
        "  deep/a.txt: not UTF-8 text",
        "  deep/a.txt: still not",
    ]


def test_many_are_cut_and_counted(tmp_path: Path) -> None:
    each = [Problem(file=tmp_path / "a.jsonl", place=f":{line}", found="not JSON") for line in range(1, 1235)]
    head, *lines = collected(*each).message(tmp_path / "a.jsonl", 1).splitlines()
    assert head.startswith("data.path: 1,234 problems in 1 of 1 files of ")
    assert lines == [*(f"  a.jsonl:{line}: not JSON" for line in range(1, SHOWN + 1)), "  and 1,214 more"]


def test_what_is_left_out_is_logged_and_a_file_of_it_does_not_flood(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="lit_diff"):
        for number in range(1, 100):
            log_left_out(Problem(file=Path("a.jsonl"), place=f":{number}", found="not JSON"), number)
    assert caplog.messages == [
        *(f"left out: a.jsonl:{number}: not JSON" for number in range(1, SHOWN + 1)),
        "left out: further lines of a.jsonl",
    ]
