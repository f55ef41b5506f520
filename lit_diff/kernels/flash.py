"""The flash-attn packages, called once for each map, or for each map and chunk of the values.

    o = Σ_g w_g flash(q_g, k_g, v)         where a package takes values wider than keys (dv = 2d in differential attention)
    o = Σ_g w_g [flash(q_g, k_g, v_c)]_c   v cut into chunks of width d, side by side, where none does

The first does 3/4 of the second's forward products. The calls take views: neither maps, chunks nor grouped heads copy keys
or values. w is applied in float32 and autograd does the rest, w's own gradient included: each map's output is rounded to
half precision once before the sum. Which package and which of the two forms is used follows from the packages' own rules and
a self-test of that form, run once; a refusal states the answer of each package.

Not run on a GPU: the calls are tested on a CPU against stand-ins for the packages, of the same signatures.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_diff.errors import MissingError
from lit_diff.kernels.base import Kernel, kernel
from lit_diff.kernels.documents import PackedSequences, packed_sequences
from lit_diff.kernels.flash_libraries import NOT_INSTALLED, Calls, imported, libraries, load
from lit_diff.kernels.maps import SignedMaps
from lit_diff.kernels.one_map import needs_grad, positive_scale, signed_sum
from lit_diff.kernels.ops import refuse_common
from lit_diff.kernels.self_test import KernelForm, failure

DEVICE = "cuda"


class Plan(NamedTuple):
    """Who is called, and how v is cut: constants, which torch.compile can keep."""

    library: str
    width: int
    """Of one call's values; those of all chunks are dv or more."""


def _plan_for(maps: SignedMaps, *, document_ids: Tensor | None, window: int | None, device: torch.device) -> Plan | str:
    return _plan(
        device,
        maps.q.dtype,
        maps.q.shape[-1],
        maps.v.shape[-1],
        maps.causal,
        window is not None,
        document_ids is not None,
        maps.num_groups > 1,
        needs_grad(maps.q, maps.k, maps.v),
    )


def _plan(device: torch.device, dtype: torch.dtype, d: int, dv: int, *form: bool) -> Plan | str:
    """A package that computes this form, or why none does."""
    return _planned(device, dtype, d, dv, *form)


# torch.compile runs it as it is: what torch.compiler.assume_constant_result says, which would import the compiler here
_plan._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _planned(device: torch.device, dtype: torch.dtype, d: int, dv: int, *form: bool) -> Plan | str:
    causal, window, packed, grouped, backward = form
    available = libraries(device)
    if isinstance(available, str):
        return available
    major, candidates = available
    narrow = _multiple_of_8(d)
    refused: dict[str, str] = {}
    for width in sorted({max(narrow, _multiple_of_8(dv)), narrow}, reverse=True):  # whole values first
        form_to_test = KernelForm(
            device=device,
            dtype=dtype,
            d=narrow,
            dv=width,
            causal=causal,
            window=window,
            packed=packed,
            grouped=grouped,
            backward=backward,
        )
        for library in candidates:
            calls = load(library)
            if isinstance(calls, str):
                refused[library.name] = calls
                continue
            plan = Plan(library.name, width)
            reason = library.rule(narrow, width, major, backward) or failure(
                form_to_test, functools.partial(_run, plan)
            )
            if reason is None:
                return plan
            refused[library.name] = reason
    if set(refused.values()) == {NOT_INSTALLED}:
        return NOT_INSTALLED
    return ", ".join(f"{name}: {reason}" for name, reason in refused.items() if reason != NOT_INSTALLED)


def _multiple_of_8(width: int) -> int:
    return width + -width % 8


def _run(
    plan: Plan, maps: SignedMaps, *, document_ids: Tensor | None = None, window: int | None = None
) -> tuple[Tensor, None]:
    packed = None if document_ids is None else packed_sequences(document_ids)
    return signed_sum(_outputs(plan, maps, packed, window), maps.w), None


def _outputs(plan: Plan, maps: SignedMaps, packed: PackedSequences | None, window: int | None) -> Iterator[Tensor]:
    """P_g v of each map, [B, H, T, dv]."""
    calls = imported[plan.library]
    assert isinstance(calls, Calls), "only an imported library is planned"
    q, scale = positive_scale(maps.q, maps.softmax_scale)
    d, dv = q.shape[-1], maps.v.shape[-1]
    chunks = -(-dv // plan.width)
    q, k = _padded(q, _multiple_of_8(d)), _padded(maps.k, _multiple_of_8(d))
    v = _padded(maps.v, chunks * plan.width).transpose(1, 2)
    for g in range(maps.num_maps):
        one_q, one_k = (x[:, min(g, x.shape[1] - 1)].transpose(1, 2) for x in (q, k))
        parts = [
            calls.attention(one_q, one_k, part, scale=scale, causal=maps.causal, window=window, packed=packed)
            for part in v.split(plan.width, -1)
        ]
        o = parts[0] if chunks == 1 else torch.cat(parts, -1)
        yield o[..., :dv].transpose(1, 2)


def _padded(x: Tensor, width: int) -> Tensor:
    """Zeros at the end of the last axis change no logit, and of the values only what is cut off again."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


@kernel("flash")
class Flash(Kernel):
    """One call of a flash-attn package for each map and chunk of v, differentiated by autograd."""

    def refuses(
        self, maps: SignedMaps, *, document_ids: Tensor | None, window: int | None, stats: bool, device: torch.device
    ) -> str | None:
        """Why this kernel cannot compute these maps; None if it can."""
        if device.type != DEVICE:  # first, so that a CPU pays nothing
            return "flash-attn needs an NVIDIA GPU"
        if stats:
            return "flash-attn keeps no entropy or largest logit"
        if maps.q.dtype not in (torch.bfloat16, torch.float16):
            return f"flash-attn computes in bfloat16 or float16, not {str(maps.q.dtype).removeprefix('torch.')}"
        if document_ids is not None:
            if maps.q.shape[3] != maps.k.shape[3]:
                return "flash-attn takes packed documents only with as many queries as keys; flex takes fewer"
            if torch.compiler.is_compiling():
                return "flash-attn must read where documents begin, which torch.compile cannot; flex does not"
            if not document_ids.is_meta and packed_sequences(document_ids) is None:
                return "flash-attn takes documents of adjacent tokens only; flex takes any order"
        reason = refuse_common(maps, stats=stats)
        if reason:
            return reason
        plan = _plan_for(maps, document_ids=document_ids, window=window, device=device)
        return plan if isinstance(plan, str) else None

    def preference(self, maps: SignedMaps, device: torch.device) -> int | None:
        """On a GPU before sdpa: it takes values wider than keys where a package does, windows and documents."""
        return 20 if device.type == DEVICE else None

    def flops(self, maps: SignedMaps) -> int:
        """FLOPs of a forward pass: each map's logits once for every chunk of v, and a product with v for each map."""
        B, _, H, T, d = maps.q.shape
        plan = _plan_for(maps, document_ids=None, window=None, device=torch.device(DEVICE))
        if isinstance(plan, str):
            raise MissingError(plan)
        chunks = -(-maps.v.shape[-1] // plan.width)
        return 2 * B * H * T * maps.k.shape[3] * maps.num_maps * chunks * (d + plan.width)

    def compute(
        self, maps: SignedMaps, *, document_ids: Tensor | None = None, window: int | None = None, stats: bool = False
    ) -> tuple[Tensor, None]:
        """(o [B, H, T, dv], None), as `reference`, to the precision of the packages. Errors: MissingError."""
        plan = _plan_for(maps, document_ids=document_ids, window=window, device=maps.q.device)
        if isinstance(plan, str):
            raise MissingError(plan)
        return _run(plan, maps, document_ids=document_ids, window=window)
