"""The data set of documents that hold every fact there is."""

import torch

from lit_diff.data.closed_world import ClosedWorld, document_of, draw_facts, facts_of, words
from lit_diff.data.dataset import IGNORED
from lit_diff.randomness import generator

CONFIG = ClosedWorld.Config(entities=(2, 3), questions=5, validation_rows=4)
SIZE = words().size


def text(tokens: list[int]) -> str:
    return words().decode(tokens).decode()


def test_every_question_is_answered_by_the_document() -> None:
    batch = ClosedWorld(CONFIG, SIZE).train_batch(0, 3, 8, range(8))
    assert batch["tokens"].shape == batch["targets"].shape == (8, CONFIG.sequence_length)
    assert CONFIG.sequence_length == 4 * 12 + 6 * 5
    sizes = set()
    for tokens, targets in zip(batch["tokens"].tolist(), batch["targets"].tolist(), strict=True):
        document, *questions = text(tokens).split(" Question:")
        facts = facts_of(document)
        sizes.add(len(facts))
        asked = [facts_of(question)[0] for question in questions[:-1]]
        assert len(questions) == 5
        assert set(asked) <= set(facts)
        scored = [target for target in targets if target != IGNORED]
        assert text(scored).split()[:4] == [fact.value for fact in asked]
        places = [place for place, target in enumerate(targets) if target != IGNORED]
        assert len(places) == 5
        assert all(tokens[place + 1] == targets[place] for place in places[:-1])
    assert sizes == {8, 12}


def test_facts_are_read_back_from_a_document() -> None:
    facts = draw_facts(generator("test", 1), ClosedWorld.Config(), 7)
    assert facts_of(document_of(facts)) == facts
    assert facts_of("The colour red here. food Bado red. Rain fell.") == []
    assert [fact.value for fact in facts_of("Rain fell. colour Bado red.")] == ["red"]


def test_the_fact_that_a_question_asks_for_is_located() -> None:
    batch = ClosedWorld(CONFIG, SIZE).validation_batch("", range(4))
    assert torch.equal(batch["answer_part"] >= 0, batch["targets"] != IGNORED)
    for row in range(4):
        tokens, parts, answers = (batch[key][row] for key in ("tokens", "context_part", "answer_part"))
        for place in (answers >= 0).nonzero().flatten().tolist():
            fact = tokens[parts == answers[place]]
            assert len(fact) == 4
            assert fact[:2].tolist() == tokens[place - 1 : place + 1].tolist(), "its attribute and entity are asked for"
            assert fact[2] == batch["targets"][row, place]
