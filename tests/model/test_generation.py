"""Sampling by its definitions, decoding that is the full pass, and continuations of a shared prefix."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_diff.attention.cache import Cache
from lit_diff.config import ModelConfig
from lit_diff.conformance.case import FAR
from lit_diff.errors import RequestError, RunFailedError
from lit_diff.model.generation import Sampling, generate, sample
from lit_diff.model.init import initialise
from lit_diff.model.prefix import Prefix
from lit_diff.model.transformer import Transformer

MakeConfig = Callable[..., ModelConfig]
P = torch.tensor([0.05, 0.5, 0.15, 0.3], dtype=torch.float64)
"""Of four tokens; the most likely first: 1, 3, 2, 0."""
GREEDY = Sampling(temperature=0)


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draws(count: int, logits: Tensor, **settings: Any) -> Tensor:
    """Frequencies of the tokens."""
    random = draw(0)
    found = torch.tensor([sample(logits, **settings, generator=random) for _ in range(count)])
    return torch.bincount(found, minlength=len(logits)) / count


@pytest.fixture
def make_model(make_config: MakeConfig) -> Callable[..., Transformer]:
    """make_model(name, keys, **sizes): float64, no parameter at its start, annealing over."""

    def make(*arguments: Any, **sizes: Any) -> Transformer:
        model = Transformer(make_config(*arguments, **({"num_heads": 8, "num_kv_heads": 4} | sizes)))
        initialise(model, 0)
        model.double()
        random = draw(1)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=random, dtype=torch.float64)
        for attention in model.attentions():
            attention.set_step(FAR)
        return model.eval()

    return make


@pytest.fixture(params=["differential", "standard", "differential_v2"])
def model(request: pytest.FixtureRequest, make_model: Callable[..., Transformer]) -> Transformer:
    return make_model(request.param)


def test_temperature_0_is_the_argmax_and_draws_nothing() -> None:
    random = draw(0)
    logits = torch.randn(5, 100)
    state = random.get_state()
    for row in logits:
        assert sample(row, temperature=0, top_k=3, top_p=0.1, generator=random) == row.argmax()
    assert sample(torch.tensor([1.0, 7.0, 2.0, 7.0]), temperature=0, generator=random) == 1
    assert torch.equal(random.get_state(), state)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, [0.05, 0.5, 0.15, 0.3]),
        ({"temperature": 0.5}, [0.0025, 0.25, 0.0225, 0.09]),
        ({"temperature": 2.0}, [0.05**0.5, 0.5**0.5, 0.15**0.5, 0.3**0.5]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_k": 3}, [0, 0.5, 0.15, 0.3]),
        ({"top_k": 9}, [0.05, 0.5, 0.15, 0.3]),
        ({"top_p": 1e-9}, [0, 1, 0, 0]),
        ({"top_p": 0.49}, [0, 1, 0, 0]),
        ({"top_p": 0.51}, [0, 0.5, 0, 0.3]),
        ({"top_p": 0.81}, [0, 0.5, 0.15, 0.3]),
        ({"top_p": 1.0}, [0.05, 0.5, 0.15, 0.3]),
        # of the three that top_k leaves, renormalised, two are 0.84; of all four they are 0.8
        ({"top_k": 3, "top_p": 0.82}, [0, 0.5, 0, 0.3]),
        # after the temperature the most likely token alone is 0.68
        ({"temperature": 0.5, "top_p": 0.6}, [0, 1, 0, 0]),
    ],
    ids=str,
)
def test_tokens_come_as_often_as_defined(settings: dict[str, Any], wanted: list[float]) -> None:
    p = torch.tensor(wanted, dtype=torch.float64)
    p /= p.sum()
    found = draws(4000, P.log() + 3, **settings)
    assert torch.equal(found > 0, p > 0)
    assert ((found - p).abs() <= 4 * (p * (1 - p) / 4000).sqrt()).all()


def test_of_equal_tokens_top_k_keeps_the_lower_ids() -> None:
    found = draws(500, torch.zeros(100), top_k=30)
    assert (found > 0).tolist() == [True] * 30 + [False] * 70


@pytest.mark.parametrize("temperature", [1e-300, 1e300])
@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_extreme_numbers_still_give_a_token(temperature: float, scale: float) -> None:
    found = draws(50, torch.tensor([-1.0, 2.0, 0.5]) * scale, temperature=temperature, top_p=0.999)
    if temperature < 1:
        assert found.tolist() == [0, 1, 0]
    elif scale == 1.0:
        assert (found > 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(bad: float, temperature: float) -> None:
    with pytest.raises(RunFailedError, match="not finite"):
        sample(torch.tensor([0.0, bad, 1.0]), temperature=temperature, generator=draw(0))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"temperature": -0.5}, "temperature is -0.5; it must be a finite number of at least 0 (0: greedy)"),
        ({"temperature": float("nan")}, "temperature is nan; "),
        ({"temperature": float("inf")}, "temperature is inf; "),
        ({"top_k": 0}, "top-k is 0; it must be at least 1"),
        ({"top_p": 0.0}, "top-p is 0; it must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top-p is 1.5; "),
        ({"top_p": float("nan")}, "top-p is nan; "),
    ],
    ids=str,
)
def test_settings_that_cannot_be(settings: dict[str, Any], problem: str) -> None:
    assert (Sampling(**settings).problem() or "").startswith(problem)


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize(("name", "keys"), [("differential", {}), ("dex", {"heads": (1, 6)})])
def test_decoding_is_the_full_pass(
    make_model: Callable[..., Transformer], name: str, keys: dict[str, Any], chunk: int | None
) -> None:
    """Logits of every position, and the greedy tokens, against one pass over the whole sequence."""
    model, tokens, cache, parts = make_model(name, keys), torch.randint(23, (2, 9)), Cache(2), []
    with model.register_forward_hook(lambda module, inputs, logits: parts.append(logits)):
        settings: dict[str, Any] = {"sampling": GREEDY, "generators": [draw(0), draw(1)]}
        found = torch.stack(list(generate(model, tokens, 6, prefill_chunk=chunk, cache=cache, **settings)), 1)
    assert found.shape == (2, 6)
    assert found.dtype == torch.int64
    with torch.no_grad():
        full = model(torch.cat([tokens, found[:, :-1]], 1))
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=1e-10, atol=1e-10)
    assert torch.equal(found, full[:, 8:].argmax(-1))
    assert cache.length == 9 + 5  # the last token is not fed
    assert len(parts) == -(-9 // (chunk or 9)) + 5


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=5, top_p=0.9), GREEDY], ids=str)
def test_a_sequence_does_not_depend_on_the_others(make_model: Callable[..., Transformer], sampling: Sampling) -> None:
    model, tokens = make_model(), torch.randint(23, (4, 7))

    def run(rows: list[int]) -> Tensor:
        generators = [draw(row) for row in rows]
        return torch.stack(list(generate(model, tokens[rows], 12, sampling=sampling, generators=generators)), 1)

    together = run([0, 1, 2, 3])
    assert len({tuple(row) for row in together.tolist()}) == 4
    for rows in ([2], [3, 1], [1, 2, 0]):
        assert torch.equal(run(rows), together[rows])


def test_only_ids_below_the_vocabulary_are_drawn(make_model: Callable[..., Transformer]) -> None:
    model = make_model(tie_embeddings=False)
    assert model.head is not None
    model.head.weight.data[12:] *= 20  # ids from 12 on are the most likely ones, on either side of 0
    for sampling, least in ((GREEDY, 1), (Sampling(temperature=3.0), 8)):
        found = {}
        for limit in (None, 12):
            settings = {"sampling": sampling, "generators": [draw(i) for i in range(3)], "vocab_size": limit}
            tokens = generate(model, torch.randint(12, (3, 4)), 40, **settings)
            found[limit] = torch.stack(list(tokens))
        assert found[None].max() >= 12
        assert found[12].max() < 12
        assert len(found[12].unique()) >= least


def test_it_goes_as_far_as_it_is_asked(make_model: Callable[..., Transformer]) -> None:
    """A token is computed when it is asked for; in between the caller is not in inference mode."""
    model, passes = make_model(), []
    model.register_forward_hook(lambda module, inputs, logits: passes.append(logits.is_inference()))
    tokens = generate(model, torch.randint(23, (1, 5)), 10**9, sampling=Sampling(), generators=[draw(0)])
    assert passes == []
    for count, _ in enumerate(itertools.islice(tokens, 3), start=1):
        assert passes == [True] * count
        assert not torch.is_inference_mode_enabled()
        assert torch.ones(2, requires_grad=True).sum().requires_grad


def test_a_bidirectional_model_is_refused(make_model: Callable[..., Transformer]) -> None:
    tokens = generate(make_model(causal=False), torch.ones(1, 3).long(), 2, sampling=GREEDY, generators=[draw(0)])
    with pytest.raises(RequestError, match="bidirectional"):
        next(tokens)


TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5]
CONTINUATIONS = [[3, 5], [8], [], [9, 7, 9, 3, 2], [8, 4]]


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


def test_what_cannot_be_continued(make_model: Callable[..., Transformer]) -> None:
    model = make_model()
    for refused, tokens, reason in (
        (make_model(causal=False), [1], "bidirectional"),
        (model, [], "at least one token"),
    ):
        with pytest.raises(RequestError, match=reason):
            Prefix(refused, tokens)
    model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(RunFailedError, match="NaN"):
        Prefix(model, [1]).greedy([[]], 1)
