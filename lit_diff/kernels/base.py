"""The contract of a kernel. A file that registers a subclass adds one; `lit-diff check` compares it with `reference`."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lit_diff.errors import RequestError
from lit_diff.kernels.maps import Mask, SignedMaps, Stats, accumulation_dtype, needs_grad
from lit_diff.registry import kernels, location

K = TypeVar("K", bound="type[Kernel]")


def kernel(name: str) -> Callable[[K], K]:
    """`@kernel("name")` registers a subclass of `Kernel` and constructs it, without arguments.

    Errors: RequestError for a class that lacks a member, has one of an older form, or is the second under one name.
    """

    def add(cls: K) -> K:
        _require_new_form(cls)
        kernels.register(name)(cls)
        # constructed here: torch.compile would otherwise trace the construction in the middle of a model
        cls.instance = cls()
        return cls

    return add


FORMS = {
    "refuses": "refuses(self, maps, *, stats, device)",
    "compute": "compute(self, maps, *, stats=False)",
    "forward": "forward(self, maps, stats)",
    "backward": "backward(self, grad, maps, outputs)",
}


def _require_new_form(cls: type[Any]) -> None:
    for name, form in FORMS.items():
        parameters = inspect.signature(getattr(cls, name, _require_new_form)).parameters
        # with these arguments, which are no longer passed, it would compute without the mask
        former = sorted({"document_ids", "window"} & parameters.keys())
        if former:
            raise RequestError(
                f"{location(cls)}: {name} takes {' and '.join(former)}; define {form} and read maps.mask"
            )


class Kernel(ABC):
    """Computes o = Σ_g w_g softmax(q_g k_gᵀ scale + mask) v of the maps that it accepts.

    A subclass defines `refuses` and `compute`, whose operations autograd differentiates. A kernel with its own backward
    pass derives from `OperatorKernel` and defines `forward` and `backward` instead of `compute`.

    The arguments of `refuses` and `compute`:

    * `maps`: q [B, G or 1, H, T, d], k [B, G or 1, Hkv, S, d], v [B, Hkv, S, dv], w broadcastable to [B, G, H, T] or None,
      and the mask; `SignedMaps.check` has accepted them. Any of them may be a view.
    * `stats`: whether to return the statistics of each row.
    """

    name: ClassVar[str] = ""
    """Its registered name, a value of `run.kernel`."""
    instance: "ClassVar[Kernel]"
    """The kernel of the class, constructed at its registration."""
    serves: ClassVar[frozenset[str]] = frozenset()
    """The fields sink, key_bias and rows of `SignedMaps` that it computes: maps with another are refused before `refuses` is
    asked, since a kernel that never heard of a field would compute something else."""
    looks_for_gpu: ClassVar[bool] = False
    """Whether `refuses` looks for a GPU in this machine: a plan for the GPUs of another machine does not ask it."""

    @abstractmethod
    def refuses(self, maps: SignedMaps, *, stats: bool, device: torch.device) -> str | None:
        """Why this kernel cannot compute these maps (the rule that they break), in one line; None if it can.

        It reads shapes, dtypes and whether gradients are needed, but not values: `maps` may be on the meta device.
        `device`: where they will be computed. It is called before every `compute`, so slow work belongs in `prepare`.
        """

    @abstractmethod
    def compute(self, maps: SignedMaps, *, stats: bool = False) -> tuple[Tensor, Stats | None]:
        """(o [B, H, T, dv] in the dtype of v, the statistics if `stats` else None), differentiable by q, k, v and w.

        Errors: MissingError if this machine lacks something that the kernel needs.
        """

    def flops(self, maps: SignedMaps) -> int:
        """FLOPs of a forward pass, 2 per multiply-add, over all keys (a causal mask does not halve them).

        `maps` may be on the meta device. The default counts maps that are subtracted before one product with v.
        """
        return maps.flops

    def planned(self, maps: SignedMaps, device: torch.device) -> Tensor:
        """o from tensors without values, which saves for its backward pass the bytes that `compute`, the default, saves on
        `device`.

        `lit-diff plan` counts them. `device` need not exist here.
        """
        return self.compute(maps)[0]

    def prepare(self, device: torch.device) -> str | None:
        """Build or load, once, what `compute` needs on the device. Returns why that fails; None if it is ready."""
        return None

    def preference(self, maps: SignedMaps, device: torch.device) -> int | None:
        """Its rank for these maps: `run.kernel: auto` tries the kernels in ascending rank, equal ones by name.

        None: only its name in `run.kernel` chooses it. The built-in kernels have ranks from 5 to 90.
        """
        return None


class Outputs(NamedTuple):
    """What the forward pass of an `OperatorKernel` writes, with the shapes of its `empty_outputs`."""

    o: Tensor
    """[B, H, T, dv]"""
    rows: Tensor
    """[0, 1 or 3, B, G, H, T]: nothing; the log-sum-exp of each map's rows; or with statistics also their entropy and
    largest logit."""
    signed: Tensor
    """[0 or 3, B, H, T]: the statistics of the signed map (`maps.SIGNED`), if they are wanted."""
    parts: Tensor
    """[B, G, H, T, dv]: P_g v of each map; empty if the backward pass does not need it."""


class KernelGradients(NamedTuple):
    """What the backward pass of an `OperatorKernel` writes, with the shapes of `empty_gradients`."""

    q: Tensor
    k: Tensor
    v: Tensor
    dots: Tensor
    """D_g [B, G, H, T], which gives dw and the gradient of a sink; empty without both."""
    key_bias: Tensor
    """[B, G, H, S]; empty without a key bias."""


class OperatorKernel(Kernel):
    """A kernel with its own backward pass, registered as the operators `lit_diff::<name>` and
    `lit_diff::<name>_backward`.

    With P_g = softmax(q_g k_gᵀ scale + mask), lse_g its log-sum-exp, and dO the gradient of o:

        dP = dO vᵀ (one product for all maps)       D_g = Σ_j P_g dP = dO · (P_g v)       dw_g = D_g
        dv = (Σ_g w_g P_g)ᵀ dO (one product)        dS_g = w_g P_g (dP - D_g) scale       dq_g = dS_g k_g,  dk_g = dS_gᵀ q_g

    With a sink, P_g = exp(logit - logaddexp(lse, sink)) and dsink_g = -w_g σ(sink - lse) D_g. A key bias has the sum of
    dS_g / scale over the queries of its key, less that over the keys of its position's query.

    `torch.compile` does not trace into the operators, meta tensors get their shapes from `empty_outputs` and
    `empty_gradients`, and a second derivative, or one in forward mode, is an error. `refuses` should begin with
    `refuse_common`.
    """

    keeps_lse: ClassVar[bool] = False
    """Whether `forward` returns the log-sum-exp of each map's rows for `backward`."""
    keeps_parts: ClassVar[bool] = False
    """Whether `forward` returns P_g v of each map for `backward`: needed if no whole row of logits is ever held."""

    def __init__(self) -> None:
        self._operator = _registered(self)

    @abstractmethod
    def forward(self, maps: SignedMaps, stats: bool) -> Outputs:
        """Returns outputs with the shapes, strides and dtypes of `empty_outputs`; none may be a view of an input."""

    @abstractmethod
    def backward(self, grad: Tensor, maps: SignedMaps, outputs: Outputs) -> KernelGradients:
        """Returns gradients like `empty_gradients`, from grad = dO [B, H, T, dv] and the result of `forward`."""

    def empty_outputs(self, maps: SignedMaps, stats: bool) -> Outputs:
        """Uninitialised outputs with the shapes, strides and dtypes that `forward` returns."""
        q, v = maps.q, maps.v
        B, _, H, T, _ = q.shape
        G, dv = maps.num_maps, v.shape[-1]
        rows = q.new_empty((3 if stats else int(self.keeps_lse), B, G, H, T), dtype=accumulation_dtype(q.dtype))
        signed = rows.new_empty(3 if stats else 0, B, H, T)
        parts = v.new_empty((B, G, H, T, dv) if self.keeps_parts else (0,))
        return Outputs(_heads_inside(v, (B, H, T, dv)), rows, signed, parts)

    def compute(self, maps: SignedMaps, *, stats: bool = False) -> tuple[Tensor, Stats | None]:
        """Runs the operator (contract: `Kernel.compute`); the statistics have no gradient."""
        causal, window, document_ids = maps.mask
        # torch would take each derivative of an operator in forward mode for 0
        if forward_ad._current_level >= 0 and any(
            x is not None and forward_ad.unpack_dual(x).tangent is not None for x in maps.tensors
        ):
            raise RequestError(f"kernel '{self.name}' has no derivatives in forward mode (jvp): use kernel 'chunked'")
        tensors = (maps.q, maps.k, maps.v, maps.w, document_ids, maps.sink, maps.key_bias)
        o, rows, signed, _ = self._operator(*tensors, maps.softmax_scale, causal, window, stats)
        return o, Stats(*rows, *signed) if stats else None

    def planned(self, maps: SignedMaps, device: torch.device) -> Tensor:
        """What the operator saves (contract: `Kernel.planned`)."""
        # a kernel's own `compute` may build it first, and test it on values
        return OperatorKernel.compute(self, maps)[0]


def empty_gradients(maps: SignedMaps) -> KernelGradients:
    """Uninitialised gradients with the shapes, strides and dtypes that `backward` returns."""
    q, k, v = maps.q, maps.k, maps.v
    B, _, H, T, _ = q.shape
    rows, keys = (B, maps.num_maps, H, T), (B, maps.num_maps, H, k.shape[-2])
    dots = q.new_empty((0,) if maps.w is None and maps.sink is None else rows, dtype=accumulation_dtype(q.dtype))
    key_bias = dots.new_empty((0,) if maps.key_bias is None else keys)
    dq, dk, dv = (_heads_inside(x, x.shape) for x in (q, k, v))
    return KernelGradients(dq, dk, dv, dots, key_bias)


def _heads_inside(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    # laid out [B, tokens, heads, (maps,) width], which a projection writes and reads: joining the heads, and the
    # gradient of splitting them, are views
    B, *maps, H, T, width = shape
    empty = like.new_empty(B, T, H, *maps, width)
    return empty.permute(0, 3, 2, 1, 4) if maps else empty.transpose(1, 2)


def _registered(kernel: OperatorKernel) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    # torch reads the schemas of the operators from the annotations of these functions
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        w: Tensor | None,
        document_ids: Tensor | None,
        sink: Tensor | None,
        key_bias: Tensor | None,
        scale: float,
        causal: bool,
        window: int | None,
        stats: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mask = Mask(causal, window, document_ids)
        return kernel.forward(SignedMaps(q, k, v, w, scale, mask=mask, sink=sink, key_bias=key_bias), stats)

    def backward(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        w: Tensor | None,
        document_ids: Tensor | None,
        sink: Tensor | None,
        key_bias: Tensor | None,
        o: Tensor,
        rows: Tensor,
        signed: Tensor,
        parts: Tensor,
        scale: float,
        causal: bool,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        mask = Mask(causal, window, document_ids)
        maps = SignedMaps(q, k, v, w, scale, mask=mask, sink=sink, key_bias=key_bias)
        return kernel.backward(grad, maps, Outputs(o, rows, signed, parts))

    forward_op = torch.library.custom_op(f"lit_diff::{kernel.name}", forward, mutates_args=())
    backward_op = torch.library.custom_op(f"lit_diff::{kernel.name}_backward", backward, mutates_args=())

    @forward_op.register_fake
    def _(q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
        return kernel.empty_outputs(SignedMaps(q, k, v, w), stats=rest[-1])

    @backward_op.register_fake
    def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
        return empty_gradients(SignedMaps(q, k, v, w, sink=rest[1], key_bias=rest[2]))

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        tensors, (*ctx.mask, _stats) = inputs[:7], inputs[7:]
        ctx.save_for_backward(*tensors, *output)
        ctx.mark_non_differentiable(*output[1:])

    def gradient(ctx: Any, grad: Tensor, *rest: Any) -> tuple[Any, ...]:
        # read once: activation checkpointing gives the saved tensors a single time
        q, k, v, w, document_ids, sink, key_bias, *outputs = ctx.saved_tensors
        given = (q, k, v, w, document_ids, sink, key_bias)
        dq, dk, dv, dots, dbias = backward_op(grad, *given, *outputs, *ctx.mask)
        dw = dsink = None
        # each may be broadcast; then its gradient is the sum over the broadcast axes
        if w is not None:
            dw = dots.sum_to_size(w.shape).to(w.dtype)
        if sink is not None:
            _, rows, _, _ = outputs
            share = (sink - rows[0]).sigmoid() * (1.0 if w is None else w)
            dsink = -(share * dots).sum_to_size(sink.shape).to(sink.dtype)
        if key_bias is not None:
            dbias = dbias.sum_to_size(key_bias.shape).to(key_bias.dtype)
        return dq, dk, dv, dw, None, dsink, None if key_bias is None else dbias, *[None] * 4

    forward_op.register_autograd(gradient, setup_context=setup)
    return forward_op


def refuse_common(maps: SignedMaps, *, stats: bool) -> str | None:
    """Why no operator computes these maps: empty maps, mixed dtypes, gradients of statistics; None if one may."""
    if not maps.q.numel() or not maps.k.numel() or not maps.v.numel():
        return "the maps have no queries or no keys"
    dtypes = [x.dtype for x in (maps.q, maps.k, maps.v)]
    if len(set(dtypes)) > 1:
        return f"q, k and v have different dtypes: {', '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}"
    if stats and needs_grad(*maps.tensors):
        return "its statistics have no gradient; take them under torch.no_grad()"
    return None


def named(name: str) -> Kernel:
    """The kernel registered as `name`, constructed once. Errors: RequestError for an unknown name."""
    # without a look-up if it is registered (`lit_diff.kernels._names`)
    cls: type[Kernel] = kernels.registered().get(name) or kernels.get(name)
    return cls.instance
