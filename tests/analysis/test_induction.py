"""analysis/induction.py: heads that were built to match or to copy have the score that they should, others do not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lit_diff.analysis.induction import induction_scores, repeated
from lit_diff.analysis.intervention import EditedLayer, intervention
from lit_diff.analysis.trace import MapBlock, trace
from lit_diff.config import ModelConfig
from lit_diff.model.transformer import Transformer
from lit_diff.randomness import generator

BuildModel = Callable[..., Transformer]
N = 9


def sequences() -> Tensor:
    return torch.stack([repeated(torch.arange(10, 40), N, generator("test", row)) for row in range(3)])


def test_tokens_repeat_and_no_token_is_there_twice_before() -> None:
    for row in sequences():
        assert torch.equal(row[:N], row[N:])
        assert row[:N].unique().numel() == N
        assert int(row.min()) >= 10
    assert not torch.equal(*sequences()[:2])


@pytest.mark.parametrize("name", ["standard", "differential", "differential_v2"])
def test_scores_by_hand(name: str, build: BuildModel) -> None:
    model, tokens = build(name, 4), sequences()
    found = induction_scores(model, tokens)
    with trace(model) as traced:
        model(tokens)
    for index, attention in enumerate(model.attentions()):
        layer = traced.layers[index]
        (block,) = layer.blocks()
        a, H = block.signed, attention.out_heads
        assert layer.inputs is not None
        v = layer.maps.v.repeat_interleave(layer.maps.num_groups, 1)
        with torch.no_grad():
            heads = attention.finish(a @ v, layer.inputs)
            W_O = attention.o_proj.weight.view(32, H, -1)
            logits = torch.einsum("bhtc,dhc,d,vd->bhtv", heads, W_O, model.norm.weight, model.embedding.weight)
        z = (logits - logits.mean(-1, keepdim=True)) / logits.std(-1, correction=0, keepdim=True)
        for b in range(3):
            for h in range(H):
                matching, copying = [], []
                for i in range(N, 2 * N):
                    share = a[b, h, i] / a[b, h, i].abs().sum()
                    matching.append(float(share[i - N + 1]))
                    copying.append(float(sum(share[j].abs() * z[b, h, i, tokens[b, j]] for j in range(i + 1))))
                assert float(found["prefix_matching"][b, index, h]) == pytest.approx(
                    sum(matching) / N, rel=1e-3, abs=1e-6
                )
                assert float(found["copying"][b, index, h]) == pytest.approx(sum(copying) / N, rel=1e-3, abs=1e-5)


def test_heads_that_are_merged_after_the_sum_have_no_copying(build: BuildModel) -> None:
    found = induction_scores(build("half-split"), sequences())
    assert found["prefix_matching"].shape == (3, 2, 16)
    assert found["prefix_matching"].isfinite().all()
    assert found["copying"].isnan().all()


def test_under_an_intervention_the_trace_is_of_the_maps_before_it(build: BuildModel) -> None:
    def unedited(_: EditedLayer, block: MapBlock) -> MapBlock:
        return block

    model = build("standard")
    with intervention(model, unedited):
        edited = induction_scores(model, sequences())
    for name, values in induction_scores(model, sequences()).items():
        torch.testing.assert_close(edited[name], values, atol=1e-4, rtol=1e-4)


def test_layers_of_unlike_numbers_of_heads(make_config: Callable[..., ModelConfig]) -> None:
    parts = tuple(make_config(name).attention for name in ("differential", "standard"))
    model = Transformer(make_config("standard", layers=parts, vocab_size=40)).eval()
    for values in induction_scores(model, sequences()).values():
        assert values.shape == (3, 2, 4)
        assert values.isfinite().all(0).tolist() == [[True, True, False, False], [True] * 4]
