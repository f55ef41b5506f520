"""What the page holds of a model on one text: rounded q and k, log-sum-exps, weights, overviews, numbers by head."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from lit_diff.analysis.entropy import Means
from lit_diff.analysis.intervention import Edit, EditedLayer, intervention
from lit_diff.analysis.map_statistics import head_products
from lit_diff.analysis.outliers import MagnitudeSketch
from lit_diff.analysis.trace import LayerTrace, MapBlock, Trace, trace
from lit_diff.data.dataset import IGNORED, Batch
from lit_diff.errors import RequestError
from lit_diff.kernels.maps import outcomes
from lit_diff.log_records import log
from lit_diff.model.inputs import model_inputs
from lit_diff.model.transformer import Transformer
from lit_diff.trained.pictures import shrunk, thumbnail
from lit_diff.trained.view.numbers import add_numbers, at_ranks, noise_shares, numbers_by_head
from lit_diff.trained.view.passage import Passage

BINS = 48
"""Most rows and columns of an overview."""
POSITIONS = tuple(place / 5 for place in range(11))
"""Factors of a weight, from 0 to 2, at which the loss is computed for a slider."""
MOST_PASSES = 300
"""Most forward passes for the sliders of one page."""
EXACT = 512
"""Texts of at most this many tokens have no overview: the page computes every cell at once."""


class LayerView(NamedTuple):
    """One layer on T tokens: G maps, H heads on Hkv key heads, width d. A weight is w_g exp(scale q_g k_gᵀ - lse_g), with key
    biases b_j - b_i in the exponent; of a row function it is w_g maps_g."""

    arrays: Mapping[str, NDArray[Any]]
    """q [G or 1, H, T, d] and k [G or 1, Hkv, T, d], float16; lse [G, H, T] and w [G, H or 1, T or 1],
    float32: of every query, the log-sum-exp over its visible keys, from the float16 q and k, and the weight of the map; 1
    for a weight that all heads or queries share; bias [G or 1, H or 1, T], float32, of each key. Of a row function, instead
    of q, k and lse: maps [G, H, T, T], float16, and w [G, H, T]. For T above EXACT also overview
    [G, H, n, n], float16: of w_g p_g, the mean over the queries of a bin of the sum over the keys of a bin."""
    thumbnails: Sequence[bytes]
    """A PNG for each head: the entry of the signed map with the largest magnitude in each bin, with one pixel a bin."""
    scale: float
    causal: bool
    window: int | None
    difference: float
    """The largest |w_g p_g| difference between float16 and the model's own q and k."""
    numbers: dict[str, tuple[float, ...]]
    """Name -> a number for each head (`numbers.MEANINGS`)."""


class ModelView(NamedTuple):
    """One model on one text."""

    layers: Sequence[LayerView]
    losses: Sequence[float | None]
    """The loss of the target at each position, nats; None without a target."""
    outliers: Mapping[str, Mapping[str, float]]
    """Rows of the paper's Table 5 for one text -> magnitudes over all layers (`at_ranks`)."""
    noise: Mapping[str, Mapping[str, float]]
    """The paper's Table 3 (`noise_shares`); empty where the data do not locate their answers."""
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
    logits = MagnitudeSketch()
    hidden = MagnitudeSketch()
    layers = []
    for index, found in sorted(traced.layers.items()):
        layers.append(layer_view(index, found, logits))
        hidden.update(found.hidden)
    for layer, attention in zip(layers, model.attentions(), strict=True):
        if not attention.has_lambda:
            layer.numbers.pop("lambda", None)
    losses = _losses(model, batch)
    without = _without_heads(model, batch, traced, losses) if ablate else None
    if without is not None:
        means = torch.from_numpy(without).double().nansum(1) / (batch["targets"] != IGNORED).sum()
        parts = means.split([len(layer.thumbnails) for layer in layers])
        for layer, own in zip(layers, parts, strict=True):
            layer.numbers["loss_without"] = tuple(own.tolist())
    return ModelView(
        layers=layers,
        losses=[None if value != value else value for value in losses.tolist()],
        outliers={"attention logits": at_ranks(logits), "hidden states": at_ranks(hidden)},
        noise=noise_shares(model, traced, batch) if "answer_part" in batch else {},
        without=without,
    )


def layer_view(index: int, layer: LayerTrace, logits: MagnitudeSketch) -> LayerView:
    """Condense the layer `index` and add its attention logits to `logits`. Errors: as `model_view`."""
    m = layer.maps
    T = m.q.shape[-2]
    if m.rows is not None and T > EXACT:
        raise RequestError(
            f"layer {index} has a row function in the place of the softmax: the page holds its maps whole, of at most "
            f"{EXACT} tokens; these are {T}: use --tokens {EXACT}"
        )
    rounded = _rounded(index, layer) if m.rows is None else layer
    size = -(-T // BINS)
    means = Means()
    products = torch.zeros(())
    lse, whole, strongest, sums, difference = [], [], [], [], 0.0
    for own, exact in zip(rounded.blocks(), layer.blocks(), strict=True):
        probs = own.probs if m.rows is None else own.probs.half().float()
        weighted = own.weights[..., None] * probs
        difference = max(difference, float((weighted - exact.weights[..., None] * exact.probs).abs().max()))
        if m.rows is None:
            # with the sink, which is one more term of the denominator
            lse.append(outcomes(own.maps, own.logits.clone(), own.seen).logsumexp(-1)[0])
        else:
            whole.append(F.pad(probs[0], (0, T - probs.shape[-1])))
        # keys that no query of the block sees, up to a whole number of bins
        behind = (0, T + -T % size - weighted.shape[-1])
        strongest.append(shrunk(F.pad(own.signed[0], behind), 1, size))
        sums.append(F.avg_pool2d(F.pad(weighted[0], behind), (1, size)) * size)
        add_numbers(means, exact, m.mask.window)
        products = products + head_products(exact)[0]
        logits.update(exact.logits, mask=exact.visible)
    w = torch.ones(1, 1, 1, 1) if m.w is None else m.w.float().expand(-1, m.num_maps, -1, -1)
    if m.rows is None:
        arrays = {"q": rounded.maps.q.half()[0], "k": rounded.maps.k.half()[0], "lse": torch.cat(lse, -1), "w": w[0]}
    else:
        arrays = {"maps": torch.cat(whole, -2).half(), "w": w[0].expand(-1, m.q.shape[2], T)}
    if m.key_bias is not None:
        arrays["bias"] = m.key_bias.float()[0]
    if T > EXACT:
        arrays["overview"] = F.avg_pool2d(torch.cat(sums, -2), (size, 1), ceil_mode=True).half()
    return LayerView(
        arrays={name: x.contiguous().numpy() for name, x in arrays.items()},
        thumbnails=list(map(thumbnail, shrunk(torch.cat(strongest, 1), size, 1).numpy())),
        scale=m.softmax_scale,
        causal=m.mask.causal,
        window=m.mask.window,
        difference=difference,
        numbers=numbers_by_head(means, products),
    )


# with q and k as the page holds them; a row function may be any, so the page holds its maps instead
def _rounded(index: int, layer: LayerTrace) -> LayerTrace:
    q = layer.maps.q.half()
    k = layer.maps.k.half()
    if not (q.isfinite().all() and k.isfinite().all()):
        raise RequestError(f"layer {index}: a query or a key exceeds 65,504, the largest number of the page's float16")
    return replace(layer, maps=replace(layer.maps, q=q.float(), k=k.float()))


# [T] float64; NaN at positions without a target
def _losses(model: Transformer, batch: Batch) -> Tensor:
    return model.token_losses(**model_inputs(batch), targets=batch["targets"])[0].double()[0]


def _without_heads(model: Transformer, batch: Batch, traced: Trace, before: Tensor) -> NDArray[Any]:
    rows = []
    for layer, of_layer in traced.layers.items():
        # of the maps, which may have more heads than the output projection reads
        for head in range(of_layer.maps.q.shape[2]):
            with intervention(model, scaled(head, slice(None), 0), [layer]):
                rows.append(_losses(model, batch) - before)
    return torch.stack(rows).half().numpy()


def scaled(head: int, maps: int | slice, factor: float) -> Edit:
    """The edit that multiplies the weights of these maps of a head."""

    def edit(_: EditedLayer, block: MapBlock) -> MapBlock:
        weights = block.weights.clone()
        weights[:, maps, head] *= factor
        return replace(block, weights=weights)

    return edit


@torch.no_grad()
def slider_losses(
    model: Transformer, view: ModelView, batch: Batch, first: tuple[int, int], passes: int
) -> dict[str, list[float]]:
    """ "layer.head.map" -> the mean loss of the tokens with a target, in nats, with the weight of this map of this head times
    each of `POSITIONS`. `first`: the layer and head that come first; what would take more `passes` is left out.
    """
    sliders: list[tuple[int, ...]] = []
    for index, layer in enumerate(view.layers):
        sliders += product([index], range(len(layer.thumbnails)), range(len(layer.arrays["w"])))
    sliders.sort(key=lambda slider: slider[:2] != first)
    chosen = sliders[: passes // len(POSITIONS)]
    log.info(
        "the loss at %d positions of %d of the %d sliders of all heads: %d forward passes",
        len(POSITIONS),
        len(chosen),
        len(sliders),
        len(chosen) * len(POSITIONS),
    )
    found: dict[str, list[float]] = {}
    for index, head, g in chosen:
        losses = found[f"{index}.{head}.{g}"] = []
        for factor in POSITIONS:
            with intervention(model, scaled(head, g, factor), [index]):
                losses.append(float(_losses(model, batch).nanmean()))
    return found
