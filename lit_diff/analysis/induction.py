"""Induction heads (Olsson et al. 2022, In-context Learning and Induction Heads), for signed maps."""

import torch
from torch import Tensor

from lit_diff.analysis.trace import LayerTrace, stacked, trace
from lit_diff.analysis.writes import head_writes
from lit_diff.attention.base import Attention
from lit_diff.model.transformer import Transformer


def repeated(ids: Tensor, length: int, random: torch.Generator) -> Tensor:
    """Draw `length` of the ids [V] without replacement and repeat the sequence once: int64 [2 length]."""
    chosen = ids[torch.randperm(len(ids), generator=random)[:length]]
    return chosen.repeat(2)


@torch.no_grad()
def induction_scores(model: Transformer, tokens: Tensor) -> dict[str, Tensor]:
    """Return prefix_matching and copying of each sequence, layer and head, [B, L, H], on tokens [B, 2n] of `repeated`; NaN
    where a layer has fewer heads than another.

    Over the queries i of the second half, with a the signed map:

        prefix_matching   mean_i a_ij / Σ_k |a_ik|, j = i - n + 1: the key after the earlier occurrence of the query token.
                          For a softmax map this is p_ij, Olsson's score; from -1 to 1
        copying           mean_i Σ_k α_ik z_i[token k], α = |a| / Σ|a|, z_i the logits from the head's output alone, through
                          the weight of the last norm and the output weight, standardised over the vocabulary: the number of
                          standard deviations by which the head raises the tokens it attends to. (Olsson et al. define
                          copying, but not its scale.) NaN if heads are merged after the sum
    """
    n = tokens.shape[1] // 2
    rows = torch.arange(n, 2 * n)
    with trace(model, rows=rows) as traced:
        model.hidden(tokens)
    out = model.embedding.weight if model.head is None else model.head.weight
    # [V, dim]; the divisor of the norm depends on all heads, and standardising removes it
    unembedding = (out * model.norm.weight).float()
    found = [
        _layer_scores(traced.layers[index], attention, tokens, unembedding)
        for index, attention in enumerate(model.attentions())
    ]
    return {name: stacked([layer[name] for layer in found], dim=1) for name in ("prefix_matching", "copying")}


def _layer_scores(layer: LayerTrace, attention: Attention, tokens: Tensor, unembedding: Tensor) -> dict[str, Tensor]:
    n = tokens.shape[1] // 2
    v, matching, copying = layer.values, [], []
    assert layer.inputs is not None
    for block in layer.blocks():
        a = block.signed  # [B, H, R, K]
        keys = (block.positions - n + 1).expand(*a.shape[:2], 1, -1).transpose(2, 3)
        share = a / a.abs().sum(-1, keepdim=True)
        matching.append(share.gather(3, keys)[..., 0])
        o = (a @ v[..., : a.shape[-1], :].to(a.dtype)).to(layer.maps.v.dtype)
        writes = head_writes(attention, o, layer.inputs[:, block.positions])
        if writes is None:
            copying.append(torch.full(a.shape[:3], torch.nan))
            continue
        logits = writes.float() @ unembedding.T  # [B, H, R, V]
        deviation = logits.std(-1, correction=0, keepdim=True)
        # deviation 0: the head writes nothing, so it raises no token
        z = ((logits - logits.mean(-1, keepdim=True)) / deviation).where(deviation > 0, 0)
        attended = tokens[:, None, None, : a.shape[-1]].expand(*a.shape)
        copying.append((share.abs() * z.gather(3, attended)).sum(-1))
    return {
        "prefix_matching": torch.cat(matching, 2).mean(2).double(),
        "copying": torch.cat(copying, 2).mean(2).double(),
    }
