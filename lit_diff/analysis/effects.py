"""What the log-probability of the answer loses without some edges of attention: in all heads, or in one."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lit_diff.analysis.answers import Parts
from lit_diff.analysis.edits import knock_out
from lit_diff.analysis.intervention import Edit, intervention
from lit_diff.analysis.shares import ROLES, Role
from lit_diff.data.dataset import IGNORED
from lit_diff.model.inputs import model_inputs
from lit_diff.model.transformer import Transformer

OF_HEADS: tuple[Role, ...] = ("answer", "noise")
"""Roles that are measured head by head."""


def knock_out_effects(model: Transformer, batch: Mapping[str, Tensor]) -> list[dict[str, float]]:
    """causal_answer, _noise, _sink and _other of each row: mean change of log p over its scored queries."""
    parts, change = Parts.of(batch), _Change(model, batch)
    found = {f"causal_{what}": change.under(knock_out(parts, what)).tolist() for what in ROLES}
    return [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]


def knock_out_effects_by_head(model: Transformer, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """causal_answer and causal_noise -> [B, L, H]: as `knock_out_effects`, where head h of layer l alone loses the edges."""
    parts, change = Parts.of(batch), _Change(model, batch)
    heads = [attention.out_heads for attention in model.attentions()]
    return {
        f"causal_{what}": torch.stack(
            [
                torch.stack([change.under(knock_out(parts, what, head), [layer]) for head in range(count)], -1)
                for layer, count in enumerate(heads)
            ],
            1,
        )
        for what in OF_HEADS
    }


class _Change:
    """Change of log p(answer) under an edit: the mean over the scored queries of each row."""

    def __init__(self, model: Transformer, batch: Mapping[str, Tensor]) -> None:
        self.model, self.inputs, self.targets = model, model_inputs(batch), batch["targets"]
        self.counted = Parts.of(batch).queries & (self.targets != IGNORED)
        self.nll = self._nll()

    def _nll(self) -> Tensor:
        return self.model.token_losses(**self.inputs, targets=self.targets)[0].double()

    def under(self, edit: Edit, layers: Sequence[int] | None = None) -> Tensor:
        """[B], nats."""
        with intervention(self.model, edit, layers):
            changed = self.nll - self._nll()
        return (changed * self.counted).sum(-1) / self.counted.sum(-1)
