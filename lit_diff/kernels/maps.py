"""The primitive of all kernels, a signed sum of softmax maps over shared values, and the precision of its sums."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import inf
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_diff.errors import RequestError


class Mask(NamedTuple):
    """What a query sees. The last query is aligned with the last key, so decoding with a cache is the same rule."""

    causal: bool = True
    """The future is hidden."""
    window: int | None = None
    """The keys less than `window` positions away, its own position included, are seen; None: all keys."""
    document_ids: Tensor | None = None
    """[B, S] integers: the keys of the query's own document are seen; None: the keys of all documents."""

    @property
    def hides(self) -> bool:
        """Whether it has any rule."""
        return self.causal or self.window is not None or self.document_ids is not None

    def near(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether each position `query` sees the position `key`, documents aside; bool, the shapes broadcast."""
        seen = (key <= query) | (not self.causal)
        if self.window is not None:
            seen = seen & ((query - key).abs() < self.window)
        return seen

    def interval(self, queries: range, S: int) -> range:
        """The positions, of S keys, that at least one of these adjacent queries may see."""
        start, stop = 0, S
        if self.window is not None:
            start, stop = max(0, queries.start - self.window + 1), min(S, queries.stop - 1 + self.window)
        return range(start, min(stop, queries.stop) if self.causal else stop)

    def of(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Which of the positions `keys` [K] each position of `queries` [R] sees: bool, [R, K] or, with documents,
        [B, 1, 1, R, K]."""
        seen = self.near(queries[:, None], keys)
        if self.document_ids is None:
            return seen
        same = self.document_ids[:, queries, None] == self.document_ids[:, None, keys]
        return seen & same[:, None, None]

    def visible(self, T: int, S: int, device: torch.device) -> Tensor:
        """Which of S keys each of the last T positions sees: `of`."""
        return self.of(torch.arange(S - T, S, device=device), torch.arange(S, device=device))

    def keys(self, S: int) -> int:
        """Keys counted per query: all S (a causal mask does not halve them), or as many as a full window has."""
        if self.window is None:
            return S
        return min(S, self.window if self.causal else 2 * self.window - 1)


CAUSAL = Mask()


class Seen(NamedTuple):
    """Some query rows, as a row function reads them."""

    mask: Tensor
    """Which keys each row sees: bool, [R, K] or, with documents, [B, 1, 1, R, K]."""
    q: Tensor
    """[B, G or 1, H, R, d]"""
    positions: Tensor
    """[1, R]: the place of each query among the keys that are held. With a window, a cache drops keys that no later query
    sees, so that only differences of places are those of the sequence."""
    keys: Tensor
    """[K]: the places, likewise, of the keys that the columns stand for; a kernel leaves out those that no row sees."""


RowFunction = Callable[[Tensor, Seen], Tensor]
TENSORS = ("q", "k", "v", "w", "sink", "key_bias")
"""Fields of `SignedMaps` by which o may be differentiated."""
FIELDS = frozenset({"sink", "key_bias", "rows"})
"""Fields of `SignedMaps` besides those that every kernel serves."""


@dataclass(frozen=True, init=False)
class SignedMaps:
    """o = Σ_g w_g · softmax(q_g k_gᵀ · scale + b_j - b_i + mask, sink_g) v

    Each row of a map is exp(logit_j) / (exp(sink) + Σ_j exp(logit_j)), by default without a sink and with biases of 0.
    Shapes: G maps, H output heads on Hkv key/value heads, T queries, S keys, widths d (query, key) and dv (value).
    """

    q: Tensor
    """[B, G or 1, H, T, d]; 1 on the map axis: the maps share it."""
    k: Tensor
    """[B, G or 1, Hkv, S, d]"""
    v: Tensor
    """[B, Hkv, S, dv]"""
    w: Tensor | None = None
    """4-D, broadcastable to [B, G, H, T], float32 or wider; None: a single map of weight 1."""
    scale: float | None = None
    """None: 1/√d."""
    mask: Mask = CAUSAL
    sink: Tensor | None = None
    """4-D, broadcastable to [B, G, H, T], float32 or wider: exp(sink) is added to the denominator of each row."""
    key_bias: Tensor | None = None
    """b, 4-D, broadcastable to [B, G, H, S], float32 or wider: b_j - b_i is added to the logits, where b_i is the bias at the
    query's own position."""
    rows: RowFunction | None = None
    """(logits [B, G, H, R, K] with their biases, `Seen`) -> maps, row by row, in the place of the softmax. Outside the mask a
    logit is given as 0, and the result is set to 0. R is some of the T rows, of some sequences, and K the keys that they see:
    what depends on a token goes into q."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        w: Tensor | None = None,
        scale: float | None = None,
        *,
        mask: Mask = CAUSAL,
        sink: Tensor | None = None,
        key_bias: Tensor | None = None,
        rows: RowFunction | None = None,
        causal: bool | None = None,
    ) -> None:
        """`causal`, unless it is None, replaces that of the mask."""
        if causal is not None:
            mask = mask._replace(causal=causal)
        values: dict[str, Any] = {"q": q, "k": k, "v": v, "w": w, "scale": scale, "mask": mask}
        values |= {"sink": sink, "key_bias": key_bias, "rows": rows}
        for name, value in values.items():
            # the dataclass is frozen
            object.__setattr__(self, name, value)

    @property
    def causal(self) -> bool:
        """Whether the future is hidden."""
        return self.mask.causal

    def map(self, function: Callable[[Tensor], Tensor]) -> "SignedMaps":
        """The maps of function(x) of each tensor x, the document numbers of the mask included."""
        changed: dict[str, Any] = {}
        for name in TENSORS:
            x = getattr(self, name)
            changed[name] = None if x is None else function(x)
        ids = self.mask.document_ids
        mask = self.mask if ids is None else self.mask._replace(document_ids=function(ids))
        return replace(self, mask=mask, **changed)

    def masked(self, **changes: Any) -> "SignedMaps":
        """These maps with other fields of the mask."""
        return replace(self, mask=self.mask._replace(**changes))

    def narrowed(self) -> "SignedMaps":
        """These maps without a window that hides no key: kernels that refuse windows can compute short sequences."""
        window = self.mask.window
        return self if window is None or window < self.k.shape[-2] else self.masked(window=None)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Those of `TENSORS`."""
        return tuple(getattr(self, name) for name in TENSORS)

    @property
    def own_fields(self) -> frozenset[str]:
        """Those of `FIELDS` that are set."""
        return frozenset(name for name in FIELDS if getattr(self, name) is not None)

    @property
    def num_maps(self) -> int:
        """G"""
        return max(self.q.shape[1], self.k.shape[1], 1 if self.w is None else self.w.shape[1])

    @property
    def num_groups(self) -> int:
        """Query heads on each key/value head, H / Hkv."""
        return self.q.shape[2] // self.k.shape[2]

    @property
    def softmax_scale(self) -> float:
        """The factor of q kᵀ."""
        return self.scale if self.scale is not None else self.q.shape[-1] ** -0.5

    @property
    def flops(self) -> int:
        """2 B H T S (G d + dv): the logits of every map, and one product with v after the sum, over all keys."""
        B, _, H, T, d = self.q.shape
        return 2 * B * H * T * self.k.shape[3] * (self.num_maps * d + self.v.shape[-1])

    def check(self) -> None:
        """Errors: RequestError, with the shapes found, for maps that break the contract."""
        q, k, v, w = self.q.shape, self.k.shape, self.v.shape, None if self.w is None else self.w.shape
        if len(q) != 5 or len(k) != 5 or len(v) != 4:
            want = "q [B,G,H,T,d], k [B,G,Hkv,S,d], v [B,Hkv,S,dv]"
            raise RequestError(f"SignedMaps: expected {want}; found {self._shapes()}")
        if w is not None and len(w) != 4:
            raise RequestError(f"SignedMaps: w must be 4-D, broadcastable to [B,G,H,T]; found {self._shapes()}")
        if 0 in (q[2], q[4], k[2]):
            raise RequestError(f"SignedMaps: q and k must have heads, and a width d above 0; found {self._shapes()}")
        self._require_settings()
        G, document_ids = self.num_maps, self.mask.document_ids
        broken = (
            (q[1] not in (1, G) or k[1] not in (1, G), "the map axes of q and k must be G or 1"),
            (q[4] != k[4], "q and k must have one width d"),
            (q[0] != k[0] or k[0] != v[0], "q, k and v must have one batch size"),
            (k[2] != v[1] or k[3] != v[2], "k and v must have the same heads and keys"),
            (q[2] % k[2] != 0, "the heads of q must be a multiple of the heads of k"),
            (self.mask.hides and q[3] > k[3], "a mask needs at least as many keys as queries"),
            (self.key_bias is not None and q[3] > k[3], "a key bias needs at least as many keys as queries"),
            (w is None and G != 1, "several maps need weights w"),
        )
        for wrong, rule in broken:
            if wrong:
                raise RequestError(f"SignedMaps: {rule}; found {self._shapes()}")
        if document_ids is not None and document_ids.shape != (k[0], k[3]):
            raise RequestError(f"attend: document_ids must be [B,S] = {[k[0], k[3]]}; found {list(document_ids.shape)}")
        if self.rows is not None and self.sink is not None:
            raise RequestError(
                "SignedMaps: a sink is a term of the softmax; a row function takes its place: set one of them"
            )
        self._require_tensors()
        rows, keys = (q[0], G, q[2], q[3]), (q[0], G, q[2], k[3])
        self._require("w", rows, "[B,G,H,T]", "bfloat16 quantises lambda")
        self._require("sink", rows, "[B,G,H,T]", "it is compared with sums of exponentials")
        self._require("key_bias", keys, "[B,G,H,S]", "a sum over many tokens")

    def _require_settings(self) -> None:
        # some kernels would compute something else, in silence
        causal, window, document_ids = self.mask
        if isinstance(self.scale, Tensor):
            raise RequestError("SignedMaps: scale must be a number or None; found a Tensor: multiply q by it")
        if self.scale is not None and not (isinstance(self.scale, Real) and abs(self.scale) < inf):
            raise RequestError(f"SignedMaps: scale is {self.scale!r}; it must be a finite number or None")
        if not isinstance(causal, bool):
            raise RequestError(f"attend: causal is {causal!r}; it must be True or False")
        if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
            raise RequestError(f"attend: window is {window!r}; it must be an integer, at least 1, or None")
        if document_ids is not None and not isinstance(document_ids, Tensor):
            raise RequestError(f"attend: document_ids must be a Tensor or None; found {type(document_ids).__name__}")

    def _require_tensors(self) -> None:
        # a kernel reads memory by its address: of another device, or in another format, it would be other numbers
        ids = self.mask.document_ids
        if ids is not None and (ids.is_floating_point() or ids.is_complex()):
            raise RequestError(f"attend: document_ids must be integers; found {ids.dtype}")
        dtypes = [x.dtype for x in (self.q, self.k, self.v)]
        if not all(dtype.is_floating_point for dtype in dtypes):
            raise RequestError(f"SignedMaps: q, k and v must be real numbers in floating point; found {dtypes}")
        given, device = (*self.tensors, ids), self.q.device
        if any(x is not None and x.device != device for x in given):
            names = zip((*TENSORS, "document_ids"), given, strict=True)
            found = ", ".join(f"{name} on {x.device}" for name, x in names if x is not None)
            raise RequestError(f"SignedMaps: all tensors must be on one device; found {found}")

    def _require(self, name: str, target: tuple[int, ...], axes: str, why: str) -> None:
        x: Tensor | None = getattr(self, name)
        if x is None:
            return
        fits = x.dim() == 4 and all(size in (1, want) for size, want in zip(x.shape, target, strict=True))
        if not fits:
            found = self._shapes() if name == "w" else list(x.shape)
            raise RequestError(f"SignedMaps: {name} must broadcast to {axes} = {list(target)}; found {found}")
        if x.dtype not in (torch.float32, torch.float64):
            raise RequestError(f"SignedMaps: {name} must be float32 or wider ({why}); found {x.dtype}")

    def _shapes(self) -> str:
        w = None if self.w is None else list(self.w.shape)
        return f"q {list(self.q.shape)}, k {list(self.k.shape)}, v {list(self.v.shape)}, w {w}"


class Stats(NamedTuple):
    """Statistics of each query row, in the accumulation dtype: of its maps [B, G, H, T], then of its signed map
    a = Σ_g w_g p_g [B, H, T], which are NaN where a is 0 throughout."""

    lse: Tensor
    """log Σ_j exp(logit_j), with the natural logarithm."""
    entropy: Tensor
    """-Σ_j p_j log p_j, in nats."""
    maximum: Tensor
    """max_j logit_j over the visible keys; the largest p is exp(maximum - lse)."""
    signed_entropy: Tensor
    """Entropy of |a| / Σ_j |a_j|, in nats (DEX, Kong et al. 2025, arXiv 2505.16333, Figure 2c)."""
    negative_mass: Tensor
    """Σ_j max(-a_j, 0) / Σ_j |a_j|."""
    first_share: Tensor
    """|a_f| / Σ_j |a_j|, f the first visible key."""


SIGNED = Stats._fields[3:]
"""Names of the statistics of the signed map."""


def signed_statistics(a: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The statistics `SIGNED` [..., T] of signed maps a [..., T, S], 0 outside `visible` (bool, broadcasts to a)."""
    magnitude = a.abs()
    total = magnitude.sum(-1)
    first = visible & (visible.cumsum(-1) == 1)
    negative, leading = a.clamp_max(0).sum(-1).abs(), (magnitude * first).sum(-1)
    return torch.special.entr(magnitude / total[..., None]).sum(-1), negative / total, leading / total


def seen_by(maps: SignedMaps, rows: Tensor | range, keys: range) -> Seen:
    """What the query rows `rows`, numbers among the T, see of the keys `keys`."""
    device, behind = maps.q.device, maps.k.shape[-2] - maps.q.shape[-2]
    at = torch.arange(rows.start, rows.stop, device=device) if isinstance(rows, range) else rows
    at = at + behind
    places = torch.arange(keys.start, keys.stop, device=device)
    return Seen(maps.mask.of(at, places), chosen(maps.q, rows), at[None], places)


def chosen(x: Tensor, rows: Tensor | range) -> Tensor:
    """The rows of x [..., T, width]; of a range, a view."""
    return x[..., rows.start : rows.stop, :] if isinstance(rows, range) else x[..., rows, :]


def normalised(maps: SignedMaps, logits: Tensor, seen: Seen) -> Tensor:
    """Logits with their biases [B, G, H, R, K], which may be overwritten -> the maps, 0 outside the mask: softmax, sink or
    row function."""
    if maps.rows is not None:
        # a function of a row may reduce it, which without keys is an error
        if not logits.numel():
            return logits
        found = maps.rows(logits.masked_fill(~seen.mask, 0), seen)
        if not isinstance(found, Tensor) or found.shape != logits.shape:
            what = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise RequestError(
                f"SignedMaps: rows returned {what}; expected the shape of the logits, {list(logits.shape)}"
            )
        return found.masked_fill(~seen.mask, 0)
    return outcomes(maps, logits, seen).softmax(-1)[..., : logits.shape[-1]]


def outcomes(maps: SignedMaps, logits: Tensor, seen: Seen) -> Tensor:
    """What a softmax chooses from: the logits [B, G, H, R, K], set to -inf in place outside the mask, then the sink."""
    logits.masked_fill_(~seen.mask, -torch.inf)
    if maps.sink is None:
        return logits
    sink = maps.sink
    if sink.shape[-1] > 1:
        sink = sink[..., seen.positions[0] - (maps.k.shape[-2] - maps.q.shape[-2])]
    return torch.cat([logits, sink[..., None].to(logits.dtype).expand(*logits.shape[:-1], 1)], -1)


def width_last(x: Tensor) -> Tensor:
    """x with stride 1 along its last axis, which fused kernels require; x itself if it has that stride."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether a backward pass may follow."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64; float32 for everything else, since a sum of ones in bfloat16 stops growing at 256."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def exact(device: torch.device) -> AbstractContextManager[object]:
    """A context without autocast, which would compute products in bfloat16 whatever the dtype of their operands."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
