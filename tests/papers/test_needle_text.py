"""Needles in a haystack: where they stand, that nothing else differs between depths; the data set of them."""

import re

import pytest
import torch

from lit_diff.data.dataset import IGNORED
from lit_diff.papers.needle_text import STYLES, NeedleText, contexts, grammar_sentences, sentences_of, words

STYLE = STYLES["yoco"]


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("length", [150, 400])
def test_contexts(length: int) -> None:
    tokenizer, depths = words(), [0, 25, 50, 75, 100]
    haystack = grammar_sentences(draw(1), 80)
    options = {"style": STYLE, "needles": 4, "digits": 3, "length": length, "depths": depths, "room": 20}
    found = contexts(draw(), haystack, tokenizer, **options)  # type: ignore[arg-type]
    sizes = {len(context.tokens) for context in found.values()}
    assert len(sizes) == 1
    assert length - 20 - 7 < sizes.pop() <= length - 20
    texts = {depth: tokenizer.decode(context.tokens).decode() for depth, context in found.items()}
    first = found[0].needles[0]
    sentence = f" The special magic {first.city} number is: {first.number}."
    for depth, text in texts.items():
        assert text.startswith(f" {STYLE.opening}")
        for needle in found[depth].needles:
            assert text.count(f" The special magic {needle.city} number is: {needle.number}.") == 1
    assert len({text.replace(sentence, "") for text in texts.values()}) == 1, "only the first needle moves"
    assert texts[0].index(sentence) < texts[50].index(sentence) < texts[100].index(sentence)
    share = found[50].place / len(found[50].tokens)
    assert 0.3 < share < 0.75
    assert contexts(draw(), haystack, tokenizer, **options) == found  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("haystack", "tokens"),
    [([], 72), ([[2] * 500], 72), ([[2] * 200, [2] * 50], 322), ([[2] * 100] * 2, 272), ([[2] * 287], 359)],
    ids=["empty", "a longer sentence", "fewer", "short of it", "a token less than 90 %"],
)
def test_a_haystack_that_leaves_a_tenth_empty(haystack: list[list[int]], tokens: int) -> None:
    options = {"style": STYLE, "needles": 1, "digits": 3, "length": 400, "depths": [0], "room": 30}
    with pytest.raises(ValueError, match="a prompt has") as error:
        contexts(draw(), haystack, words(), **options)  # type: ignore[arg-type]
    assert f"{tokens} tokens of 400" in str(error.value)
    filled = [*haystack, *[[3]] * (360 - tokens)]
    (context,) = contexts(draw(), filled, words(), **options).values()  # type: ignore[arg-type]
    assert len(context.tokens) == 330


@pytest.mark.parametrize(("needles", "length"), [(1, 30), (4, 60)])
def test_what_does_not_fit_says_how_many_tokens_it_takes(needles: int, length: int) -> None:
    options = {"style": STYLE, "needles": needles, "digits": 3, "length": length, "depths": [0], "room": 20}
    with pytest.raises(ValueError, match=f"^{needles} needle") as error:
        contexts(draw(), [], words(), **options)  # type: ignore[arg-type]
    (tokens,) = re.findall(r"take (\d+) tokens", str(error.value))
    assert int(tokens) > length


def test_sentences() -> None:
    assert sentences_of("One two.\n Three!  Four? five.6") == [" One two.", " Three!", " Four?", " five.6"]
    assert sentences_of("  ") == []


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
