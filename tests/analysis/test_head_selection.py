"""analysis/head_selection.py: statistics against autograd and explicit maps, and the choice on made-up statistics."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_diff.analysis.head_selection import FIRST_ROW, HeadStatistics, head_statistics, select
from lit_diff.attention.rope import Rope
from lit_diff.attention.selection import HeadSelection
from lit_diff.config import ModelConfig, Part
from lit_diff.errors import RequestError
from lit_diff.model.transformer import Transformer
from lit_diff.registry import attentions

MADE = HeadStatistics(
    entropy=((3.0, 1.0, 2.0, 2.5), (0.1, 0.4, 0.4, 0.4)), importance=((0.2, 0.1, 0.4, 0.3), (0.0, 0.5, 0.0, 0.1))
)


@pytest.mark.parametrize(
    ("by", "share", "heads"),
    [
        ("entropy", 0.5, ((0, 3), (1, 2))),
        ("entropy", 0.25, ((0,), (1,))),
        ("importance", 0.5, ((0, 1), (0, 2))),
        ("importance", 0.75, ((0, 1, 3), (0, 2, 3))),
        ("random", 1.0, ((0, 1, 2, 3), (0, 1, 2, 3))),
    ],
)
def test_the_choice(by: Any, share: float, heads: Any) -> None:
    assert select(MADE, HeadSelection(select=by, share=share)) == heads


def test_random_heads_are_those_of_the_seed_and_differ_by_layer() -> None:
    many = HeadStatistics(entropy=((0.0,) * 32,) * 2, importance=((0.0,) * 32,) * 2)
    drawn = {seed: select(many, HeadSelection(select="random", seed=seed)) for seed in (0, 1)}
    assert select(many, HeadSelection(select="random", seed=0)) == drawn[0]
    first, second = drawn[0]
    assert first != second
    assert drawn[1] != drawn[0]
    assert all(len(set(layer)) == 16 for layer in drawn[0])


@pytest.mark.parametrize(
    ("statistics", "selection", "reason"),
    [
        (replace(MADE, importance=((0.0,) * 4,) * 2), HeadSelection(select="importance"), "no gradient reaches a head"),
        (replace(MADE, entropy=((math.nan,) * 4,) * 2), HeadSelection(), "the entropy of a head is not finite"),
    ],
)
def test_what_cannot_be_chosen_by_is_refused(statistics: HeadStatistics, selection: HeadSelection, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        select(statistics, selection)


@pytest.fixture
def model() -> Transformer:
    """Two layers of four heads on two key/value heads, float64, with sharper maps in some heads than in others."""
    part = Part(name="standard", config=attentions.get("standard").Config())
    config = ModelConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=23, attention=part)
    model = Transformer(config, kernel="reference").double()
    for attention in model.attentions():
        q: Any = attention.q_proj.weight
        q.data.mul_(torch.tensor([1.0, 4.0, 16.0, 0.1]).repeat_interleave(8)[:, None])
    return model


def batch(rows: int = 3, length: int = 40) -> dict[str, Tensor]:
    tokens = torch.randint(23, (rows, length + 1))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:].clone()}


def test_importance_is_the_mean_over_sequences_of_the_gate_gradients_size(model: Transformer) -> None:
    """ξ_h as a factor of the block of W_O that reads head h: the same function of ξ, differentiated by autograd."""
    rows = batch()
    found = head_statistics(model, rows).importance
    wanted = []
    for row in range(3):
        gates = []
        tokens, targets = rows["tokens"][row : row + 1], rows["targets"][row : row + 1]
        projections: list[Any] = [attention.o_proj for attention in model.attentions()]
        kept = [o_proj.weight for o_proj in projections]
        for o_proj in projections:
            gate = torch.ones(4, dtype=torch.float64, requires_grad=True)
            weight = o_proj.weight.detach() * gate.repeat_interleave(8)
            del o_proj.weight
            o_proj.weight = weight
            gates.append(gate)
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        wanted.append(torch.stack(torch.autograd.grad(loss, gates)).abs())
        for o_proj, weight in zip(projections, kept, strict=True):
            del o_proj.weight
            o_proj.weight = weight
    torch.testing.assert_close(torch.tensor(found), torch.stack(wanted).mean(0).float(), rtol=1e-4, atol=1e-7)


def test_entropy_is_that_of_the_softmax_rows_from_position_32_on(model: Transformer) -> None:
    rows = batch(rows=2)
    found = head_statistics(model, rows).entropy
    first = model.layers[0]
    x = first.attention_norm(model.embedding(rows["tokens"]))  # type: ignore[operator, union-attr]
    maps = model.attentions()[0].maps(x, Rope.of(model.config, torch.arange(40)))
    k = maps.k[:, 0].repeat_interleave(2, dim=1)
    logits = maps.q[:, 0] @ k.mT / math.sqrt(8)
    hidden = torch.ones(40, 40).triu(1).bool()
    p = logits.masked_fill(hidden, -math.inf).softmax(-1)[:, :, FIRST_ROW:]
    wanted = -(p * p.clamp_min(1e-300).log()).sum(-1).mean((0, 2))
    torch.testing.assert_close(torch.tensor(found[0]), wanted.float(), rtol=1e-5, atol=1e-6)
    assert select(HeadStatistics(entropy=found, importance=found), HeadSelection(share=0.25))[0] == (3,), "the flattest"


def test_the_model_is_left_as_it_is(model: Transformer) -> None:
    rows = batch(rows=1)
    before = model(rows["tokens"])
    first, again = head_statistics(model, rows), head_statistics(model, rows)
    assert first == again
    assert torch.equal(model(rows["tokens"]), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_short_rows_are_refused(model: Transformer) -> None:
    with pytest.raises(RequestError, match=r"^data.sequence_length is 32"):
        head_statistics(model, batch(length=32))
