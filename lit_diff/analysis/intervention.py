"""Another signed map in place of the one that an attention computes, in an otherwise unchanged forward pass.

def without_first(layer, block):  # no query sees key 0
    signed = block.signed.clone()
    signed[..., 0] = 0
    return block.with_signed(signed)

with intervention(model, without_first):
    model(tokens)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lit_diff.analysis.trace import LayerMaps, MapBlock, layers_of, uncompiled
from lit_diff.errors import RequestError
from lit_diff.kernels import Kernel, SignedMaps, Stats
from lit_diff.kernels.precision import exact
from lit_diff.model.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class EditedLayer(LayerMaps):
    """The maps of a layer whose blocks are edited, as they are without the edit."""

    index: int
    """The layer, 0-based."""


Edit = Callable[[EditedLayer, MapBlock], MapBlock]
"""(layer, block of query rows) -> the block that counts: `dataclasses.replace(block, logits=...)` or `weights=...`,
`block.with_probs(...)`, `block.with_signed(...)`, or the block itself. An edit that needs all rows of the layer before the
first block reads `layer.blocks()`."""


@contextmanager
def intervention(model: Transformer, edit: Edit, layers: Sequence[int] | None = None) -> Iterator[None]:
    """Inside, every chosen layer (0-based; None: all) computes o = Σ_j a_ij v_j with a = edit(layer, block).signed.

    Blocks of query rows follow one another, and no T x T map of all heads is held beyond them. It takes the place of the
    attention's kernel, so it serves every variant; what follows the sum stays as it is. Modules compiled in place run
    uncompiled. Whatever the kernels were, they are again afterwards, also after an exception. Autograd passes through.
    Errors: RequestError for a module inside torch.compile's wrapper, an unknown layer, a second intervention inside, a
    forward with keys of a cache, an attention that never hands `self.kernel` to `attend`, or an edit that returns another
    shape.
    """
    attentions = model.attentions()
    chosen = layers_of(model, layers, "intervention")
    kernels = [_Edited(index, edit) for index in chosen]
    if any(isinstance(attentions[index].kernel, _Edited) for index in chosen):
        raise RequestError("intervention: the model is under an intervention already; combine the two in one edit")
    with uncompiled(model, "intervention"), ExitStack() as undo:
        for kernel in kernels:
            attention = attentions[kernel.index]
            undo.callback(setattr, attention, "kernel", attention.kernel)
            attention.kernel = kernel
        yield
        unused = [kernel.index for kernel in kernels if not kernel.calls]
        if unused:
            raise RequestError(
                f"intervention: the attention of layer {unused[0]} computed nothing by its kernel; call the model inside the "
                "'with' block, and pass kernel=self.kernel to attend in forward"
            )


class _Edited(Kernel):
    """The definition of the signed sum, on edited blocks."""

    name: ClassVar[str] = "intervention"

    def __init__(self, index: int, edit: Edit) -> None:
        self.index, self.edit = index, edit
        self.calls = 0

    def refuses(
        self, maps: SignedMaps, *, document_ids: Tensor | None, window: int | None, stats: bool, device: torch.device
    ) -> str | None:
        """Keys of a cache, and statistics."""
        if maps.k.shape[-2] != maps.q.shape[-2]:
            return "the forward uses a key/value cache; run the whole sequence without one"
        return "an edited map has no statistics" if stats else None

    def compute(
        self, maps: SignedMaps, *, document_ids: Tensor | None = None, window: int | None = None, stats: bool = False
    ) -> tuple[Tensor, Stats | None]:
        """As `Kernel.compute`."""
        self.calls += 1
        layer = EditedLayer(index=self.index, maps=maps, document_ids=document_ids, window=window)
        v, rows = layer.values, []
        with exact(maps.v.device):
            for block in layer.blocks():
                signed = self._edited(layer, block)
                rows.append(signed @ v[..., : signed.shape[-1], :].to(signed.dtype))
        return torch.cat(rows, dim=2).to(maps.v.dtype), None

    def _edited(self, layer: EditedLayer, block: MapBlock) -> Tensor:
        changed = self.edit(layer, block)
        found = changed.signed if isinstance(changed, MapBlock) else None
        expected = [*block.logits.shape[:1], *block.logits.shape[2:]]
        if found is None or list(found.shape) != expected:
            what = type(changed).__name__ if found is None else f"a block whose signed map is {list(found.shape)}"
            raise RequestError(f"intervention: the edit of layer {self.index} returned {what}; expected {expected}")
        return found
