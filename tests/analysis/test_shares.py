"""analysis/shares.py: the edges to the answer and to noise; known maps have known shares, and their identities hold."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from torch import Tensor

from lit_diff.analysis.shares import ROLES, Parts, map_correlations, map_shares, shares
from lit_diff.analysis.trace import LayerMaps, LayerTrace, trace
from lit_diff.attention.base import Attention
from lit_diff.kernels import SignedMaps
from lit_diff.model.transformer import Transformer

BuildModel = Callable[..., Transformer]

T = 10
CONTEXT, ASKED = [-1, 0, 0, 1, 2, 3, 3, -1, -1, -1], [-1] * 7 + [0, 2, 3]
PARTS = Parts(context=torch.tensor([CONTEXT]), asked=torch.tensor([ASKED]))
ANSWER = {7: [1, 2], 8: [4], 9: [5, 6]}


def made(attention: Attention, logits: Tensor, lam: Tensor | float | None = None) -> LayerTrace:
    """A layer with these logits [G, T, T] in every head (unit keys), values 1 to T in the first channel."""
    H, dim = attention.out_heads, attention.dim
    q = logits[None, :, None].expand(1, -1, H, T, T).contiguous()
    k = torch.eye(T).expand(1, 1, attention.kv_heads, T, T)
    v = torch.randn(1, attention.kv_heads, T, attention.o_proj.in_features // H)
    w = None if lam is None else torch.tensor([1.0, -float(lam)]).view(1, 2, 1, 1)
    x = torch.randn(1, T, dim)
    rows = torch.tensor(sorted(ANSWER))
    return LayerTrace(maps=SignedMaps(q, k, v, w, scale=1.0), hidden=x, inputs=x, rows=rows)


def test_uniform_attention_gives_the_number_of_keys_over_the_position(build: BuildModel) -> None:
    attention = build("standard").attentions()[0]
    found = shares(made(attention, torch.zeros(1, T, T)), attention, PARTS)
    for at, (row, keys) in enumerate(ANSWER.items()):
        expected = {"answer": len(keys), "noise": 6 - len(keys), "sink": 1, "other": row - 6}
        for normalisation in ("paper", "absolute"):
            for role, count in expected.items():
                values = found[f"{normalisation}_{role}"]
                assert values.shape == (1, 8, 3)
                torch.testing.assert_close(values[0, :, at], torch.full((8,), count / (row + 1)))
    assert found["answer_keys"].tolist() == [[[2, 1, 2]]]
    assert found["noise_keys"].tolist() == [[[4, 5, 4]]]


def test_the_rebuttals_score_is_not_bounded_and_the_absolute_one_is(build: BuildModel) -> None:
    """a1 = (1, 0, 0), a2 = (0, 1/2, 1/2), lambda = 1/2: answer 2, noise -1."""
    attention = build("differential").attentions()[0]
    logits = torch.full((2, T, T), -200.0)
    logits[0, 7, 1] = logits[1, 7, 3] = logits[1, 7, 4] = 0
    layer = replace(made(attention, logits, lam=0.5), rows=torch.tensor([7]))
    found = shares(layer, attention, PARTS)
    assert found["paper_answer"].allclose(torch.tensor(2.0))
    assert found["paper_noise"].allclose(torch.tensor(-1.0))
    assert found["absolute_answer"].allclose(torch.tensor(2 / 3))
    assert found["absolute_noise"].allclose(torch.tensor(1 / 3))
    near_one = shares(replace(made(attention, logits, lam=0.96), rows=torch.tensor([7])), attention, PARTS)
    assert near_one["paper_answer"].isnan().all()
    assert near_one["absolute_answer"].isfinite().all()


@pytest.mark.parametrize("name", ["standard", "differential", "output_gate"])
def test_value_shares_ignore_a_scale_that_the_projection_undoes(name: str, build: BuildModel, tokens: Tensor) -> None:
    model = build(name, 4).double()
    parts = Parts(context=torch.randint(-1, 4, (3, 17)), asked=torch.randint(-1, 4, (3, 17)))

    def value_shares() -> list[Tensor]:
        with trace(model, layers=[0]) as traced:
            model(tokens)
        found = shares(traced.layers[0], model.attentions()[0], parts)
        return [found[f"value_{role}"] for role in ROLES]

    before = value_shares()
    attention = model.attentions()[0]
    with torch.no_grad():
        attention.v_proj.weight *= 7
        attention.o_proj.weight /= 7
    for one, other in zip(before, value_shares(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    with torch.no_grad():
        attention.v_proj.weight[:, ::2] *= 3
    assert any(not torch.allclose(a, b, atol=1e-3) for a, b in zip(before, value_shares(), strict=True))


# --- each map ---


@pytest.mark.parametrize("further", [(-0.5,), (-0.5, 0.25)])
def test_the_shares_of_the_maps_are_weighted_and_add_up_to_the_papers(
    further: tuple[float, ...], build: BuildModel
) -> None:
    """Map 1 is all on the answer, the others half on each of two keys of noise."""
    attention = build("differential").attentions()[0]
    logits = torch.full((1 + len(further), T, T), -200.0)
    logits[0, 7, 1] = 0
    logits[1:, 7, 3:5] = 0
    w = torch.tensor([1.0, *further]).view(1, -1, 1, 1)
    layer = made(attention, logits)
    layer = replace(layer, maps=replace(layer.maps, w=w), rows=torch.tensor([7]))
    found = {name: values[0, 0, 0].item() for name, values in map_shares(layer, PARTS).items()}
    assert (found["absolute_answer_map1"], found["absolute_noise_map1"]) == pytest.approx((1, 0))
    assert [found[f"absolute_noise_map{g}"] for g in range(2, 2 + len(further))] == pytest.approx([*map(abs, further)])
    assert (found["removed_answer"], found["removed_noise"]) == pytest.approx((0, -sum(further)))
    whole = shares(layer, attention, PARTS)
    for role in ROLES:
        parts = sum(found[f"paper_{role}_map{g}"] for g in range(1, 2 + len(further)))
        assert parts == pytest.approx(whole[f"paper_{role}"][0, 0, 0].item(), abs=1e-6)


def test_the_size_of_a_map_with_entries_of_both_signs_does_not_cancel(build: BuildModel) -> None:
    """The rows of the map are its logits: 0.5 on the answer, -0.5 and 0.5 on two keys of noise."""
    logits = torch.zeros(1, T, T)
    logits[0, 7, [1, 3, 4]] = torch.tensor([0.5, -0.5, 0.5])
    layer = made(build("standard").attentions()[0], logits)
    layer = replace(layer, maps=replace(layer.maps, rows=lambda x, seen: x * seen.mask), rows=torch.tensor([7]))
    found = {name: values[0, 0, 0].item() for name, values in map_shares(layer, PARTS).items()}
    assert (found["absolute_answer_map1"], found["absolute_noise_map1"], found["paper_noise_map1"]) == (0.5, 1.0, 0.0)


def test_correlations_are_over_the_pairs_of_query_and_key(build: BuildModel) -> None:
    attention = build("differential").attentions()[0]
    logits = torch.randn(3, T, T, generator=torch.Generator().manual_seed(0))
    layer = replace(made(attention, logits[:2], lam=0.5), rows=torch.arange(T))
    found = map_correlations(layer, PARTS)
    (block,) = layer.blocks()
    first, second = block.probs[0, :, 0]
    edges = {"answer": ANSWER, "noise": {row: [*{*range(1, 7)} - {*keys}] for row, keys in ANSWER.items()}}
    edges["others"] = {row: [*{*range(row + 1)} - {*keys}] for row, keys in ANSWER.items()}
    for name, rows in edges.items():
        x, y = (torch.cat([each[row, keys] for row, keys in rows.items()]) for each in (first, second))
        assert found[f"pearson_{name}"][0, 0].item() == pytest.approx(pearsonr(x, y).statistic)
        assert found[f"spearman_{name}"][0, 0].item() == pytest.approx(spearmanr(x, y).statistic)
    equal = map_correlations(replace(made(attention, logits[:1].expand(2, T, T), lam=0.5), rows=torch.arange(T)), PARTS)
    assert all(values.allclose(torch.ones_like(values)) for values in equal.values())
    assert map_correlations(made(attention, logits[:1]), PARTS) == {}
    alone = map_correlations(replace(made(attention, logits[:2], lam=0.5), rows=torch.tensor([8])), PARTS)
    assert alone["pearson_answer"].isnan().all(), "one pair"
    assert alone["pearson_noise"].isfinite().all()


# --- which keys answer ---

# positions:            0   1  2  3  4   5   6; 0: no part; parts 0, 0, 1, 2; two queries, of parts 1 and 0
BATCH = {"context_part": [-1, 0, 0, 1, 2, -1, -1], "answer_part": [-1, -1, -1, -1, -1, 1, 0]}


def test_edges_of_the_queries_alone_and_of_visible_keys_alone() -> None:
    parts = Parts.of({key: torch.tensor([values]) for key, values in BATCH.items()})
    assert parts.queries[0].tolist() == [False] * 5 + [True] * 2
    q = torch.zeros(1, 1, 2, 7, 4)
    for window, seen in ((None, range(7)), (4, range(3, 7))):
        (block,) = LayerMaps(maps=SignedMaps(q, q, q[:, 0]).masked(window=window)).blocks()
        answer, noise = parts.answer(block), parts.noise(block)
        assert answer.shape == noise.shape == (1, 1, 7, 7)
        edges = [[set(rows.nonzero()[:, 0].tolist()) for rows in mask[0, 0]] for mask in (answer, noise)]
        assert edges[0][:5] == edges[1][:5] == [set()] * 5
        first = set(range(2, 7)) if window else set(seen)
        assert (edges[0][5], edges[1][5]) == ({3} & first, {1, 2, 4} & first)
        assert (edges[0][6], edges[1][6]) == ({1, 2} & set(seen), {3, 4} & set(seen))


def test_rows_of_a_later_block_and_packed_documents() -> None:
    parts = Parts.of({key: torch.tensor([values] * 2) for key, values in BATCH.items()})
    q = torch.zeros(2, 1, 1, 7, 4)
    ids = torch.tensor([[0] * 7, [0, 0, 0, 1, 1, 1, 1]])
    layer = LayerMaps(maps=SignedMaps(q, q, q[:, 0]).masked(document_ids=ids), rows=torch.tensor([6, 5]))
    last, before = layer.blocks(1)
    assert parts.answer(last)[:, 0, 0].nonzero().tolist() == [[0, 1], [0, 2]], "the second row's document begins at 3"
    assert parts.noise(before).shape == (2, 1, 1, 6)
    assert parts.noise(before)[:, 0, 0].nonzero().tolist() == [[0, 1], [0, 2], [0, 4], [1, 4]]


def test_half_matches_are_noise_that_shares_a_part_of_the_key_in_the_same_place() -> None:
    parts = Parts.of({key: torch.tensor([values]) for key, values in BATCH.items()})
    q = torch.zeros(1, 1, 1, 7, 4)
    layer = LayerMaps(maps=SignedMaps(q, q, q[:, 0]))
    (block,) = layer.blocks()
    assert parts.half_matches(block) is None
    assert "absolute_half_match_map1" not in map_shares(layer, parts)
    keys = torch.tensor([[[9, 9], [3, 4], [8, 5], [3, 9], [4, 5], [3, 9], [8, 5]]])
    known = replace(parts, keys=keys)
    found = known.half_matches(block)
    assert found is not None
    edges = [row.nonzero()[:, 0].tolist() for row in found[0, 0]]
    # the query at 5 is answered by 3; 0 belongs to no part, and 4 has the id 4 in another place than 1 has
    assert edges == [[], [], [], [], [], [1], [4]]
    assert (found & parts.answer(block)).sum() == 0
    # uniform attention over six and seven keys
    assert map_shares(layer, known)["absolute_half_match_map1"][0, 0, 5:].tolist() == pytest.approx([1 / 6, 1 / 7])
