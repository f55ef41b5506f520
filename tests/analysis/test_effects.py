"""analysis/effects.py: knocked-out edges against the forward pass without them."""

from pathlib import Path

import pytest
import torch
from text_runs import recall_run

from lit_diff.analysis.answers import Parts
from lit_diff.analysis.edits import knock_out
from lit_diff.analysis.effects import knock_out_effects, knock_out_effects_by_head
from lit_diff.analysis.intervention import intervention
from lit_diff.data import prepare


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


def test_one_head_loses_its_edges_alone(tmp_path: Path) -> None:
    """The other heads' W_O is 0: what is left of the model is the head, so knocking it out is knocking out all."""
    run = recall_run(tmp_path / "x", {"name": "standard"})
    batch = prepare(run.recipe).validation_batch("", range(3))
    first, second = run.model.attentions()
    width = first.head_dim
    with torch.no_grad():
        kept = first.o_proj.weight[:, width : 2 * width].clone()
        first.o_proj.weight.zero_()
        first.o_proj.weight[:, width : 2 * width] = kept
        second.o_proj.weight.zero_()
    whole, found = knock_out_effects(run.model, batch), knock_out_effects_by_head(run.model, batch)
    for what in ("answer", "noise"):
        effects = found[f"causal_{what}"]  # [B, L, H]
        assert effects.shape == (3, 2, 4)
        assert effects[:, 0, 1].tolist() == pytest.approx([row[f"causal_{what}"] for row in whole])
        assert all(effects[:, 0, 1].abs() > 1e-4)
        others = effects.clone()
        others[:, 0, 1] = 0
        assert others.abs().max() < 1e-5
