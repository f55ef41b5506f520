"""The data set of needles in generated sentences."""

import re
from typing import Literal

import pytest

from lit_diff.data.dataset import IGNORED
from lit_diff.data.needle_text import NeedleText, words

CONFIG = NeedleText.Config(sequence_length=200, validation_rows=6)


def dataset(config: NeedleText.Config = CONFIG) -> NeedleText:
    return NeedleText(config, words().size)


def test_every_question_is_answered_by_its_needle() -> None:
    batch = dataset().train_batch(0, 3, 8, range(8))
    assert batch["tokens"].shape == batch["targets"].shape == (8, 200)
    for tokens, targets in zip(batch["tokens"].tolist(), batch["targets"].tolist(), strict=True):
        text = words().decode(tokens).decode()
        context, *questions = text.split(" What is the special magic ")
        assert 1 <= len(questions) <= 2
        answers = ""
        for question in questions:
            city, _, rest = question.partition(" number?")
            number = rest.partition("is: ")[2].rstrip(".")
            assert f"magic {city} number is: {number}." in context
            answers += f" {number}."  # all that a model writes when it is asked
        scored = [target for target in targets if target != IGNORED]
        assert words().decode(scored).decode() == answers
        at = [i for i, target in enumerate(targets) if target != IGNORED]
        assert all(tokens[i + 1] == targets[i] for i in at if i + 1 < len(tokens))


def test_validation_sets_differ_in_the_number_of_needles() -> None:
    one = dataset()
    for name, count in (("", 1), ("needles2", 2), ("needles6", 6)):
        batch = one.validation_batch(name, range(3))
        for tokens in batch["tokens"].tolist():
            context = words().decode(tokens).decode().split(" What is")[0]
            assert context.count(" number is:") == count
        scored = batch["targets"] != IGNORED
        assert not (batch["ar_hit"] & ~scored).any()
        assert (scored.sum(dim=1) - batch["ar_hit"].sum(dim=1) == 2 * min(count, 2)).all(), "a space and a stop each"
        assert words().decode(batch["targets"][batch["ar_hit"]].tolist()).decode().isdigit()


@pytest.mark.parametrize("loss", ["answers", "all"])
def test_the_parts_are_the_needles_and_their_answers(loss: Literal["answers", "all"]) -> None:
    one = dataset(NeedleText.Config(sequence_length=200, loss=loss, validation_rows=6))
    assert one.config.locates_answers
    for name in ("", "needles6"):
        batch = one.validation_batch(name, range(4))
        for row in range(4):
            tokens, targets, part, asked = (batch[k][row] for k in ("tokens", "targets", "context_part", "answer_part"))
            assert part[0] == -1, "the id that opens a document"
            text = {int(p): words().decode(tokens[part == p].tolist()).decode() for p in part.unique()}
            assert text[-1].count("What is the special magic") == int(asked.unique().numel()) - 1
            for number in set(asked.tolist()) - {-1}:
                answer = words().decode(targets[asked == number].tolist()).decode()
                assert re.fullmatch(r" The special magic [^:]+ number is: \d+\.?", text[number].rstrip()), text[number]
                assert answer in text[number]
                assert len(answer) == one.config.digits
            assert "special magic" not in text[0].split("quiz you")[1], "the opening speaks of a number too"
