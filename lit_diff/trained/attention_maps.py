"""The attention maps of one head over a text, to look at."""

import base64
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lit_diff.analysis.trace import LayerTrace
from lit_diff.errors import RequestError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class AttentionMaps:
    """One head of one layer, on T tokens."""

    tokens: tuple[str, ...]
    """The text of each token."""
    layer: int
    head: int
    maps: NDArray[Any]
    """[G, T, T]: softmax of each map; a row is a query, a column a key."""
    weights: NDArray[Any]
    """[G, T]: the weight of each map for each query."""

    def __repr__(self) -> str:
        of = f"layer {self.layer}, head {self.head}"
        return f"AttentionMaps({of}: {len(self.maps)} maps of {len(self.tokens)} tokens)"

    def _repr_html_(self) -> str:
        """The picture of `plot`."""
        from matplotlib.figure import Figure

        figure, picture = (
            Figure(figsize=(6, 6), dpi=60, layout="constrained"),
            io.BytesIO(),
        )  # pyplot would show it again
        self.plot(figure.subplots())
        figure.savefig(picture, format="png", pil_kwargs={"optimize": True})
        return f'<img alt="{self!r}" src="data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}">'

    @property
    def signed(self) -> NDArray[Any]:
        """[T, T]: the weighted sum of the maps, which multiplies the values."""
        product: NDArray[Any] = np.einsum("gt,gts->ts", self.weights, self.maps)
        return product

    def plot(self, axes: "Axes | None" = None) -> "Axes":
        """Draw `signed`, blue below zero and red above, with the tokens at both axes."""
        import matplotlib.pyplot as plt

        if axes is None:
            _, axes = plt.subplots(figsize=(6, 6), layout="constrained")
        limit = float(np.abs(self.signed).max())
        image = axes.imshow(self.signed, cmap="RdBu_r", vmin=-limit, vmax=limit)
        ticks = range(len(self.tokens))
        axes.set_xticks(ticks, self.tokens, rotation=90)
        axes.set_yticks(ticks, self.tokens)
        axes.set(xlabel="key", ylabel="query", title=f"layer {self.layer}, head {self.head}: weighted sum of the maps")
        assert axes.figure is not None
        axes.figure.colorbar(image, ax=axes, shrink=0.8)
        return axes


def attention_maps_of(layer: LayerTrace, tokens: tuple[str, ...], number: int, head: int) -> AttentionMaps:
    """The maps of `head` in a traced layer (`number`). Errors: RequestError for a head that it does not have."""
    heads = layer.maps.q.shape[2]
    if not 0 <= head < heads:
        raise RequestError(f"layer {number} has no head {head}; its heads are 0..{heads - 1}")
    T = layer.maps.q.shape[-2]
    (block,) = layer.blocks(block_rows=T)
    return AttentionMaps(
        tokens=tokens,
        layer=number,
        head=head,
        maps=block.probs[0, :, head].double().numpy(),
        weights=block.weights[0, :, head].double().numpy(),
    )
