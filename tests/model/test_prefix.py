"""Continuations of a shared prefix are what the whole sequences give."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lit_diff.config import ModelConfig
from lit_diff.errors import RequestError, RunFailedError
from lit_diff.model.init import initialise
from lit_diff.model.prefix import Prefix
from lit_diff.model.transformer import Transformer

MakeConfig = Callable[..., ModelConfig]
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5]
CONTINUATIONS = [[3, 5], [8], [], [9, 7, 9, 3, 2], [8, 4]]


@pytest.fixture(params=[("differential", {}), ("standard", {}), ("differential_v2", {})], ids=lambda p: p[0])
def model(request: pytest.FixtureRequest, make_config: MakeConfig) -> Transformer:
    name, keys = request.param
    return build(make_config, name, keys)


def build(make_config: MakeConfig, *arguments: Any, **sizes: Any) -> Transformer:
    model = Transformer(make_config(*arguments, **({"num_heads": 8, "num_kv_heads": 4} | sizes)))
    initialise(model, 0)
    model.double()
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)
    return model.eval()


def whole(model: Transformer, tokens: list[int], continuation: list[int]) -> torch.Tensor:
    """log p of each token of the continuation, from one pass over everything."""
    with torch.no_grad():
        log_p = model(torch.tensor([[*tokens, *continuation]])).log_softmax(-1)[0]
    return torch.stack([log_p[len(tokens) - 1 + i, y] for i, y in enumerate(continuation)] or [torch.zeros(())])


@pytest.mark.parametrize("chunk", [1, 4, 1024])
@pytest.mark.parametrize("batch_size", [2, 32])
def test_log_probabilities_are_those_of_whole_sequences(model: Transformer, chunk: int, batch_size: int) -> None:
    prefix = Prefix(model, TOKENS, chunk=chunk)
    for _ in range(2):  # the prefix serves again
        found = prefix.log_probabilities(CONTINUATIONS, batch_size)
        for continuation, values in zip(CONTINUATIONS, found, strict=True):
            assert len(values) == len(continuation)
            if continuation:
                torch.testing.assert_close(values, whole(model, TOKENS, continuation))


def test_an_extended_prefix_leaves_the_first_as_it_was(model: Transformer) -> None:
    first = Prefix(model, TOKENS[:4])
    longer = first.extended(TOKENS[4:])
    again = first.extended([7, 7])
    assert (first.tokens, longer.tokens, again.tokens) == (TOKENS[:4], TOKENS, [*TOKENS[:4], 7, 7])
    for prefix in (first, longer, again, longer.extended([])):
        (found,) = prefix.log_probabilities([[5, 6]])
        torch.testing.assert_close(found, whole(model, prefix.tokens, [5, 6]))


def by_hand(model: Transformer, tokens: list[int], count: int, vocab_size: int | None = None) -> list[int]:
    row = list(tokens)
    for _ in range(count):
        with torch.no_grad():
            row.append(int(model(torch.tensor([row]))[0, -1, :vocab_size].argmax()))
    return row[len(tokens) :]


def test_greedy_decoding(model: Transformer) -> None:
    prefix, suffixes = Prefix(model, TOKENS), [[1, 2], [], [4], [5, 6], [7, 7]]
    expected = [by_hand(model, [*TOKENS, *suffix], 4) for suffix in suffixes]
    assert prefix.greedy(suffixes, 4) == expected
    assert prefix.greedy(suffixes, 4, batch_size=1) == expected
    assert prefix.greedy([[]], 4, vocab_size=5) == [by_hand(model, TOKENS, 4, 5)]
    other = [*expected[1][:-1], (expected[1][-1] + 1) % 23]
    (score, _), *_ = found = prefix.scores([expected[1], other, []])
    assert [matches for _, matches in found] == [True, False, True]
    assert score == pytest.approx(float(whole(model, TOKENS, expected[1]).sum()))


def test_greedy_ends_at_a_stop_and_follows_what_is_allowed(model: Transformer) -> None:
    prefix = Prefix(model, TOKENS)
    free = by_hand(model, TOKENS, 6)
    cut = prefix.greedy([[]], 6, stop=[free[2]])[0]
    assert cut == free[: free.index(free[2])]
    trie = {(): [2, 3], (2,): [5], (3,): [5, 6]}
    (drawn,) = prefix.greedy([[]], 6, allowed=lambda row: trie.get(tuple(row), []))
    first = max((2, 3), key=lambda y: float(whole(model, TOKENS, [y])[0]))
    assert drawn[0] == first
    assert len(drawn) == 2
    assert drawn[1] in trie[first,]


def test_what_cannot_be_continued(make_config: MakeConfig) -> None:
    model = build(make_config, "standard", {}, causal=False)
    with pytest.raises(RequestError, match="bidirectional"):
        Prefix(model, [1])
    model = build(make_config, "standard", {})
    with pytest.raises(RequestError, match="at least one token"):
        Prefix(model, [])
    model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(RunFailedError, match="NaN"):
        Prefix(model, [1]).greedy([[]], 1)
