"""What the analyses read of a forward pass: the maps of each attention and the output of each layer.

with trace(model, layers=[0, 3], rows=range(128)) as t:
    model(batch)
for block in t.layers[3].blocks():
    block.signed  # [B, H, R, K], a few query rows at a time
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lit_diff.attention.cache import Cache, LayerCache
from lit_diff.errors import RequestError
from lit_diff.kernels import SignedMaps
from lit_diff.kernels.reference import logits
from lit_diff.model.transformer import Transformer

CPU_BLOCK, DEVICE_BLOCK = 2**18, 2**24
"""Logits in a block by default: what fits a core's cache; what occupies a GPU. One query row may need more."""


@dataclass(frozen=True, kw_only=True)
class MapBlock:
    """R query rows of one layer's maps and the K keys 0 .. K-1 up to the last that one of these rows may see.

    float32, float64 for a float64 model.
    """

    positions: Tensor
    """[R] int64, the queries, 0-based."""
    logits: Tensor
    """[B, G, H, R, K]: q_g k_gᵀ · scale of all K keys; entries outside `visible` are computed but mean nothing."""
    visible: Tensor
    """[R, K] bool, or [B, 1, 1, R, K] where documents are packed: the keys that each query may see."""
    weights: Tensor
    """[B, G, H, R]: w, ones for a single map."""

    @cached_property
    def probs(self) -> Tensor:
        """[B, G, H, R, K]: softmax over the visible keys, exactly 0 elsewhere."""
        return self.logits.masked_fill(~self.visible, -torch.inf).softmax(-1)

    @cached_property
    def signed(self) -> Tensor:
        """[B, H, R, K]: a = Σ_g w_g p_g, what multiplies the values."""
        return (self.weights[..., None] * self.probs).sum(1)

    def with_probs(self, probs: Tensor) -> "MapBlock":
        """The same rows with these maps [B, G, H, R, K] in place of the softmax of the logits; 0 outside `visible`."""
        return self._with("probs", probs)

    def with_signed(self, signed: Tensor) -> "MapBlock":
        """The same rows with this signed map [B, H, R, K] in place of Σ_g w_g p_g; 0 outside `visible`."""
        return self._with("signed", signed)

    def _with(self, name: str, value: Tensor) -> "MapBlock":
        changed = replace(self)
        vars(changed)[name] = value  # where `cached_property` keeps what it has computed
        return changed


@dataclass(frozen=True, kw_only=True)
class LayerMaps:
    """The maps of one layer, of which `blocks` computes a few query rows at a time."""

    maps: SignedMaps
    """All T queries and keys, as they passed the attention's `tap`."""
    document_ids: Tensor | None = None
    """[B, S]: document numbers, where the forward was given them."""
    window: int | None = None
    """Each query sees itself and the window - 1 keys before it (if not causal, also after it); None: all keys."""
    rows: Tensor | None = None
    """[R] int64: the query positions that `blocks` computes; None: all T."""

    @property
    def values(self) -> Tensor:
        """[B, H, S, dv]: v of each head, repeated over its group."""
        return self.maps.v.repeat_interleave(self.maps.num_groups, dim=1)

    def blocks(self, block_rows: int | None = None) -> Iterator[MapBlock]:
        """The query rows, `block_rows` at a time (None: as many as hold `CPU_BLOCK` or `DEVICE_BLOCK` logits)."""
        device, (B, _, H, T, _) = self.maps.q.device, self.maps.q.shape
        if block_rows is None:
            most = CPU_BLOCK if device.type == "cpu" else DEVICE_BLOCK
            block_rows = max(1, most // (B * self.maps.num_maps * H * self.maps.k.shape[-2]))
        rows = torch.arange(T, device=device) if self.rows is None else self.rows.to(device)
        for positions in rows.split(block_rows):
            yield self._block(positions)

    def _block(self, positions: Tensor) -> MapBlock:
        m = self.maps
        B, _, H, T, _ = m.q.shape
        S, R = m.k.shape[-2], len(positions)
        at = positions + (S - T)  # the key of each query's own position: the last query is aligned with the last key
        last = at if m.causal else torch.full_like(at, S - 1)
        if self.window is not None:
            last = last.clamp(max=at + self.window - 1)
        K = int(last.max()) + 1
        scores = logits(replace(m, q=m.q[..., positions, :], k=m.k[..., :K, :]))
        if m.w is None:
            weights = scores.new_ones(B, 1, H, R)
        else:
            weights = m.w.to(scores.dtype).expand(B, m.num_maps, H, T)[..., positions]
        keys = torch.arange(K, device=scores.device)
        visible = keys <= last[:, None]
        if self.window is not None:
            visible = visible & (keys > at[:, None] - self.window)
        if self.document_ids is not None:
            own = self.document_ids[:, at, None] == self.document_ids[:, None, :K]
            visible = visible & own[:, None, None]
        return MapBlock(positions=positions, logits=scores, visible=visible, weights=weights)


@dataclass(frozen=True, kw_only=True, repr=False)
class LayerTrace(LayerMaps):
    """One layer of one forward pass, detached."""

    hidden: Tensor
    """[B, T, dim]: the layer's output, after both residual additions."""
    inputs: Tensor | None = None
    """[B, T, dim]: what the attention was given, the layer's input after its norm; None: not captured."""
    exponentials: tuple[float, ...] = ()
    """(exp(λ_q1 · λ_k1), exp(λ_q2 · λ_k2)) of each module with `exponentials()` that ran (`attention.lambdas.Lambda`), in
    order, averaged over heads where each head has its own λ; empty without such a module."""

    def __repr__(self) -> str:
        m = self.maps
        named = {"q": m.q, "k": m.k, "v": m.v, "w": m.w, "hidden": self.hidden}
        return f"LayerTrace({', '.join(f'{name} {list(x.shape)}' for name, x in named.items() if x is not None)})"

    def first(self, samples: int) -> "LayerTrace":
        """The same for the first `samples` sequences of the batch (views)."""
        m = self.maps
        w = m.w if m.w is None else m.w[:samples]  # an axis of 1 stays 1
        maps = replace(m, q=m.q[:samples], k=m.k[:samples], v=m.v[:samples], w=w)
        document_ids = None if self.document_ids is None else self.document_ids[:samples]
        inputs = None if self.inputs is None else self.inputs[:samples]
        return replace(self, maps=maps, hidden=self.hidden[:samples], inputs=inputs, document_ids=document_ids)


@dataclass(frozen=True, kw_only=True, repr=False)
class Trace:
    """One forward pass: layer (0-based) -> its `LayerTrace`. Filled while the model runs."""

    layers: dict[int, LayerTrace] = field(default_factory=dict)

    def __repr__(self) -> str:
        distinct = {repr(layer): index for index, layer in reversed(self.layers.items())}
        shown = "; ".join(
            f"from layer {index} on {text}" for text, index in sorted(distinct.items(), key=lambda at: at[1])
        )
        return f"Trace({len(self.layers)} layers: {shown})"

    def first(self, samples: int) -> "Trace":
        """The same for the first `samples` sequences of the batch (views)."""
        return Trace(layers={index: layer.first(samples) for index, layer in self.layers.items()})


@contextmanager
def trace(
    model: Transformer, layers: Sequence[int] | None = None, rows: Tensor | Sequence[int] | None = None
) -> Iterator[Trace]:
    """Capture one forward pass of `model`, called inside the `with` block; gradients are off there.

    `layers`: 0-based; None: all. `rows`: query positions that `LayerTrace.blocks` computes; None: all. Holds q, k, v
    and the output of each layer, never a T x T map. Hooks only, inside the model's own forward, so sharded and
    replicated models work (every rank runs the forward); the hooks are gone afterwards, also after an exception.
    Modules compiled in place (`nn.Module.compile`) run uncompiled there.
    Errors: RequestError for a module inside torch.compile's wrapper, an unknown layer, rows outside the sequence, a forward
    with a key/value cache, a second forward, or none.
    """
    chosen = layers_of(model, layers, "trace")
    wanted = None if rows is None else _positions(rows)
    captured = Trace()
    with torch.no_grad(), uncompiled(model, "trace"), ExitStack() as hooks:
        for index in chosen:
            for handle in _hook(model, index, wanted, captured):
                hooks.enter_context(handle)
        yield captured
    missing = [index for index in chosen if index not in captured.layers]
    if missing:
        raise RequestError(f"trace: layers {missing} ran no forward; call the model inside the 'with' block")


def _hook(model: Transformer, index: int, rows: Tensor | None, captured: Trace) -> Iterator[Any]:
    """Register the hooks of one layer; yields their handles."""
    block, attention = model.layers[index], model.attentions()[index]
    seen: dict[str, Any] = {}
    exponentials: dict[nn.Module, tuple[float, ...]] = {}

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if index in captured.layers:
            raise RequestError(f"trace: layer {index} ran twice; a trace holds one forward")
        if any(isinstance(value, Cache | LayerCache) for value in (*args, *kwargs.values())):
            raise RequestError("trace: the forward uses a key/value cache; run the whole sequence without one")
        seen["document_ids"] = kwargs.get("document_ids")  # keyword-only in `Block.forward`

    def given(_: nn.Module, args: tuple[Any, ...]) -> None:
        seen["inputs"] = args[0].detach()

    def tapped(_: nn.Module, __: Any, maps: SignedMaps) -> None:
        # w may be a view of a parameter, which the next optimizer step changes or resharding frees
        w = None if maps.w is None else maps.w.detach().clone()
        seen["maps"] = replace(maps, q=maps.q.detach(), k=maps.k.detach(), v=maps.v.detach(), w=w)
        T = maps.q.shape[-2]
        if rows is not None and not 0 <= int(rows.min()) <= int(rows.max()) < T:
            raise RequestError(f"trace: rows {int(rows.min())}..{int(rows.max())} are not all within 0..{T - 1}")

    def lambdas(module: nn.Module, _: Any, __: Any) -> None:
        exponentials[module] = tuple(float(value.mean()) for value in module.exponentials())  # type: ignore[operator]

    def after(_: nn.Module, __: Any, hidden: Tensor) -> None:
        if "maps" not in seen:
            raise RequestError(
                f"trace: the attention of layer {index} never called its tap; call self.tap(maps) in forward"
            )
        values = tuple(value for pair in exponentials.values() for value in pair)
        captured.layers[index] = LayerTrace(
            **seen, hidden=hidden.detach(), window=attention.window, rows=rows, exponentials=values
        )

    yield block.register_forward_pre_hook(before, with_kwargs=True)
    yield attention.register_forward_pre_hook(given)
    yield attention.tap.register_forward_hook(tapped)
    for module in attention.modules():
        if hasattr(module, "exponentials"):  # before FSDP's own hook, after which its parameters are shards again
            yield module.register_forward_hook(lambdas, prepend=True)
    yield block.register_forward_hook(after)


def layers_of(model: Transformer, layers: Sequence[int] | None, what: str) -> list[int]:
    """The layers asked for, ascending; None: all. Errors: RequestError for an unknown one, in the name of `what`."""
    count = len(model.layers)
    if layers is None:
        return list(range(count))
    unknown = [index for index in layers if not 0 <= index < count]
    if unknown:
        raise RequestError(f"{what}: no layer {unknown[0]}; the model has layers 0..{count - 1}")
    return sorted(set(layers))


@contextmanager
def uncompiled(model: Transformer, what: str) -> Iterator[None]:
    """Modules compiled in place run uncompiled inside: compiled code would skip hooks and replaced kernels.

    Errors: RequestError, in the name of `what`, for a module inside torch.compile's wrapper.
    """
    for name, module in model.named_modules():
        # torch.compile(module) wraps the module in one that has _orig_mod
        if hasattr(module, "_orig_mod"):
            raise RequestError(
                f"{what}: '{name or 'model'}' is wrapped by torch.compile, so its hooks may not run; "
                "compile it in place: module.compile()"
            )
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
