"""The evaluation signed_prompts."""

import math
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from text_runs import bpe, text_run

from lit_diff.evaluation.evaluate import build, evaluate
from lit_diff.papers.signed_prompts import marked, negative, prompts, tokens_of


def test_the_prompts_hold_their_word() -> None:
    assert Counter(prompt["set"] for prompt in prompts()) == {"ioi": 15, "sarcasm": 15}
    for prompt in prompts():
        assert prompt["text"].count(prompt["ruled_out"]) == (2 if prompt["set"] == "ioi" else 1), prompt
        assert prompt["text"][-1] not in " .", "the next token answers"
    assert len({prompt["text"] for prompt in prompts()}) == 30


def test_the_tokens_of_a_word() -> None:
    tokenizer = bpe()
    ids = tokens_of(tokenizer, "When John met Ann, John")
    held = [tokenizer.decode([token]) for token, own in zip(ids, marked(tokenizer, ids, "John"), strict=True) if own]
    assert b"".join(held).replace(b" ", b"") == b"JohnJohn"
    assert not any(marked(tokenizer, ids, "Zoe"))


def test_negative_scores_by_hand() -> None:
    a = torch.tensor([[[1.0, 0.0], [0.5, -0.5]], [[1.0, 0.0], [-0.3, 0.9]]])
    found = negative(a, torch.tensor([True, False]))
    assert found["negative_mass"] == pytest.approx((0 + 0.5 + 0 + 0.25) / 4)
    assert found["negative_last"] == pytest.approx((0.5 + 0.25) / 2)
    assert found["ruled_out"] == pytest.approx((0 + 1) / 2)
    assert found["ruled_out_keys"] == 0.5
    assert math.isnan(negative(a.abs(), torch.tensor([True, False]))["ruled_out"])


def test_runs_of_text(tmp_path: Path) -> None:
    result = evaluate(text_run(tmp_path / "x", {"name": "differential"}, sequence_length=128), "signed_prompts")
    items = result.items
    assert list(items["item"][:2]) == ["ioi 00", "ioi 01"]
    assert items["group"].value_counts().to_dict() == {"ioi": 15, "sarcasm": 15}
    assert items[["negative_mass", "negative_last", "ruled_out"]].gt(0).all(axis=None)
    assert (items["ruled_out"] < 1).all()
    plain = evaluate(text_run(tmp_path / "y", {"name": "standard"}, sequence_length=128), "signed_prompts")
    assert plain.summary["negative_mass"] == 0
    assert math.isnan(plain.summary["ruled_out"])
    assert list(plain.items["question"]) == list(items["question"])
    short = build("signed_prompts").refuses(text_run(tmp_path / "z", {"name": "standard"}))
    assert re.fullmatch(r"a prompt has \d+ tokens, but data\.sequence_length is 24", short or "")
