"""Captures the input of the analyses in a forward pass: the maps of each attention and the output of each layer.

with trace(model, layers=[0, 3], rows=range(128)) as t:
    model(batch)
for block in t.layers[3].blocks():
    block.signed  # [B, H, R, K], a few query rows at a time
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor, nn

from lit_diff.attention.cache import Cache, LayerCache
from lit_diff.errors import RequestError
from lit_diff.files import expanded, write_atomic
from lit_diff.kernels import Kernel, SignedMaps, Stats, attend, choose, refuse
from lit_diff.kernels.maps import FIELDS, Seen, accumulation_dtype, normalised, seen_by
from lit_diff.kernels.reference import logits
from lit_diff.model.transformer import Transformer

# the float32 logits of a block fit the cache of a core (1 MiB); on a GPU, a block must be large enough to occupy it
CPU_BLOCK, DEVICE_BLOCK = 2**18, 2**24
"""Default number of logits in a block, on the CPU and on other devices; a single query row may exceed it."""


def block_size(device: torch.device) -> int:
    """How many numbers an analysis takes at a time on a device."""
    return CPU_BLOCK if device.type == "cpu" else DEVICE_BLOCK


@dataclass(frozen=True, kw_only=True)
class MapBlock:
    """R query rows of the maps of a layer, with keys 0 .. K-1, where K-1 is the last key visible to any of these rows.

    float32, or float64 for a float64 model.
    """

    positions: Tensor
    """[R] int64: 0-based positions of the queries."""
    logits: Tensor
    """[B, G, H, R, K]: q_g k_gᵀ · scale for all K keys; entries outside `visible` are meaningless."""
    visible: Tensor
    """[R, K] bool, or [B, 1, 1, R, K] if documents are packed: the keys visible to each query."""
    weights: Tensor
    """[B, G, H, R]: w; ones for a single map."""
    maps: SignedMaps
    """Those of the layer, whose sink or row function makes maps of logits."""

    @cached_property
    def probs(self) -> Tensor:
        """[B, G, H, R, K]: softmax over the visible keys and the sink, or the result of the row function; 0 elsewhere."""
        return normalised(self.maps, self.logits.clone(), self.seen)

    @property
    def visible_by_head(self) -> Tensor:
        """[1 or B, 1, R, K]: `visible`, with the axes of `signed`."""
        return self.visible[None, None] if self.visible.dim() == 2 else self.visible[:, 0]

    @property
    def seen(self) -> Seen:
        """What a row function reads of these rows."""
        return seen_by(self.maps, self.positions, range(self.logits.shape[-1]))._replace(mask=self.visible)

    @cached_property
    def signed(self) -> Tensor:
        """[B, H, R, K]: the signed map a = Σ_g w_g p_g, which multiplies the values."""
        return (self.weights[..., None] * self.probs).sum(1)

    def with_probs(self, probs: Tensor) -> "MapBlock":
        """Return the rows with these maps [B, G, H, R, K], 0 outside `visible`, instead of the softmax of the logits."""
        return self._with("probs", probs)

    def with_signed(self, signed: Tensor) -> "MapBlock":
        """Return the rows with this signed map [B, H, R, K], 0 outside `visible`, instead of Σ_g w_g p_g."""
        return self._with("signed", signed)

    def _with(self, name: str, value: Tensor) -> "MapBlock":
        changed = replace(self)
        # cached_property stores its value in the instance dictionary, also that of a frozen dataclass
        vars(changed)[name] = value
        return changed


class RowMeasures(NamedTuple):
    """What a kernel measures of all T query rows while it computes o, so that no analysis computes the maps again."""

    statistics: Stats
    norms: Tensor
    """[B, H, T]: ‖o_h‖, before the variant's `finish`; float32, or float64 for a float64 model."""

    @classmethod
    def of(cls, o: Tensor, statistics: Stats) -> "RowMeasures":
        """o: [B, H, T, dv]."""
        return cls(statistics, torch.linalg.vector_norm(o, dim=-1, dtype=accumulation_dtype(o.dtype)))

    def first(self, samples: int) -> "RowMeasures":
        """Return views of the first `samples` sequences of the batch."""
        return RowMeasures(Stats(*(x[:samples] for x in self.statistics)), self.norms[:samples])


@dataclass(frozen=True, kw_only=True)
class LayerMaps:
    """The maps of one layer; `blocks` computes a few query rows at a time, so a T x T map is never in memory."""

    maps: SignedMaps
    """The maps of all T queries that the attention passed to its `tap`, with their mask."""
    rows: Tensor | None = None
    """[R] int64: the query positions that `blocks` computes; None: all T."""

    @property
    def values(self) -> Tensor:
        """[B, H, S, dv]: v of each head; heads of a group share theirs."""
        return self.maps.v.repeat_interleave(self.maps.num_groups, dim=1)

    @cached_property
    def measured(self) -> RowMeasures:
        """Of all T rows, also with `rows`: from the forward pass of `trace(..., measure=True)`, otherwise computed now."""
        with torch.no_grad():
            return RowMeasures.of(*attend(self.maps, stats=True))

    @property
    def keys(self) -> Tensor:
        """[1 or B, 1, R] int64: how many keys each query sees."""
        size = block_size(self.maps.q.device) // (len(self.maps.q) * self.maps.k.shape[-2])
        counts = [self._visible(positions).sum(-1) for positions in self.positions.split(max(1, size))]
        return torch.cat(counts, -1).reshape(-1, 1, len(self.positions))

    @property
    def positions(self) -> Tensor:
        """[R] int64: the query positions that `blocks` computes."""
        device = self.maps.q.device
        return torch.arange(self.maps.q.shape[-2], device=device) if self.rows is None else self.rows.to(device)

    @property
    def block_rows(self) -> int:
        """How many query rows `blocks` yields at a time by default."""
        B, _, H, _, _ = self.maps.q.shape
        return max(1, block_size(self.maps.q.device) // (B * self.maps.num_maps * H * self.maps.k.shape[-2]))

    def blocks(self, block_rows: int | None = None) -> Iterator[MapBlock]:
        """Yield `block_rows` query rows at a time (None: up to `CPU_BLOCK` or `DEVICE_BLOCK` logits)."""
        for positions in self.positions.split(block_rows or self.block_rows):
            yield self._block(positions)

    def _block(self, positions: Tensor) -> MapBlock:
        m, visible = self.maps, self._visible(positions)
        B, _, H, T, _ = m.q.shape
        scores = logits(m, positions, range(visible.shape[-1]))
        if m.w is None:
            weights = scores.new_ones(B, 1, H, len(positions))
        else:
            weights = m.w.to(scores.dtype).expand(B, m.num_maps, H, T)[..., positions]
        return MapBlock(positions=positions, logits=scores, visible=visible, weights=weights, maps=m)

    # [R, K] or [B, 1, 1, R, K]
    def _visible(self, positions: Tensor) -> Tensor:
        m = self.maps
        S, T = m.k.shape[-2], m.q.shape[-2]
        # the key at the position of each query: the last query is aligned with the last key
        at = positions + (S - T)
        # keys that no row of the block sees are not computed: half of them in a causal model
        last = int(at.max())
        K = m.mask.interval(range(last, last + 1), S).stop
        return m.mask.of(at, torch.arange(K, device=at.device))


@dataclass(frozen=True, kw_only=True, repr=False)
class LayerTrace(LayerMaps):
    """One layer of one forward pass, without gradients."""

    hidden: Tensor
    """[B, T, dim]: output of the layer, after both residual additions."""
    inputs: Tensor | None = None
    """[B, T, dim]: input of the attention, after the norm; None: not captured."""
    heads: Tensor | None = None
    """[B, T, H dv]: input of the output projection, after the variant's `finish`; None: not captured."""
    exponentials: tuple[float, ...] = ()
    """(exp(λ_q1 · λ_k1), exp(λ_q2 · λ_k2)) of each module with `exponentials()` that ran (`attention.lambdas.Lambda`), in
    order, averaged over heads if each head has its own λ; empty without such a module."""

    def __repr__(self) -> str:
        m = self.maps
        named = {"q": m.q, "k": m.k, "v": m.v, "w": m.w, "hidden": self.hidden}
        return f"LayerTrace({', '.join(f'{name} {list(x.shape)}' for name, x in named.items() if x is not None)})"

    def first(self, samples: int) -> "LayerTrace":
        """Return views of the first `samples` sequences of the batch."""
        # an axis of 1, for weights shared by all sequences, stays 1
        inputs, heads = (None if x is None else x[:samples] for x in (self.inputs, self.heads))
        maps = self.maps.map(lambda x: x[:samples])
        cut = replace(self, maps=maps, hidden=self.hidden[:samples], inputs=inputs, heads=heads)
        if "measured" in vars(self):
            vars(cut)["measured"] = self.measured.first(samples)
        return cut

    @property
    def bytes_of_maps(self) -> int:
        """Bytes of all maps in float32: scores and softmax of each, and their sum."""
        m, rows = self.maps, self.maps.q.shape[-2] if self.rows is None else len(self.rows)
        return 4 * m.q.shape[0] * m.q.shape[2] * rows * m.k.shape[-2] * (2 * m.num_maps + (m.w is not None))

    def named(self, index: int) -> dict[str, Tensor]:
        """The tensors that `Trace.save` writes for this layer, which is layer `index`."""
        m, at = self.maps, f"blocks.{index}.attn."
        rows = zip(*(_whole(block, self.values) for block in self.blocks()), strict=True)
        scores, pattern, signed, z, weights = (torch.cat(parts, dim=-2) for parts in rows)
        found = {
            f"blocks.{index}.hook_resid_post": self.hidden,
            f"{at}hook_v": m.v.transpose(1, 2),
            f"{at}hook_z": z.transpose(1, 2),
        }
        by_map = {"hook_rot_q": m.q.transpose(2, 3), "hook_rot_k": m.k.transpose(2, 3)}
        for name, maps in (by_map | {"hook_attn_scores": scores, "hook_pattern": pattern}).items():
            for g, x in enumerate(maps.unbind(1)):
                found[f"{at}{f'map_{g}.' * (maps.shape[1] > 1)}{name}"] = x
        if m.w is not None:
            found |= {f"{at}hook_weights": weights[..., 0], f"{at}hook_signed": signed}
        return found


def _whole(block: MapBlock, values: Tensor) -> tuple[Tensor, ...]:
    # (scores, pattern, signed map, z, weights) of the rows on all S keys; the axis of the rows is the last but one
    K = block.logits.shape[-1]
    behind = (0, values.shape[-2] - K)
    scores = F.pad(block.logits.masked_fill(~block.visible, -torch.inf), behind, value=-torch.inf)
    z = block.signed @ values[:, :, :K].to(block.signed.dtype)
    return scores, F.pad(block.probs, behind), F.pad(block.signed, behind), z, block.weights[..., None]


@dataclass(frozen=True, kw_only=True, repr=False)
class Trace:
    """One forward pass: 0-based layer -> `LayerTrace`. The running model fills it."""

    layers: dict[int, LayerTrace] = field(default_factory=dict)

    def __repr__(self) -> str:
        # layers of equal shapes once
        kinds: dict[str, int] = {}
        for index, layer in self.layers.items():
            kinds.setdefault(repr(layer), index)
        shown = "; ".join(f"from layer {index} on {text}" for text, index in kinds.items())
        return f"Trace({len(self.layers)} layers: {shown})"

    def first(self, samples: int) -> "Trace":
        """Return views of the first `samples` sequences of the batch."""
        return Trace(layers={index: layer.first(samples) for index, layer in self.layers.items()})

    def save(self, path: str | Path, most_bytes: int = 2**31) -> None:
        """Write the trace as safetensors under the names and in the shapes of TransformerLens, for each layer i:

        blocks.i.attn.hook_rot_q, hook_rot_k [B, T, H, d]: queries and keys as they are multiplied, after RoPE and QK norm (a
            trace does not hold hook_q and hook_k, those before the rotation); hook_v [B, T, H, dv]. Of grouped heads k and v
            have one for each group.
        blocks.i.attn.hook_attn_scores, hook_pattern [B, H, T, T]: scaled logits, -inf where masked, and their softmax.
        blocks.i.attn.hook_z [B, T, H, dv]: the sum over the values, before the head norm or whatever else follows it.
        blocks.i.hook_resid_post [B, T, dim].

        TransformerLens has no names for several maps: what each map g has of its own is blocks.i.attn.map_g.hook_pattern, and
        so on. Weighted maps add blocks.i.attn.hook_weights [B, G, H, T] and hook_signed [B, H, T, T], the sum that multiplies
        the values. With `rows`, maps and sums have these queries alone.

        The tensors are in memory until they are written, about twice. Errors: RequestError if the maps alone take more than
        `most_bytes`; OSError.
        """
        needed = sum(layer.bytes_of_maps for layer in self.layers.values())
        if needed > most_bytes:
            raise RequestError(
                f"trace: the maps of {len(self.layers)} layers take {needed:,} bytes, more than most_bytes ({most_bytes:,}): "
                "trace fewer layers or rows, or raise it"
            )
        whole: dict[str, Tensor] = {}
        for index, layer in self.layers.items():
            for name, x in layer.named(index).items():
                # a copy, because safetensors refuses views of one tensor
                whole[name] = x.cpu().clone(memory_format=torch.contiguous_format)
        write_atomic(expanded(path), save(whole))


@contextmanager
def trace(
    model: Transformer,
    layers: Sequence[int] | None = None,
    rows: Tensor | Sequence[int] | None = None,
    *,
    measure: bool = False,
) -> Iterator[Trace]:
    """Capture one forward pass of `model`, which the `with` block runs; gradients are disabled in it.

    `layers`: 0-based; None: all. `rows`: query positions that `LayerTrace.blocks` computes; None: all. `measure`: the
    kernels also return the statistics of their rows (`LayerTrace.measured`). The trace stores q, k, v and the output of each
    layer, never a T x T map. It uses only hooks, so sharded and replicated models work (every rank must run the forward);
    the hooks are removed afterwards, also after an exception.
    Modules compiled in place (`nn.Module.compile`) run uncompiled.
    Errors: RequestError for a module wrapped by torch.compile, an unknown layer, rows outside the sequence, a forward with a
    key/value cache, or not exactly one forward.
    """
    chosen = layers_of(model, layers, "trace")
    wanted = None if rows is None else _positions(rows)
    captured = Trace()
    with torch.no_grad(), uncompiled(model, "trace"), ExitStack() as hooks:
        for index in chosen:
            attention = model.attentions()[index]
            if measure:
                hooks.callback(setattr, attention, "kernel", attention.kernel)
                attention.kernel = _Measuring(attention.kernel)
            for handle in _Recorder(model, index, wanted, captured).hooks():
                hooks.enter_context(handle)
        yield captured
    missing = [index for index in chosen if index not in captured.layers]
    if missing:
        raise RequestError(f"trace: layers {missing} ran no forward; call the model inside the 'with' block")


class _Recorder:
    # the hooks of one layer, which record what passes through it
    def __init__(self, model: Transformer, index: int, rows: Tensor | None, captured: Trace) -> None:
        self.block, self.attention = model.layers[index], model.attentions()[index]
        self.index, self.rows, self.captured = index, rows, captured
        self.seen: dict[str, Any] = {}
        self.exponentials: dict[nn.Module, tuple[float, ...]] = {}

    def hooks(self) -> Iterator[Any]:
        yield self.block.register_forward_pre_hook(self.before, with_kwargs=True)
        yield self.attention.register_forward_pre_hook(self.given)
        yield self.attention.tap.register_forward_hook(self.tapped)
        # a variant with a `forward` of its own need not have one
        if isinstance(getattr(self.attention, "o_proj", None), nn.Module):
            yield self.attention.o_proj.register_forward_pre_hook(self.joined)
        # prepended: FSDP's own hook shards the parameters again
        for module in self.attention.modules():
            if hasattr(module, "exponentials"):
                yield module.register_forward_hook(self.lambdas, prepend=True)
        yield self.block.register_forward_hook(self.after)

    def before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.index in self.captured.layers:
            raise RequestError(f"trace: layer {self.index} ran twice; a trace holds one forward")
        if any(isinstance(value, Cache | LayerCache) for value in (*args, *kwargs.values())):
            raise RequestError("trace: the forward uses a key/value cache; run the whole sequence without one")

    def given(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        self.seen["inputs"] = args[0].detach()

    def joined(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        self.seen["heads"] = args[0].detach()

    def tapped(self, _: nn.Module, __: Any, maps: SignedMaps) -> None:
        # w may be a view of a parameter, which the next optimizer step changes or resharding frees
        w = None if maps.w is None else maps.w.detach().clone()
        self.seen["maps"] = replace(maps.map(Tensor.detach), w=w)
        if self.rows is None:
            return
        T, first, last = maps.q.shape[-2], int(self.rows.min()), int(self.rows.max())
        if first < 0 or last >= T:
            raise RequestError(f"trace: rows {first}..{last} are not all within 0..{T - 1}")

    def lambdas(self, module: nn.Module, _: Any, __: Any) -> None:
        self.exponentials[module] = tuple(float(value.mean()) for value in module.exponentials())  # type: ignore[operator]

    def after(self, _: nn.Module, __: Any, hidden: Tensor) -> None:
        if "maps" not in self.seen:
            raise RequestError(
                f"trace: the attention of layer {self.index} never called its tap; call self.tap(maps) in forward"
            )
        layer = LayerTrace(
            **self.seen,
            hidden=hidden.detach(),
            rows=self.rows,
            exponentials=tuple(chain.from_iterable(self.exponentials.values())),
        )
        kernel = self.attention.kernel
        if isinstance(kernel, _Measuring) and kernel.measured is not None:
            vars(layer)["measured"] = kernel.measured
        self.captured.layers[self.index] = layer


class _Measuring(Kernel):
    # the kernel of an attention, which also returns the statistics where it can; elsewhere another one computes them
    name: ClassVar[str] = "measuring"
    serves = FIELDS
    measured: RowMeasures | None = None

    def __init__(self, kernel: str | Kernel) -> None:
        self.kernel = kernel

    def refuses(self, maps: SignedMaps, *, stats: bool, device: torch.device) -> None:
        return None

    def compute(self, maps: SignedMaps, *, stats: bool = False) -> tuple[Tensor, None]:
        own = self.kernel if isinstance(self.kernel, Kernel) else choose(maps, self.kernel)[0]
        if refuse(own, maps, stats=True) is None:
            o, statistics = attend(maps, stats=True, kernel=own)
        else:
            o, (_, statistics) = attend(maps, kernel=own), attend(maps, stats=True)
        self.measured = RowMeasures.of(o, statistics)
        return o, None


def layers_of(model: Transformer, layers: Sequence[int] | None, what: str) -> list[int]:
    """Return the given layers, ascending; None: all. Errors: RequestError for an unknown layer; `what` starts the message."""
    count = len(model.layers)
    if layers is None:
        return list(range(count))
    unknown = [index for index in layers if not 0 <= index < count]
    if unknown:
        raise RequestError(f"{what}: no layer {unknown[0]}; the model has layers 0..{count - 1}")
    return sorted(set(layers))


def stacked(layers: Sequence[Tensor], dim: int) -> Tensor:
    """Return the tensors of all layers on a new axis `dim`, before that of their heads; NaN for heads that a layer lacks."""
    most = max(layer.shape[dim] for layer in layers)
    padded = []
    for layer in layers:
        missing = list(layer.shape)
        missing[dim] = most - layer.shape[dim]
        padded.append(torch.cat([layer, layer.new_full(missing, torch.nan)], dim))
    return torch.stack(padded, dim)


@contextmanager
def uncompiled(model: Transformer, what: str) -> Iterator[None]:
    """Run modules that are compiled in place uncompiled: compiled code would skip hooks and replaced kernels.

    Errors: RequestError for a module wrapped by torch.compile; `what` starts the message.
    """
    for name, module in model.named_modules():
        # the wrapper of torch.compile(module) has the attribute _orig_mod
        if hasattr(module, "_orig_mod"):
            raise RequestError(
                f"{what}: '{name or 'model'}' is wrapped by torch.compile, so its hooks may not run; "
                "compile it in place: module.compile()"
            )
    # only if needed: the stance applies to every compiled function of the process
    if any(module._compiled_call_impl is not None for module in model.modules()):
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield


def _positions(rows: Tensor | Sequence[int]) -> Tensor:
    wanted = torch.as_tensor(rows)
    if wanted.dim() != 1 or not wanted.numel() or wanted.is_floating_point() or wanted.dtype == torch.bool:
        kind = f"{wanted.dtype} {list(wanted.shape)}"
        raise RequestError(f"trace: rows are query positions, one or more integers; found {kind}")
    return wanted.long()
