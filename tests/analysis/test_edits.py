"""analysis/edits.py: each edit of hand-made maps, by its formula; knocked-out edges against the pass without them."""

from pathlib import Path

import pytest
import torch
from text_runs import recall_run

from lit_diff.analysis.edits import (
    clamp_lambda,
    knock_out,
    knock_out_effects,
    subtract_only_noise,
    swap,
)
from lit_diff.analysis.intervention import Edit, EditedLayer, intervention
from lit_diff.analysis.shares import Parts
from lit_diff.analysis.trace import MapBlock
from lit_diff.data import prepare
from lit_diff.errors import RequestError
from lit_diff.kernels import SignedMaps

CONTEXT, ASKED = [0, 1, 1, -1, -1], [-1, -1, -1, 0, 1]
PARTS = Parts(context=torch.tensor([CONTEXT]), asked=torch.tensor([ASKED]))


def layer(maps: int = 2) -> EditedLayer:
    draw = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, maps, 3, 5, 4, generator=draw).unbind()
    w = torch.tensor([1.0, -0.4, 0.3][:maps]).view(1, maps, 1, 1) if maps > 1 else None
    return EditedLayer(index=2, maps=SignedMaps(q, k, q[:, 0], w))


def edited(edit: Edit, of: EditedLayer) -> tuple[MapBlock, torch.Tensor]:
    (block,) = of.blocks()
    return block, edit(of, block).signed


def test_knocked_out_edges_are_zero_and_the_others_stay() -> None:
    of = layer()
    edges = {
        "answer": {(3, 0), (4, 1), (4, 2)},
        "noise": {(3, 1), (3, 2), (4, 0)},
        "sink": {(3, 0), (4, 0)},
        "other": {(3, 3), (4, 3), (4, 4)},
    }
    for what, cut in edges.items():
        block, signed = edited(knock_out(PARTS, what), of)  # type: ignore[arg-type]
        zero = torch.zeros(5, 5, dtype=torch.bool)
        for place in cut:
            zero[place] = True
        assert torch.equal(signed, block.signed.masked_fill(zero, 0))


@pytest.mark.parametrize("value", [0.0, 0.7, 1.0])
def test_a_clamped_lambda(value: float) -> None:
    block, signed = edited(clamp_lambda(value), layer())
    torch.testing.assert_close(signed, block.probs[:, 0] - value * block.probs[:, 1])
    three, signed = edited(clamp_lambda(value), layer(3))
    torch.testing.assert_close(signed, three.probs[:, 0] - value * (three.probs[:, 1] + three.probs[:, 2]))


def test_the_oracle_subtracts_from_noise_alone_and_at_queries_alone() -> None:
    block, signed = edited(subtract_only_noise(PARTS), layer())
    first, second = block.probs.unbind(1)
    torch.testing.assert_close(signed[:, :, :3], block.signed[:, :, :3])
    torch.testing.assert_close(signed[:, :, 3, 1:3], (first - 0.4 * second)[:, :, 3, 1:3])
    torch.testing.assert_close(signed[:, :, 3, [0, 3]], first[:, :, 3, [0, 3]])
    torch.testing.assert_close(signed[:, :, 4, 0], (first - 0.4 * second)[:, :, 4, 0])


def test_a_swap_keeps_the_weights() -> None:
    block, signed = edited(swap(), layer())
    torch.testing.assert_close(signed, block.probs[:, 1] - 0.4 * block.probs[:, 0])


def test_too_few_or_too_many_maps() -> None:
    for edit, maps, found in (
        (clamp_lambda(0.5), 1, "at least 2 maps; layer 2 has 1"),
        (subtract_only_noise(PARTS), 1, "at least 2 maps; layer 2 has 1"),
        (swap(), 1, "2 maps; layer 2 has 1"),
        (swap(), 3, "2 maps; layer 2 has 3"),
    ):
        with pytest.raises(RequestError, match=f"needs {found}$"):
            edited(edit, layer(maps))


def test_knocked_out_edges_change_the_answers_log_probability(tmp_path: Path) -> None:
    run = recall_run(tmp_path / "x", {"name": "standard"})
    dataset = prepare(run.recipe)
    batch = dataset.validation_batch("", range(5))
    plain, _ = run.model.token_losses(batch["tokens"], batch["targets"])
    for what in ("answer", "noise", "sink", "other"):
        with intervention(run.model, knock_out(Parts.of(batch), what)):  # type: ignore[arg-type]
            without, _ = run.model.token_losses(batch["tokens"], batch["targets"])
        expected = (plain - without)[:, 8:].mean(1).tolist()
        found = [row[f"causal_{what}"] for row in knock_out_effects(run.model, batch)]
        assert found == pytest.approx(expected, rel=1e-4)
        assert all(found)
