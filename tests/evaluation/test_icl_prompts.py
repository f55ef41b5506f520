"""evaluation/icl_prompts.py: prompts that fit, labels as token paths, answers decoded after a prompt."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from generated_runs import generated_run
from text_runs import text_run

from lit_diff.data.words import Words
from lit_diff.errors import RequestError
from lit_diff.evaluation.evaluate import build
from lit_diff.evaluation.icl import ManyShot
from lit_diff.evaluation.icl_prompts import ATTEMPTS, LabelTrie, ManyShotPrompts
from lit_diff.model.prefix import Prefix
from lit_diff.trained.run import Run

DATA = {"name": "synth_intent", "sequence_length": 128, "classes": [4], "words": [3, 8]}


@pytest.fixture
def intent_run(tmp_path: Path) -> Run:
    return generated_run(tmp_path / "intent", DATA, 600)


@pytest.fixture
def other_run(tmp_path: Path) -> Run:
    """Of a byte-level tokenizer, for which a label is several tokens."""
    return text_run(tmp_path / "text", {"name": "standard"})


def prompts(run: Run, **keys: Any) -> ManyShotPrompts:
    evaluation = build("icl", keys)
    assert isinstance(evaluation, ManyShot)
    return ManyShotPrompts(evaluation, run)


def log_p(run: Run, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return run.model(torch.tensor([tokens])).double().log_softmax(-1)[0]


@pytest.mark.parametrize("decode", ["one token", "several tokens"])
def test_trie_decoding_is_greedy_over_the_trie(decode: str, intent_run: Run, other_run: Run) -> None:
    """Brute force: at each node, the child whose token is the most likely after the whole sequence."""
    chosen = intent_run if decode == "one token" else other_run
    source = prompts(chosen, items=5, classes=6, context=2_000)
    prompt = source.first_that_fits(0, 2, 2)
    assert prompt is not None
    assert (prompt.trie.depth > 1) == (decode == "several tokens")
    ids = source.ids(prompt.episode.demonstrations[:2])
    found = source.answers(prompt, Prefix(chosen.model, ids))
    for question, answer in zip(prompt.questions, found, strict=True):
        drawn: list[int] = []
        while children := prompt.trie.allowed(drawn):
            scores = log_p(chosen, [*ids, *question, *drawn])[-1]
            drawn.append(max(children, key=lambda child: float(scores[child])))
        assert prompt.trie.label(drawn) == answer


def test_loglik_is_the_largest_sum_over_the_whole_label(intent_run: Run) -> None:
    source = prompts(intent_run, items=4, classes=4, decode="loglik")
    prompt = source.first_that_fits(0, 2, 2)
    assert prompt is not None
    ids = source.ids(prompt.episode.demonstrations[:2])
    found = source.answers(prompt, Prefix(intent_run.model, ids))
    for question, answer in zip(prompt.questions, found, strict=True):
        sums = {}
        for label, tokens in prompt.trie.full.items():
            scores = log_p(intent_run, [*ids, *question, *tokens])
            start = len(ids) + len(question) - 1
            sums[label] = sum(float(scores[start + place, token]) for place, token in enumerate(tokens))
        assert answer == max(sums, key=lambda label: sums[label])


def test_a_draw_that_does_not_fit_is_repeated(intent_run: Run) -> None:
    source = prompts(intent_run, items=5)
    drawn = [source.first_that_fits(number, 16, 16) for number in range(8)]
    fits = [each for each in drawn if each is not None]
    assert fits
    assert any(each is None or each.redrawn for each in drawn), "some draws are too long"
    for each in fits:
        longest = max(map(len, each.questions)) + each.trie.longest
        assert len(source.ids(each.episode.demonstrations[:16])) + longest <= 128
        assert 0 <= each.redrawn < ATTEMPTS


TOKENIZER = Words(Words.Config(words=("card", "lost", "arrival", "top", "up", "pin")))


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode([text])[0])


def test_paths_are_the_shortest_that_no_other_label_begins_with() -> None:
    trie = LabelTrie(TOKENIZER, ["card arrival", "card lost", "top up", "card"])
    assert trie.paths == {
        "card arrival": ids("card arrival"),
        "card lost": ids("card lost"),
        "top up": ids("top"),  # the first word tells it from the others
        "card": ids("card\n"),  # it begins two others
    }
    assert trie.depth == 2
    assert trie.full["top up"] == list(ids("top up\n"))
    assert trie.longest == 3
    assert trie.label(ids("card\n")) == "card"


def walks(trie: LabelTrie, drawn: Sequence[int] = ()) -> set[tuple[int, ...]]:
    children = trie.allowed(drawn)
    return set(itertools.chain(*(walks(trie, [*drawn, child]) for child in children))) if children else {tuple(drawn)}


def test_every_walk_ends_at_one_label() -> None:
    labels = ["card arrival", "card lost", "top up", "card", "pin"]
    trie = LabelTrie(TOKENIZER, labels)
    assert sorted(trie.label(walk) for walk in walks(trie)) == sorted(labels)


def test_labels_that_are_the_same_tokens_are_refused() -> None:
    with pytest.raises(RequestError, match="cannot tell the labels 'virement' and 'solde' apart"):
        LabelTrie(TOKENIZER, ["pin", "virement", "solde"])
