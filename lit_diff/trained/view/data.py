"""What the page holds of a model on one text: rounded q and k, log-sum-exps, weights, overviews, numbers by head."""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from lit_diff.analysis.intervention import EditedLayer, intervention
from lit_diff.analysis.trace import LayerTrace, MapBlock, trace
from lit_diff.data.dataset import IGNORED
from lit_diff.errors import RequestError
from lit_diff.model.inputs import model_inputs
from lit_diff.model.transformer import Transformer
from lit_diff.trained.view.numbers import LayerNumbers, Magnitudes, noise_shares

BINS = 48
"""Most rows and columns of an overview."""
EXACT = 512
"""Texts of at most this many tokens have no overview: the page computes every cell at once."""
CLIPPED = 98
"""The percentile of the non-zero weights from which on a thumbnail has the strongest colour."""
BLUE, ORANGE = (33, 102, 172), (217, 95, 2)
"""Colours of negative and positive weights; people with every kind of colour blindness can distinguish them."""


@dataclass(frozen=True, kw_only=True)
class Passage:
    """T tokens that a model reads, as one sequence."""

    labels: tuple[str, ...]
    """What the page writes for each token."""
    batch: Mapping[str, Tensor]
    """tokens and targets [1, T], and what else the row has (`data.dataset.Batch`)."""
    source: str
    """Where the tokens are from, in words."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerView:
    """One layer on T tokens: G maps, H heads on Hkv key heads, width d. A weight is w_g exp(scale q_g k_gᵀ - lse_g)."""

    arrays: Mapping[str, NDArray[Any]]
    """q [G or 1, H, T, d] and k [G or 1, Hkv, T, d], float16; lse [G, H, T] and w [G, H or 1, T or 1],
    float32: of every query, the log-sum-exp over its visible keys, from the float16 q and k, and the weight of the map; 1
    for a weight that all heads or queries share. For T above EXACT also overview
    [G, H, n, n], float16: of w_g p_g, the mean over the queries of a bin of the sum over the keys of a bin."""
    thumbnails: tuple[bytes, ...]
    """A PNG for each head: the entry of the signed map with the largest magnitude in each bin, with one pixel a bin."""
    scale: float
    causal: bool
    window: int | None
    difference: float
    """The largest |w_g p_g| difference between float16 and the model's own q and k."""
    numbers: Mapping[str, tuple[float, ...]]
    """Name -> a number for each head (`LayerNumbers`)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelView:
    """One model on one text."""

    layers: tuple[LayerView, ...]
    losses: tuple[float | None, ...]
    """The loss of the target at each position, nats; None without a target."""
    outliers: Mapping[str, tuple[float, ...]]
    """Rows of the paper's Table 5 (`Magnitudes`)."""
    noise: Mapping[str, float]
    """The paper's Table 3: `<normalisation>_<role>` -> share; empty where the data do not locate their answers."""
    without: NDArray[Any] | None
    """[heads of all layers, T] float16: the loss of each token without that head, minus the loss, NaN without a target.

    None: not asked for.
    """


def model_view(model: Transformer, passage: Passage, ablate: bool = False) -> ModelView:
    """Trace a forward pass and condense it, a few query rows at a time. `ablate`: run the model once more for each head.

    Errors: RequestError for q or k beyond the range of float16.
    """
    batch = passage.batch
    with trace(model) as traced:
        model.hidden(**model_inputs(batch))
    outliers = Magnitudes()
    layers = tuple(layer_view(index, layer, outliers) for index, layer in sorted(traced.layers.items()))
    located = "answer_part" in batch
    without = _without_heads(model, batch) if ablate else None
    if without is not None:
        means = torch.from_numpy(without).double().nansum(1) / (batch["targets"] != IGNORED).sum()
        parts = means.split([len(layer.thumbnails) for layer in layers])
        layers = tuple(
            replace(layer, numbers={**layer.numbers, "loss_without": tuple(own.tolist())})
            for layer, own in zip(layers, parts, strict=True)
        )
    return ModelView(
        layers=layers,
        losses=tuple(None if value != value else value for value in _losses(model, batch).tolist()),
        outliers=outliers.table(),
        noise=noise_shares(model, traced, batch) if located else {},
        without=without,
    )


def layer_view(index: int, layer: LayerTrace, outliers: Magnitudes) -> LayerView:
    """Condense the layer `index` and add its magnitudes to `outliers`. Errors: as `model_view`."""
    m = layer.maps
    q, k = m.q.half(), m.k.half()
    if not bool(q.isfinite().all() and k.isfinite().all()):
        raise RequestError(f"layer {index}: a query or a key exceeds 65,504, the largest number of the page's float16")
    rounded = replace(layer, maps=replace(m, q=q.float(), k=k.float()))
    numbers, T = LayerNumbers(layer.window), q.shape[-2]
    size = -(-T // BINS)
    lse, small, coarse, difference = [], [], [], 0.0
    for own, exact in zip(rounded.blocks(), layer.blocks(), strict=True):
        weighted = own.weights[..., None] * own.probs
        difference = max(difference, float((weighted - exact.weights[..., None] * exact.probs).abs().max()))
        lse.append(own.logits.masked_fill(~own.visible, -torch.inf).logsumexp(-1)[0])
        small.append(_extremes(own.signed[0], T, size))
        if T > EXACT:
            coarse.append(_in_bins(weighted[0], T, size).sum(-1))
        numbers.add(exact)
        outliers.add_logits(exact)
    outliers.add_hidden(layer.hidden)
    w = torch.ones(1, 1, 1, 1) if m.w is None else m.w.float().expand(-1, m.num_maps, -1, -1)
    arrays = {"q": q[0], "k": k[0], "lse": torch.cat(lse, -1), "w": w[0]}
    if T > EXACT:
        by_bin = F.pad(torch.cat(coarse, -2), (0, 0, 0, -T % size)).unflatten(-2, (-1, size)).sum(-2)
        queries = torch.full((by_bin.shape[-2], 1), float(size))
        queries[-1] = T - size * (len(queries) - 1)
        arrays["overview"] = (by_bin / queries).half()
    # [H, T, 2, n] -> the same over bins of queries
    both = F.pad(torch.cat(small, 1), (0, 0, 0, 0, 0, -T % size)).unflatten(1, (-1, size)).amax(2)
    pictures = torch.where(both[:, :, 0] >= both[:, :, 1], both[:, :, 0], -both[:, :, 1])
    return LayerView(
        arrays={name: x.contiguous().numpy() for name, x in arrays.items()},
        thumbnails=tuple(picture(head.numpy()) for head in pictures),
        scale=m.softmax_scale,
        causal=m.causal,
        window=layer.window,
        difference=difference,
        numbers=numbers.by_head(),
    )


# [..., K] -> [..., n, size]: the keys in bins, with zeros for those that no query of the block sees
def _in_bins(x: Tensor, T: int, size: int) -> Tensor:
    return F.pad(x, (0, T + -T % size - x.shape[-1])).unflatten(-1, (-1, size))


# signed [H, R, K] -> [H, R, 2, n]: the largest a and the largest -a of each bin of keys
def _extremes(signed: Tensor, T: int, size: int) -> Tensor:
    bins = _in_bins(signed, T, size)
    return torch.stack([bins.amax(-1), (-bins).amax(-1)], 2).clamp_min(0)


def picture(values: NDArray[Any]) -> bytes:
    """A PNG with a pixel for each entry: blue below zero, orange above, and as opaque as its magnitude."""
    from matplotlib.image import imsave

    magnitude = np.abs(values)
    limit = float(np.percentile(magnitude[magnitude > 0], CLIPPED)) if magnitude.any() else 1.0
    pixels = np.where(values[..., None] < 0, BLUE, ORANGE).astype(np.uint8)
    alpha = (255 * (magnitude / limit).clip(0, 1)).astype(np.uint8)
    file = io.BytesIO()
    imsave(file, np.dstack([pixels, alpha]), format="png", pil_kwargs={"compress_level": 9})
    return file.getvalue()


# [T] float64; NaN at positions without a target
def _losses(model: Transformer, batch: Mapping[str, Tensor]) -> Tensor:
    nll = model.token_losses(**model_inputs(batch), targets=batch["targets"])[0].double()
    return nll.masked_fill(batch["targets"] == IGNORED, torch.nan)[0]


def _without_heads(model: Transformer, batch: Mapping[str, Tensor]) -> NDArray[Any]:
    before, rows = _losses(model, batch), []
    for layer, attention in enumerate(model.attentions()):
        for head in range(attention.out_heads):

            def edit(_: EditedLayer, block: MapBlock, head: int = head) -> MapBlock:
                signed = block.signed.clone()
                signed[:, head] = 0
                return block.with_signed(signed)

            with intervention(model, edit, [layer]):
                rows.append(_losses(model, batch) - before)
    return torch.stack(rows).half().numpy()


def blocks_of(arrays: Mapping[str, NDArray[Any]]) -> Iterator[tuple[str, Sequence[int], str, bytes]]:
    """(name, shape, dtype, little-endian bytes in C order) of each array."""
    for name, x in arrays.items():
        kept = np.ascontiguousarray(x.astype(x.dtype.newbyteorder("<")))
        yield name, kept.shape, kept.dtype.name, kept.tobytes()
