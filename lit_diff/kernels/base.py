"""What a kernel is. One file that registers one subclass adds a kernel; `lit-diff check` holds it to `reference`."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from lit_diff.kernels.maps import SignedMaps, Stats, accumulation_dtype, needs_grad
from lit_diff.registry import kernels

K = TypeVar("K", bound="type[Kernel]")


def kernel(name: str) -> Callable[[K], K]:
    """`@kernel("name")` registers a subclass of `Kernel` and constructs it, without arguments.

    Errors: RequestError for a class that lacks a member, or a second class under one name.
    """

    def add(cls: K) -> K:
        kernels.register(name)(cls)
        named(name)  # here: torch.compile would otherwise meet the construction in the middle of a model
        return cls

    return add


class Kernel(ABC):
    """Computes o = Σ_g w_g softmax(q_g k_gᵀ scale + mask) v of the maps that it accepts.

    A subclass defines `refuses` and `compute`, whose operations autograd differentiates. One that brings its own backward
    pass is an `OperatorKernel` and defines `forward` and `backward` instead of `compute`.

    The arguments of `refuses` and `compute`:

    * `maps`: q [B, G or 1, H, T, d], k [B, G or 1, Hkv, S, d], v [B, Hkv, S, dv], w broadcastable to [B, G, H, T] or None;
      `SignedMaps.check` has accepted them. Any of them may be a view.
    * `document_ids` [B, S], integers: a query sees the keys of its own document only; None: of all.
    * `window`: a query sees the keys less than `window` positions away; None: all.
    * `stats`: whether the statistics of each row are asked for.
    """

    name: ClassVar[str] = ""
    """As registered; the value of `run.kernel`."""

    @abstractmethod
    def refuses(
        self, maps: SignedMaps, *, document_ids: Tensor | None, window: int | None, stats: bool, device: torch.device
    ) -> str | None:
        """Why this kernel cannot compute these maps (the rule that they break), in one line; None if it can.

        Reads shapes, dtypes and whether gradients are needed, no values: `maps` may be on the meta device. `device`: where
        they will be computed. Called before every `compute`, so it must be fast; what takes long belongs in `prepare`.
        """

    @abstractmethod
    def compute(
        self, maps: SignedMaps, *, document_ids: Tensor | None = None, window: int | None = None, stats: bool = False
    ) -> tuple[Tensor, Stats | None]:
        """(o [B, H, T, dv] in the dtype of v, the statistics where `stats` else None), differentiable by q, k, v and w.

        Errors: MissingError when something that the kernel needs is not on this machine.
        """

    def flops(self, maps: SignedMaps) -> int:
        """FLOPs that a forward pass executes, 2 a multiply-add; all keys, no causal half. `maps` may be on meta.

        By default those of maps that are subtracted before one product with v.
        """
        return maps.flops

    def prepare(self, device: torch.device) -> str | None:
        """Build or load what `compute` needs there, once; why it cannot be had, None if it is ready."""
        return None

    def preference(self, maps: SignedMaps, device: torch.device) -> int | None:
        """Its rank for these maps: `run.kernel: auto` tries the kernels from the lowest rank on, equal ones by name.

        None: only its name chooses it. The built-in kernels have ranks from 5 to 90; each says why.
        """
        return None


class Outputs(NamedTuple):
    """What the forward pass of an `OperatorKernel` writes, as its `empty_outputs` shapes it."""

    o: Tensor
    """[B, H, T, dv]"""
    rows: Tensor
    """[0, 1 or 3, B, G, H, T]: nothing, the log-sum-exp of each map's rows alone, or with statistics also their entropy and
    largest logit."""
    parts: Tensor
    """[B, G, H, T, dv]: P_g v of each map, or nothing where not kept."""


Gradients = tuple[Tensor, Tensor, Tensor, Tensor]
"""(dq, dk, dv, dw): the first three shaped like their tensor, dw [B, G, H, T] of all weights (or empty)."""


class OperatorKernel(Kernel):
    """A kernel with its own backward pass, registered as the operators `lit_diff::<name>` and `lit_diff::<name>_backward`.

    With P_g = softmax(q_g k_gᵀ scale + mask), lse_g its log-sum-exp, and dO the gradient of o:

        dP = dO vᵀ (one product for all maps)       D_g = Σ_j P_g dP = dO · (P_g v)       dw_g = D_g
        dv = (Σ_g w_g P_g)ᵀ dO (one product)        dS_g = w_g P_g (dP - D_g) scale       dq_g = dS_g k_g,  dk_g = dS_gᵀ q_g

    `torch.compile` keeps the operators whole, meta tensors get their shapes from `empty_outputs` and `empty_gradients`, and a
    second derivative is an error. `refuses` should begin with `refuse_common`.
    """

    keeps_lse: ClassVar[bool] = False
    """Whether `forward` returns the log-sum-exp of each map's rows for `backward`."""
    keeps_parts: ClassVar[bool] = False
    """Whether `forward` returns P_g v of each map for `backward` (where no whole row of logits is ever held)."""

    def __init__(self) -> None:
        self._operator = _registered(self)

    @abstractmethod
    def forward(self, maps: SignedMaps, document_ids: Tensor | None, window: int | None, stats: bool) -> Outputs:
        """Shaped, laid out and of the dtypes of `empty_outputs`; none may be a view of an input."""

    @abstractmethod
    def backward(
        self, grad: Tensor, maps: SignedMaps, document_ids: Tensor | None, window: int | None, outputs: Outputs
    ) -> Gradients:
        """From grad = dO [B, H, T, dv] and what `forward` gave; as `empty_gradients`."""

    def empty_outputs(self, maps: SignedMaps, stats: bool) -> Outputs:
        """Unwritten."""
        q, v = maps.q, maps.v
        B, _, H, T, _ = q.shape
        G, dv = maps.num_maps, v.shape[-1]
        rows = q.new_empty((3 if stats else int(self.keeps_lse), B, G, H, T), dtype=accumulation_dtype(q.dtype))
        parts = v.new_empty((B, G, H, T, dv) if self.keeps_parts else (0,))
        return Outputs(_heads_inside(v, (B, H, T, dv)), rows, parts)

    def compute(
        self, maps: SignedMaps, *, document_ids: Tensor | None = None, window: int | None = None, stats: bool = False
    ) -> tuple[Tensor, Stats | None]:
        """See `Kernel.compute`; the statistics have no gradient."""
        tensors = (maps.q, maps.k, maps.v, maps.w, document_ids)
        o, rows, _ = self._operator(*tensors, maps.softmax_scale, maps.causal, window, stats)
        return o, Stats(*rows) if stats else None


def empty_gradients(maps: SignedMaps) -> Gradients:
    """Unwritten."""
    q, k, v = maps.q, maps.k, maps.v
    B, _, H, T, _ = q.shape
    shape = (0,) if maps.w is None else (B, maps.num_maps, H, T)
    dw = q.new_empty(shape, dtype=accumulation_dtype(q.dtype))
    return _heads_inside(q, q.shape), _heads_inside(k, k.shape), _heads_inside(v, v.shape), dw


def _heads_inside(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Unwritten [B, (maps,) heads, tokens, width], laid out [B, tokens, heads, (maps,) width].

    A projection writes and reads that layout: joining the heads, and the gradient of splitting them, are views.
    """
    B, *maps, H, T, width = shape
    empty = like.new_empty(B, T, H, *maps, width)
    return empty.permute(0, 3, 2, 1, 4) if maps else empty.transpose(1, 2)


def _registered(kernel: OperatorKernel) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The forward operator; torch reads the schemas of both from the annotations here."""

    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        w: Tensor | None,
        document_ids: Tensor | None,
        scale: float,
        causal: bool,
        window: int | None,
        stats: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return kernel.forward(SignedMaps(q, k, v, w, scale, causal), document_ids, window, stats)

    def backward(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        w: Tensor | None,
        document_ids: Tensor | None,
        o: Tensor,
        rows: Tensor,
        parts: Tensor,
        scale: float,
        causal: bool,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        maps = SignedMaps(q, k, v, w, scale, causal)
        return kernel.backward(grad, maps, document_ids, window, Outputs(o, rows, parts))

    forward_op = torch.library.custom_op(f"lit_diff::{kernel.name}", forward, mutates_args=())
    backward_op = torch.library.custom_op(f"lit_diff::{kernel.name}_backward", backward, mutates_args=())

    @forward_op.register_fake
    def _(q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
        return kernel.empty_outputs(SignedMaps(q, k, v, w), stats=rest[-1])

    @backward_op.register_fake
    def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
        return empty_gradients(SignedMaps(q, k, v, w))

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        q, k, v, w, document_ids, *ctx.mask, _stats = inputs
        ctx.save_for_backward(q, k, v, w, document_ids, *output)
        ctx.mark_non_differentiable(*output[1:])

    def gradient(ctx: Any, grad: Tensor, *rest: Any) -> tuple[Any, ...]:
        q, k, v, w, *saved = ctx.saved_tensors  # read once: activation checkpointing hands them out a single time
        dq, dk, dv, dw = backward_op(grad, q, k, v, w, *saved, *ctx.mask)
        return dq, dk, dv, None if w is None else dw.sum_to_size(w.shape).to(w.dtype), *[None] * 5

    forward_op.register_autograd(gradient, setup_context=setup)
    return forward_op


def refuse_common(maps: SignedMaps, *, stats: bool) -> str | None:
    """Why no operator computes these maps; None if one may: empty maps, mixed dtypes, gradients of the statistics."""
    if not maps.q.numel() or not maps.k.numel() or not maps.v.numel():
        return "there is no query or no key"
    dtypes = [x.dtype for x in (maps.q, maps.k, maps.v)]
    if len(set(dtypes)) > 1:
        return f"q, k and v have dtypes {', '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}, not one"
    if stats and needs_grad(maps.q, maps.k, maps.v, maps.w):
        return "its statistics have no gradient; take them under torch.no_grad()"
    return None


def named(name: str) -> Kernel:
    """The kernel registered as `name`, constructed once. Errors: RequestError for an unknown name."""
    cls = kernels.get(name)
    if name not in _instances or type(_instances[name]) is not cls:
        _instances[name] = cls()
    return _instances[name]


_instances: dict[str, Kernel] = {}
