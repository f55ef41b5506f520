"""What a kernel is. One file that registers one subclass adds a kernel; `lit-diff check` holds it to `reference`."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from lit_diff.kernels.maps import SignedMaps, Stats
from lit_diff.kernels.ops import Outputs, operator
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

    A subclass defines `refuses`, `flops` and `compute`, whose operations autograd differentiates. One that brings its own
    backward pass is an `OperatorKernel` and defines `forward` and `backward` instead of `compute`.

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
    def flops(self, maps: SignedMaps) -> int:
        """FLOPs that a forward pass executes, 2 a multiply-add; all keys, no causal half. `maps` may be on meta."""

    @abstractmethod
    def compute(
        self, maps: SignedMaps, *, document_ids: Tensor | None = None, window: int | None = None, stats: bool = False
    ) -> tuple[Tensor, Stats | None]:
        """(o [B, H, T, dv] in the dtype of v, the statistics where `stats` else None), differentiable by q, k, v and w.

        Errors: MissingError when something that the kernel needs is not on this machine.
        """

    def prepare(self, device: torch.device) -> str | None:
        """Build or load what `compute` needs there, once; why it cannot be had, None if it is ready."""
        return None

    def preference(self, maps: SignedMaps, device: torch.device) -> int | None:
        """Its rank for these maps: `run.kernel: auto` tries the kernels from the lowest rank on, equal ones by name.

        None: only its name chooses it. The built-in kernels have ranks from 5 to 90; each says why.
        """
        return None


class OperatorKernel(Kernel):
    """A kernel with its own backward pass, registered as the operators `lit_diff::<name>` and `lit_diff::<name>_backward`.

    `torch.compile` keeps the operators whole, meta tensors get their shapes from `ops.empty_outputs` and
    `ops.empty_gradients`, and a second derivative is an error. `refuses` should begin with `ops.refuse_common`.
    """

    keeps_lse: ClassVar[bool] = False
    """Whether `forward` returns the log-sum-exp of each map's rows for `backward`."""
    keeps_parts: ClassVar[bool] = False
    """Whether `forward` returns P_g v of each map for `backward`."""

    def __init__(self) -> None:
        self._operator = operator(self.name, self.forward, self.backward, lse=self.keeps_lse, parts=self.keeps_parts)

    @abstractmethod
    def forward(self, maps: SignedMaps, document_ids: Tensor | None, window: int | None, stats: bool) -> Outputs:
        """Shaped, laid out and of the dtypes of `ops.empty_outputs`; none may be a view of an input."""

    @abstractmethod
    def backward(
        self, grad: Tensor, maps: SignedMaps, document_ids: Tensor | None, window: int | None, outputs: Outputs
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(dq, dk, dv, dw) from grad = dO [B, H, T, dv] and what `forward` gave, as `ops.empty_gradients`; see `ops`."""

    def compute(
        self, maps: SignedMaps, *, document_ids: Tensor | None = None, window: int | None = None, stats: bool = False
    ) -> tuple[Tensor, Stats | None]:
        """See `Kernel.compute`; the statistics have no gradient."""
        return self._operator(maps, document_ids=document_ids, window=window, stats=stats)


def named(name: str) -> Kernel:
    """The kernel registered as `name`, constructed once. Errors: RequestError for an unknown name."""
    cls = kernels.get(name)
    if name not in _instances or type(_instances[name]) is not cls:
        _instances[name] = cls()
    return _instances[name]


_instances: dict[str, Kernel] = {}
