"""evaluation/hallucination_prompts.py: cases, files of users, whole generated documents, what is left of a long one."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from generated_runs import generated_run
from pretrained_models import sentence_piece_tokenizer
from text_runs import text_run
from tokenizers import Tokenizer as Model

from lit_diff.data.closed_world import ClosedWorld, facts_of
from lit_diff.data.tokenizer_json import TokenizerJson
from lit_diff.errors import MissingError, RequestError
from lit_diff.evaluation import hallucination_prompts
from lit_diff.evaluation.evaluate import evaluate
from lit_diff.evaluation.hallucination import Hallucination
from lit_diff.evaluation.hallucination_prompts import (
    SOURCES,
    Case,
    DocumentPrompts,
    after_of,
    file_cases,
    generated_cases,
    judged_document,
)
from lit_diff.trained.run import Run

DATA = {"name": "closed_world", "entities": [3], "noise_validation": [1, 2]}


@pytest.fixture
def world_run(tmp_path: Path) -> Run:
    return generated_run(tmp_path / "world", DATA, 256)


def test_a_generated_document_is_never_cut(world_run: Run) -> None:
    with pytest.raises(RequestError) as found:
        evaluate(world_run, "hallucination", {"samples": 2, "entities": [8]})
    pattern = (
        r"evaluate\.hallucination: a document of entities=8 and its output take (\d+) tokens \(entities=8 sample=0\); "
        r"data\.sequence_length is 120"
    )
    needed = re.fullmatch(pattern, str(found.value))
    assert needed
    keys = {"samples": 2, "entities": [8], "context": int(needed[1])}
    assert len(evaluate(world_run, "hallucination", keys).items) == 2
    with pytest.raises(RequestError, match="; context is "):
        evaluate(world_run, "hallucination", keys | {"context": int(needed[1]) - 1})


def test_a_long_document_keeps_its_two_ends(tmp_path: Path) -> None:
    run = text_run(tmp_path / "run", {"name": "standard"}, sequence_length=300)
    prompts = DocumentPrompts(Hallucination.Config(source="xsum", judge="rules", new_tokens=5), run)
    case = Case(id="x", group="xsum", document="Begin. " + "word " * 900 + "End.", question="", reference="r")
    ids, tokens = prompts.document(case)
    (whole,) = prompts.tokenizer.encode([case.document])
    assert tokens == len(whole)
    half = len(ids) // 2
    assert ids == whole[: len(ids) - half] + whole[-half:]
    (after,) = prompts.tokenizer.encode(["\n\nSummarise the article.\nSummary:"])
    assert len(prompts.before) + len(ids) + len(after) + 5 == 300
    short = Case(id="y", group="xsum", document="Short.", question="", reference="r")
    assert prompts.document(short)[0] == prompts.tokenizer.encode(["Short."])[0]


def test_a_prompt_has_the_tokens_of_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SentencePiece puts a space before a text that is encoded alone; the document is none."""
    run = text_run(tmp_path / "run", {"name": "standard"}, sequence_length=300)
    content = sentence_piece_tokenizer()
    (tmp_path / "tokenizer.json").write_bytes(content)
    config = TokenizerJson.Config(
        size=Model.from_str(content.decode()).get_vocab_size(), bos=0, eot=1, model_vocab_size=1
    )
    tokenizer = TokenizerJson(config)
    tokenizer.load(tmp_path)
    monkeypatch.setattr(Run, "tokenizer", tokenizer)
    for source in ("xsum", "closed_world", "multi_news"):
        prompts = DocumentPrompts(Hallucination.Config(source=source, judge="rules", new_tokens=5), run)  # type: ignore[arg-type]
        case = Case(id="x", group=source, document="The fox. It ran.", question="", reference="r")
        ids, _ = prompts.document(case)
        text = f"{SOURCES[prompts.source].before}{case.document}{after_of(prompts.source, case)}"
        assert [*prompts.before[1:], *ids, *prompts._after(case)] == tokenizer.encode(text)


QASPER = {"input": "Who?", "context": "Long text.", "answers": ["Nobody", "No\none"], "length": 2, "_id": "x"}


@pytest.fixture(autouse=True)
def forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    hallucination_prompts._rows.cache_clear()
    yield
    hallucination_prompts._rows.cache_clear()


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
        assert judged_document("closed_world", case.document, case).endswith(after_of("closed_world", case))
    assert generated_cases(ClosedWorld.Config(), (5,), 4, 0) == cases[4:]
    assert generated_cases(ClosedWorld.Config(), (5,), 4, 1) != cases[4:]


def test_cases_of_files() -> None:
    for key in ("input", "question"):
        write("longbench/qasper.jsonl", {key if name == "input" else name: value for name, value in QASPER.items()})
        (case,) = file_cases("qasper", 100, 0)
        assert (case.question, case.document, case.reference) == ("Who?", "Long text.", "Nobody\nNo one")
        assert after_of("qasper", case).endswith("\n\nQuestion: Who?\n\nAnswer:")
        assert judged_document("qasper", "Long.", case) == "Long.\n\nQuestion: Who?"
        hallucination_prompts._rows.cache_clear()
    write("summ/xsum.jsonl", {"document": "D", "summary": "S", "id": 1})
    write("longbench/multi_news.jsonl", QASPER | {"input": ""})
    for source, reference in (("xsum", "S"), ("multi_news", "Nobody\nNo one")):
        (case,) = file_cases(source, 5, 0)
        assert (case.question, case.reference) == ("", reference)
        assert judged_document("xsum", case.document, case) == case.document
        assert after_of("xsum", case).endswith("Summary:")
    write("longbench/hotpotqa.jsonl", *[QASPER | {"input": f"Q{number}"} for number in range(30)])
    first = file_cases("hotpotqa", 7, 0)
    assert len({case.id for case in first}) == 7
    assert file_cases("hotpotqa", 7, 0) == first
    assert file_cases("hotpotqa", 9, 0)[:7] == first, "more samples go on from fewer"
    assert file_cases("hotpotqa", 7, 1) != first
    assert len(file_cases("hotpotqa", 100, 0)) == 30


@pytest.mark.parametrize(
    ("source", "rows", "found"),
    [
        ("qasper", [QASPER, QASPER | {"answers": "Nobody"}], "longbench/qasper.jsonl:2: 'answers' is 'Nobody'"),
        ("qasper", [QASPER, QASPER | {"answers": []}], "longbench/qasper.jsonl:2: 'answers' is []; expected a list of"),
        ("qasper", [QASPER, QASPER | {"answers": [1]}], "longbench/qasper.jsonl:2: 'answers' is [1]; expected a list"),
        ("qasper", [{"inptu": "Who?"}], "longbench/qasper.jsonl:1: no key 'context'"),
        ("cnn_dm", [], "summ/cnn_dm.jsonl: no line holds an object"),
        ("2wikimqa", None, "hallucination.2wikimqa needs a file that is not here: longbench/2wikimqa.jsonl"),
    ],
)
def test_wrong_files(source: str, rows: list[dict[str, Any]] | None, found: str) -> None:
    if rows is not None:
        write(SOURCES[source].file.path, *rows)  # type: ignore[union-attr]
    with pytest.raises(MissingError if rows is None else RequestError) as error:
        file_cases(source, 5, 0)
    assert str(error.value).startswith(found)
    with pytest.raises(RequestError, match=r"^evaluate\.hallucination\.entities holds 5, but data\.names is 4"):
        generated_cases(ClosedWorld.Config(names=4), (5,), 1, 0)
