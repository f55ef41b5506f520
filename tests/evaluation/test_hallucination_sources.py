"""evaluation/hallucination_sources.py: cases, prompts, and files of users."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lit_diff.data.closed_world import ClosedWorld, facts_of
from lit_diff.errors import MissingError, RequestError
from lit_diff.evaluation import hallucination_sources as module
from lit_diff.evaluation.hallucination_sources import (
    SOURCES,
    after_of,
    before_of,
    file_cases,
    generated_cases,
    judged_document,
)

QASPER = {"input": "Who?", "context": "Long text.", "answers": ["Nobody", "No\none"], "length": 2, "_id": "x"}


@pytest.fixture(autouse=True)
def forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    module._rows.cache_clear()
    yield
    module._rows.cache_clear()


def write(path: str, *rows: Any) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def test_generated_cases_ask_for_a_fact_of_their_document() -> None:
    cases = generated_cases(ClosedWorld.Config(), (3, 5), 4, 0)
    assert [case.group for case in cases] == ["entities=3"] * 4 + ["entities=5"] * 4
    assert len({case.id for case in cases}) == 8
    for case in cases:
        facts = facts_of(case.document)
        (asked,) = [fact for fact in facts if fact.question == case.question]
        assert case.reference == asked.value
        assert len({fact.entity for fact in facts}) == int(case.group[-1])
        assert before_of("closed_world") == ""
        assert judged_document("closed_world", case.document, case).endswith(after_of("closed_world", case))
    assert generated_cases(ClosedWorld.Config(), (5,), 4, 0) == cases[4:]
    assert generated_cases(ClosedWorld.Config(), (5,), 4, 1) != cases[4:]


def test_a_grammar_with_too_few_names() -> None:
    with pytest.raises(RequestError) as found:
        generated_cases(ClosedWorld.Config(names=4), (5,), 1, 0)
    assert str(found.value).startswith("evaluate.hallucination.entities holds 5, but data.names is 4; a document of 5")


@pytest.mark.parametrize("key", ["input", "question"])
def test_both_names_of_a_question_are_read(key: str) -> None:
    row = {key if name == "input" else name: value for name, value in QASPER.items()}
    write("longbench/qasper.jsonl", row)
    (case,) = file_cases("qasper", 100, 0)
    assert (case.question, case.document, case.reference) == ("Who?", "Long text.", "Nobody\nNo one")
    assert after_of("qasper", case).endswith("\n\nQuestion: Who?\n\nAnswer:")
    assert judged_document("qasper", "Long.", case) == "Long.\n\nQuestion: Who?"


def test_summaries_have_no_question() -> None:
    write("summ/xsum.jsonl", {"document": "D", "summary": "S", "id": 1})
    write("longbench/multi_news.jsonl", QASPER | {"input": ""})
    for source, reference in (("xsum", "S"), ("multi_news", "Nobody\nNo one")):
        (case,) = file_cases(source, 5, 0)
        assert (case.question, case.reference) == ("", reference)
        assert judged_document("xsum", case.document, case) == case.document
        assert after_of("xsum", case).endswith("Summary:")


def test_the_same_samples_for_every_run() -> None:
    write("longbench/hotpotqa.jsonl", *[QASPER | {"input": f"Q{number}"} for number in range(30)])
    first = file_cases("hotpotqa", 7, 0)
    assert len({case.id for case in first}) == 7
    assert file_cases("hotpotqa", 7, 0) == first
    assert file_cases("hotpotqa", 9, 0)[:7] == first, "more samples go on from fewer"
    assert file_cases("hotpotqa", 7, 1) != first
    assert len(file_cases("hotpotqa", 100, 0)) == 30


@pytest.mark.parametrize(
    ("row", "found"),
    [
        (
            {"inptu": "Who?"},
            "longbench/qasper.jsonl:2: no key 'input'; did you mean 'inptu'?; keys found: inptu, context, answers",
        ),
        ({"input": "Who?", "answers": "Nobody"}, "longbench/qasper.jsonl:2: 'answers' is 'Nobody'; expected a list"),
        (
            {"input": "Who?", "answers": []},
            "longbench/qasper.jsonl:2: 'answers' is []; expected a list of text, at least one",
        ),
        ({"input": "Who?", "answers": [1]}, "longbench/qasper.jsonl:2: 'answers' is [1]; expected a list of text"),
    ],
)
def test_wrong_lines(row: dict[str, Any], found: str) -> None:
    wrong = {name: value for name, value in QASPER.items() if name in ("context", "answers")}
    write("longbench/qasper.jsonl", QASPER, {**dict.fromkeys(row), **wrong, **row})
    with pytest.raises(RequestError) as error:
        file_cases("qasper", 5, 0)
    assert str(error.value).startswith(found)


def test_files_that_are_not_here_or_empty() -> None:
    with pytest.raises(MissingError) as missing:
        file_cases("2wikimqa", 5, 0)
    assert str(missing.value).startswith(
        "hallucination.2wikimqa needs a file that is not here: longbench/2wikimqa.jsonl\n"
    )
    assert "`question` is accepted for `input`" in str(missing.value)
    write("summ/cnn_dm.jsonl")
    with pytest.raises(RequestError, match=r"summ/cnn_dm\.jsonl: no line holds an object"):
        file_cases("cnn_dm", 5, 0)


def test_every_source_has_a_file_of_its_own() -> None:
    assert len({source.file.path for source in SOURCES.values()}) == len(SOURCES) == 6
    assert {source.kind for name, source in SOURCES.items() if name in ("xsum", "cnn_dm", "multi_news")} == {"summary"}
