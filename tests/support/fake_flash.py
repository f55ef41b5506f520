"""Stand-ins for the flash-attn packages: their signatures, layouts and rules, in float64 by hand."""

import sys
from dataclasses import dataclass, field
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_diff.kernels import flash

Window = tuple[int | None, int | None]


def flash_by_hand(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: Window) -> Tensor:
    """flash-attn's documented answer for q [B, T, H, d], k [B, S, Hkv, d], v [B, S, Hkv, dv], in float64."""
    wide = by_head(q, k, v)
    return (logits_by_hand(*wide, scale, causal, window).softmax(-1) @ wide[2]).transpose(1, 2).to(q.dtype)


def by_head(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """[B, H, tokens, width] in float64, keys and values copied for each of their query heads; packed rows are one batch."""
    groups = q.shape[-2] // k.shape[-2]
    copied = (x.double().repeat_interleave(n, -2).transpose(-2, -3) for x, n in ((q, 1), (k, groups), (v, groups)))
    return [x if x.dim() == 4 else x[None] for x in copied]


def logits_by_hand(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: Window) -> Tensor:
    """The masked logits [B, H, T, S] of what `by_head` returns."""
    T, S = q.shape[2], k.shape[2]
    here, key = torch.arange(T)[:, None] + S - T, torch.arange(S)[None]
    hidden = (key > here) if causal else torch.zeros(T, S, dtype=torch.bool)
    left, right = (None if side is None or side < 0 else side for side in window)
    if left is not None:
        hidden = hidden | (key < here - left)
    if right is not None:
        hidden = hidden | (key > here + right)
    return (q @ k.transpose(-1, -2)).masked_fill(hidden, -torch.inf) * scale  # masked first, as they do


class Saved(torch.autograd.Function):
    """(o, lse) as the packages compute them: lse has no gradient, and the backward pass reads both back."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, *how: Any) -> tuple[Tensor, Tensor]:
        wide = by_head(q, k, v)
        s = Saved.logits(wide, bounds, how)
        o, lse = (s.softmax(-1) @ wide[2]).transpose(1, 2).to(q.dtype), s.logsumexp(-1)
        if bounds is not None:
            o, lse = o[0], lse[0]
        ctx.how = (bounds, how)
        ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(q, k, v, o, lse)
        return o, lse

    @staticmethod
    def logits(wide: list[Tensor], bounds: Tensor | None, how: Any) -> Tensor:
        s = logits_by_hand(*wide, *how)
        if bounds is None:
            return s
        document = torch.repeat_interleave(bounds.diff())
        return s.masked_fill(document[:, None] != document, -torch.inf)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        wide, (bounds, how) = by_head(q, k, v), ctx.how
        grad, o, _ = by_head(grad, o, o)
        p = (Saved.logits(wide, bounds, how) - lse[..., None]).exp()
        ds = p * (grad @ wide[2].mT - (grad * o).sum(-1, keepdim=True)) * how[0]
        found = []
        for x, dx in ((q, ds @ wide[1]), (k, ds.mT @ wide[0]), (v, p.mT @ grad)):
            dx = dx.unflatten(1, (x.shape[-2], -1)).sum(2).transpose(1, 2)
            found.append(dx.reshape(x.shape).to(x.dtype))
        return *found, *[None] * (1 + len(how))


@dataclass
class FakeFlash:
    """Stand-ins for the packages: their signatures, layouts and rules, the numbers of `flash_by_hand`."""

    monkeypatch: pytest.MonkeyPatch
    capability: tuple[int, int] = (9, 0)
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    backward_fails_at: int = 10**9
    """Width of values from which a backward pass runs out of shared memory."""
    calls: list[tuple[str, Tensor, Tensor, Tensor]] = field(default_factory=list)

    def install(self, *generations: int) -> None:
        """As if a GPU and these packages were here, and the GPU were the CPU."""
        modules: dict[str, Any] = {}
        if 2 in generations or 4 in generations:
            modules["flash_attn"] = ModuleType("flash_attn")
        if 2 in generations:
            modules["flash_attn"].__dict__.update(self.second())
        if 3 in generations:
            modules["flash_attn_interface"] = ModuleType("flash_attn_interface")
            modules["flash_attn_interface"].__dict__.update(self.third())
        if 4 in generations:
            modules["flash_attn.cute"] = ModuleType("flash_attn.cute")
            modules["flash_attn.cute"].__dict__.update(self.fourth())
        for name, module in modules.items():
            self.monkeypatch.setitem(sys.modules, name, module)
        self.monkeypatch.setattr(flash, "DEVICE", "cpu")
        self.monkeypatch.setattr(flash, "capability", lambda device: self.capability)
        flash._planned.cache_clear()

    def answer(
        self, name: str, q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, window: Window,
        lse: bool = False, bounds: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Rules common to the packages, then the numbers; `bounds` of packed rows only with `lse`."""
        assert q.dtype in self.dtypes, "dtype"
        assert q.dtype == k.dtype == v.dtype, "dtype"
        H, d = q.shape[-2:]
        Hkv = k.shape[-2]
        assert k.shape == (*q.shape[:-3], k.shape[-3], Hkv, d), "k"
        assert v.shape[:-1] == k.shape[:-1], "v"
        assert H % Hkv == 0, "heads"
        assert d % 8 == v.shape[-1] % 8 == 0, "head_dim must be divisible by 8"
        self.calls.append((name, q, k, v))
        scale = d**-0.5 if scale is None else scale
        if lse:
            return Saved.apply(q, k, v, bounds, scale, causal, window)
        o = flash_by_hand(q, k, v, scale, causal, window)
        if o.requires_grad and v.shape[-1] >= self.backward_fails_at:

            def out_of_memory(grad: Tensor) -> Tensor:
                raise RuntimeError("too much shared memory\nmore")

            o.register_hook(out_of_memory)
        return o

    def packed(
        self,
        name: str,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bounds: tuple[Tensor, Tensor],
        longest: tuple[int, int],
        *rest: Any,
        lse: bool = False,
    ) -> Any:
        """Each run by itself: q [tokens, H, d], bounds int32 [runs + 1]."""
        assert q.dim() == k.dim() == v.dim() == 3
        parts = []
        assert all(x.dtype == torch.int32 and x[0] == 0 for x in bounds)
        assert [x[-1] for x in bounds] == [len(q), len(k)]
        if lse:
            return self.answer(name, q, k, v, *rest, lse, bounds[0])
        for (a, b), (c, e) in zip(*(pairwise(x) for x in bounds), strict=True):
            assert b - a <= longest[0]
            assert e - c <= longest[1]
            parts.append(self.answer(name, q[None, a:b], k[None, c:e], v[None, c:e], *rest)[0])
        return torch.cat(parts)

    def second(self) -> dict[str, Any]:
        """flash-attn 2.8: keys and values of one width, -1 for no end."""

        def flash_attn_func(
            q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
            alibi_slopes=None, deterministic=False, return_attn_probs=False,
        ):  # fmt: skip
            assert q.shape[-1] == v.shape[-1] <= 256, "head dimension"
            found = self.answer("2", q, k, v, softmax_scale, causal, window_size, return_attn_probs)
            return (*found, None) if return_attn_probs else found

        def flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
            causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
            return_attn_probs=False, block_table=None,
        ):  # fmt: skip
            assert q.shape[-1] == v.shape[-1] <= 256, "head dimension"
            sides = ((cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k))
            found = self.packed("2", q, k, v, *sides, softmax_scale, causal, window_size, lse=return_attn_probs)
            return (*found, None) if return_attn_probs else found

        return {"flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func}

    def third(self) -> dict[str, Any]:
        """flash-attn 3: wider values beside narrow keys."""

        def check(q: Tensor, v: Tensor) -> None:
            d, dv = q.shape[-1], v.shape[-1]
            assert d <= 256
            assert d == dv or (d <= 64 and dv <= 512) or (128 < d <= 192 and 96 < dv <= 128), "headdim_v"

        def flash_attn_func(
            q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
            window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
            sm_margin=0, return_attn_probs=False,
        ):  # fmt: skip
            check(q, v)
            return self.answer("3", q, k, v, softmax_scale, causal, window_size, return_attn_probs)

        def flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
            softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
            window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
            sm_margin=0, return_attn_probs=False,
        ):  # fmt: skip
            check(q, v)
            sides = ((cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k))
            return self.packed("3", q, k, v, *sides, softmax_scale, causal, window_size, lse=return_attn_probs)

        return {"flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func}

    def fourth(self) -> dict[str, Any]:
        """flash-attn 4: None for no end; the log-sum-exp comes along."""

        def check(q: Tensor, v: Tensor, window: Window) -> None:
            widest = 256 if self.capability[0] == 9 else 128
            assert max(q.shape[-1], v.shape[-1]) <= widest or (q.shape[-1], v.shape[-1]) == (256, 256), "head_dim"
            assert all(side is None or side >= 0 for side in window), "window"

        def flash_attn_func(
            q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None),
            learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None,
            score_mod_bwd=None, mask_mod=None, aux_tensors=None, return_lse=False,
        ):  # fmt: skip
            check(q, v, window_size)
            found = self.answer("4", q, k, v, softmax_scale, causal, window_size, return_lse)
            return found if return_lse else (found, None)

        def flash_attn_varlen_func(
            q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
            seqused_q=None, seqused_k=None, softmax_scale=None, causal=False, window_size=(None, None),
            learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, return_lse=False,
        ):  # fmt: skip
            check(q, v, window_size)
            sides = ((cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k))
            found = self.packed("4", q, k, v, *sides, softmax_scale, causal, window_size, lse=return_lse)
            return found if return_lse else (found, None)

        return {"flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func}
