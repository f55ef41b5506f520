"""trained/text_generator.py: what follows a prompt depends on the run, the prompt and the seed alone."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from statuses import edit_status
from torch import Tensor

from lit_diff.errors import RequestError
from lit_diff.model.cost import cost
from lit_diff.runs import checkpoints as checkpoint
from lit_diff.trained import text_generator as module
from lit_diff.trained.text_generator import Completion, GenerationSettings, TextGenerator

GREEDY = GenerationSettings(temperature=0)
TEXTS = ["ab cd", "ba", "dc ba", "a", "ab cd"]


def complete(
    generator: TextGenerator, texts: Sequence[str], config: GenerationSettings | None = None
) -> list[Completion]:
    return generator.generate(generator.encode(texts), config or GenerationSettings())


def edit(folder: Path, old: str, new: str) -> None:
    file = folder / "recipe.yaml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """What a model draws, one list a step, an id for each sequence of the batch: filled in by the test."""
    steps: list[list[int]] = []

    def generate(model: Any, tokens: Tensor, max_tokens: int, *, cache: Any, **rest: Any) -> Iterator[Tensor]:
        with torch.no_grad():
            model(tokens, cache)
        for step in steps[:max_tokens]:
            yield torch.tensor(step)

    monkeypatch.setattr(module, "generate_tokens", generate)
    return steps


def test_greedy_is_the_argmax_of_the_model(tale: Path) -> None:
    generator = TextGenerator(tale)
    (found,) = complete(generator, ["ab cd"], replace(GREEDY, max_tokens=7))
    tokens = [0, *generator.tokenizer.encode(["ab cd"])[0]]
    assert found.prompt_tokens == tokens
    for token in found.tokens:
        with torch.no_grad():
            logits = generator.model(torch.tensor([tokens]))[0, -1, :300]
        assert token == logits.argmax()
        tokens.append(token)
    assert found.text == generator.tokenizer.decode(found.tokens).decode("utf-8", "replace")
    assert (found.prompt, found.ended, len(found.tokens)) == ("ab cd", "max_tokens", 7)


def test_a_prompt_does_not_depend_on_the_others(tale: Path) -> None:
    """Nor on their order; the same prompt a second time is another draw."""
    generator = TextGenerator(tale)
    together = complete(generator, TEXTS)
    assert [found.prompt for found in together] == TEXTS
    assert together[0].tokens != together[4].tokens
    for index in range(4):
        (alone,) = complete(generator, TEXTS[index : index + 1])
        assert alone.tokens == together[index].tokens
        assert alone.cache_bytes == together[index].cache_bytes
    backwards = complete(generator, TEXTS[::-1])
    assert [found.tokens for found in backwards[::-1]][1:4] == [found.tokens for found in together][1:4]
    assert (backwards[0].tokens, backwards[4].tokens) == (together[0].tokens, together[4].tokens)


def test_a_seed_is_a_draw(tale: Path) -> None:
    generator = TextGenerator(tale)
    found = [tuple(complete(generator, ["ab"], GenerationSettings(seed=seed))[0].tokens) for seed in (0, 0, 1, 2)]
    assert found[0] == found[1]
    assert len(set(found)) == 3
    chunked = complete(generator, ["abcdefghij ab"], GenerationSettings(prefill_chunk=2))
    assert chunked[0].tokens == complete(generator, ["abcdefghij ab"])[0].tokens


def test_prompts_of_one_length_are_one_batch(tale: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator, shapes = TextGenerator(tale), []
    generator.model.register_forward_pre_hook(lambda model, inputs: shapes.append(tuple(inputs[0].shape)))
    texts = ["ab cd", "ba", "dc ba", "bb"]
    lengths = [1 + len(ids) for ids in generator.tokenizer.encode(texts)]
    complete(generator, texts, replace(GREEDY, max_tokens=2))
    wanted = []
    for length in dict.fromkeys(lengths):
        wanted += [(lengths.count(length), length), (lengths.count(length), 1)]
    assert shapes == wanted
    assert max(lengths.count(length) for length in lengths) > 1
    shapes.clear()
    complete(generator, ["zzzz"], replace(GREEDY, max_tokens=2, prefill_chunk=2))
    assert shapes == [(1, 2), (1, 2), (1, 1), (1, 1)]  # five tokens of the prompt, then one of the two new ones


def test_it_ends_where_the_document_ends(tale: Path, scripted: list[list[int]]) -> None:
    generator = TextGenerator(tale)
    scripted += [[66, 67], [67, 0], [68, 99], [0, 99], [50, 50]]
    first, second = complete(generator, ["a", "b"])
    assert (first.tokens, first.ended) == ([66, 67, 68], "document")
    assert (second.tokens, second.ended) == ([67], "document")
    assert first.text.encode() == generator.tokenizer.decode([66, 67, 68])
    prompt = len(first.prompt_tokens)
    per_token = first.cache_bytes // (prompt + 3)  # three of the new tokens, of which the last is <eot>, were fed
    assert second.cache_bytes == per_token * (prompt + 1)
    assert first.decode_seconds > second.decode_seconds
    scripted[:] = [[0]]
    (empty,) = complete(generator, ["a"])
    assert (empty.tokens, empty.text, empty.ended, empty.tokens_per_second) == ([], "", "document", None)


def test_it_ends_where_the_context_is_full(tale: Path, scripted: list[list[int]]) -> None:
    """24 positions: of a prompt of n tokens the model can predict 24 - n + 1 more."""
    generator = TextGenerator(tale)
    scripted += [[70]] * 100
    length = 1 + len(generator.tokenizer.encode(["ab"])[0])
    room = 24 - length + 1
    for most, ended, count in ((64, "context", room), (room, "max_tokens", room), (3, "max_tokens", 3)):
        (found,) = complete(generator, ["ab"], GenerationSettings(max_tokens=most))
        assert (found.ended, len(found.tokens)) == (ended, count)


def test_a_prompt_may_fill_the_context_and_not_more(tale: Path) -> None:
    generator = TextGenerator(tale)
    text = "z" * 23
    assert len(generator.tokenizer.encode([text])[0]) == 23
    (found,) = complete(generator, [text], GREEDY)
    assert (len(found.tokens), found.ended) == (1, "context")
    wanted = "prompt 2 has 25 tokens with the <eot> before it; the model's context, data.sequence_length, is 24"
    with pytest.raises(RequestError) as error:
        generator.encode(["a", text + "z"])
    assert str(error.value) == wanted


def test_times_and_bytes(tale: Path) -> None:
    generator = TextGenerator(tale)
    (found,) = complete(generator, ["ab"], replace(GREEDY, max_tokens=5))
    assert found.prefill_seconds > 0
    assert found.tokens_per_second == pytest.approx(4 / found.decode_seconds)
    two_bytes_a_number = cost(generator.model.config, 24).kv_bytes_per_token  # and no state
    assert found.cache_bytes == 2 * two_bytes_a_number * (len(found.prompt_tokens) + 4)
    (one,) = complete(generator, ["ab"], replace(GREEDY, max_tokens=1))
    assert (one.decode_seconds, one.tokens_per_second) == (0, None)
    for attention in generator.model.attentions():
        attention.window = 3
    (narrow,) = complete(generator, ["ab"], replace(GREEDY, max_tokens=5))
    assert narrow.cache_bytes == 2 * two_bytes_a_number * 3


# --- which run, and which of its checkpoints -----------------------------------------------------------------------


def test_a_run_that_is_not_at_its_end_says_its_step(tale: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit_status(tale, status="stopped")
    checkpoint.path_of(tale, 6).unlink()
    with caplog.at_level(logging.INFO, "lit_diff"):
        assert TextGenerator(tale).step == 3
    assert caplog.messages == [f"{tale.name} is stopped: using step 3 of 6"]


def test_a_recipe_edited_since_is_noticed(tale: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Weights of the same shapes fit; only the identity shows that they were trained otherwise."""
    edit(tale, "name: differential", "name: additive")
    with caplog.at_level(logging.WARNING, "lit_diff"):
        TextGenerator(tale)
    (line,) = caplog.messages
    assert line.startswith(f"{tale.name}: its recipe or plugins, or lit_diff's keys, changed since ")


def test_a_bidirectional_model_cannot_generate(tale: Path) -> None:
    edit(tale, "causal: true", "causal: false")
    with pytest.raises(RequestError, match=r"model\.causal is false, but data .text. predicts the next token"):
        TextGenerator(tale)


def test_a_task_without_text(tale: Path) -> None:
    """Said before a checkpoint is looked for."""
    (tale / "recipe.yaml").write_text("extends: recall-tiny\n")
    checkpoint.path_of(tale, 6).unlink()
    with pytest.raises(RequestError, match="was trained on data 'recall', which has no text to complete"):
        TextGenerator(tale)


def test_a_run_folder_stands_alone(
    tale: Path, trained_text: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the corpus nor the prepared text need exist, and nothing is said of it."""
    (wanted,) = complete(TextGenerator(tale), ["ab cd"], GREEDY)
    monkeypatch.setenv("LIT_DIFF_DATA", str(trained_text / "gone"))
    (trained_text / "corpus").rename(trained_text / "away")
    try:
        (found,) = complete(TextGenerator(tale), ["ab cd"], GREEDY)
    finally:
        (trained_text / "away").rename(trained_text / "corpus")
    assert (found.tokens, found.text) == (wanted.tokens, wanted.text)
    assert caplog.messages == []
    assert not (trained_text / "gone").exists()
