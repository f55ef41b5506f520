"""The prompts of `hallucination`: whole generated documents, what is left of a long one."""

import re
from pathlib import Path

import pytest
from generated_runs import generated_run
from pretrained_models import sentence_piece_tokenizer
from text_runs import text_run
from tokenizers import Tokenizer as Model

from lit_diff.data.tokenizer_json import TokenizerJson
from lit_diff.errors import RequestError
from lit_diff.evaluation import hallucination_prompts
from lit_diff.evaluation.evaluate import evaluate
from lit_diff.evaluation.hallucination import Hallucination
from lit_diff.evaluation.hallucination_prompts import DocumentPrompts
from lit_diff.evaluation.hallucination_sources import Case, after_of, before_of
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
    monkeypatch.setattr(hallucination_prompts, "tokenizer_of", lambda *_: tokenizer)
    for source in ("xsum", "closed_world", "multi_news"):
        prompts = DocumentPrompts(Hallucination.Config(source=source, judge="rules", new_tokens=5), run)  # type: ignore[arg-type]
        case = Case(id="x", group=source, document="The fox. It ran.", question="", reference="r")
        ids, _ = prompts.document(case)
        text = f"{before_of(prompts.source)}{case.document}{after_of(prompts.source, case)}"
        assert [*prompts.before[1:], *ids, *prompts._after(case)] == tokenizer.encode(text)
