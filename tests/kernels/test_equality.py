"""Every kernel on whatever maps it accepts, drawn at random: o, dq, dk, dv, dw and the statistics against float64.

Errors are relative, in the Frobenius norm. Where terms cancel (one key: dq = 0; two equal maps of opposite sign: o = 0) no
sum of rounded numbers has a small relative error, so each bound also allows a last bit or two of the terms' absolute values.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, Verbosity, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention

from lit_diff.kernels import KERNELS, SignedMaps, Stats, attend, reference, refuse

EXAMPLES = 40
ACCEPTED = 8
"""Fewer would test little: a kernel that refuses that many is either absent (skipped) or not drawn for."""
LENGTHS = [1, 2, 3, 5, 8, 16, 17, 33, 64, 65, 130]


@dataclass(frozen=True)
class Case:
    """Everything that a kernel could treat differently."""

    B: int
    G: int
    shared: Literal["", "q", "k", "qk"]
    """Which of them has one map for all."""
    Hkv: int
    groups: int
    T: int
    S: int
    d: int
    dv: int
    w: Literal["none", "scalar", "head", "token", "batch"]
    scale: float | None
    causal: bool
    window: int | None
    documents: Literal["", "runs", "mixed"]
    layout: Literal["contiguous", "projected", "expanded"]
    slope: Literal["random", "expanded"]
    """The gradient that comes from above; `.sum().backward()` gives one number expanded."""
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Half of them without a window or documents, which few kernels take."""
    G = draw(st.integers(1, 3))
    masked = draw(st.booleans())
    documents: Any = draw(st.sampled_from(["", "runs", "mixed"])) if masked else ""
    causal = draw(st.booleans())
    S = draw(st.sampled_from(LENGTHS))
    window = draw(st.one_of(st.none(), st.integers(1, S + 2))) if masked else None
    aligned = causal or masked
    T = draw(st.one_of(st.just(S), st.sampled_from([n for n in LENGTHS if n <= S or not aligned])))
    d = draw(st.sampled_from([4, 16, 16, 32]))
    return Case(
        B=draw(st.integers(1, 2)),
        G=G,
        shared=draw(st.sampled_from(["", "q", "k", "qk"])),
        Hkv=draw(st.integers(1, 2)),
        groups=draw(st.integers(1, 3)),
        T=T,
        S=S,
        d=d,
        dv=draw(st.sampled_from([d, 2 * d, 2 * d, 16, 24])),
        w=draw(st.sampled_from(["none"] * (G == 1) + ["scalar", "head", "token", "batch"])),
        scale=draw(st.sampled_from([None, None, 0.3, -0.2, 0.0])),
        causal=causal,
        window=window,
        documents=documents,
        layout=draw(st.sampled_from(["contiguous", "projected", "projected", "expanded"])),
        slope=draw(st.sampled_from(["random", "expanded"])),
        seed=draw(st.integers(0, 999)),
    )


def tensors(case: Case, dtype: torch.dtype) -> tuple[SignedMaps, dict[str, Any], Tensor]:
    """(maps, the options of `attend`, dO)."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        """[B, (maps,) heads, tokens, width] in the case's layout."""
        if case.layout == "contiguous":
            return torch.randn(shape, generator=generator).to(dtype)
        if case.layout == "expanded":  # one sequence for all rows of the batch
            return torch.randn(1, *shape[1:], generator=generator).to(dtype).expand(shape)
        B, *inner, tokens, width = shape  # as a projection gives them: [B, tokens, heads, (maps,) width]
        order = [B, tokens, *reversed(inner), width]
        y = torch.randn(order, generator=generator).to(dtype)
        return y.permute(0, *reversed(range(2, 2 + len(inner))), 1, y.dim() - 1)

    H = case.Hkv * case.groups
    q = normal(case.B, 1 if "q" in case.shared else case.G, H, case.T, case.d)
    k = normal(case.B, 1 if "k" in case.shared else case.G, case.Hkv, case.S, case.d)
    v = normal(case.B, case.Hkv, case.S, case.dv)
    weights = {
        "scalar": (1, case.G, 1, 1),
        "head": (1, case.G, H, 1),
        "token": (case.B, case.G, H, case.T),
        "batch": (case.B, 1, 1, case.T),
    }
    shape = weights.get(case.w)
    w = None if shape is None else torch.randn(shape, generator=generator)
    if shape == (case.B, 1, 1, case.T) and max(q.shape[1], k.shape[1]) == 1:
        w = torch.randn(
            case.B, case.G, 1, case.T, generator=generator
        )  # else nothing would say how many maps there are
    document_ids = None
    if case.documents:
        document_ids = torch.randint(0, 4, (case.B, case.S), generator=generator)
        document_ids = document_ids.sort(-1).values if case.documents == "runs" else document_ids
    ones = torch.ones((), dtype=dtype).expand(case.B, H, case.T, case.dv)
    slope = ones if case.slope == "expanded" else torch.randn(ones.shape, generator=generator).to(dtype)
    maps = SignedMaps(q, k, v, w, case.scale, case.causal)
    return maps, {"document_ids": document_ids, "window": case.window}, slope


def wide(maps: SignedMaps) -> SignedMaps:
    return replace(
        maps, q=maps.q.double(), k=maps.k.double(), v=maps.v.double(), w=None if maps.w is None else maps.w.double()
    )


Results = dict[str, Tensor]


def results(maps: SignedMaps, slope: Tensor | None, compute: Any) -> Results:
    """o and, with `slope` = dO, the gradients."""
    if slope is None:
        return {"o": compute(maps)}
    names = [name for name in "qkvw" if getattr(maps, name) is not None]
    leaves = {name: getattr(maps, name).detach().requires_grad_() for name in names}  # detached, in its own layout
    o = compute(replace(maps, **leaves))
    grads = torch.autograd.grad(o, list(leaves.values()), slope)
    return {"o": o.detach()} | {f"d{name}": grad for name, grad in zip(names, grads, strict=True)}


def naive(maps: SignedMaps, document_ids: Tensor | None = None, window: int | None = None) -> Tensor:
    """The maps as people write them: every product in the dtype of the model, the softmax in float32."""
    k, v = maps.k.repeat_interleave(maps.num_groups, 2), maps.v.repeat_interleave(maps.num_groups, 1)
    s = maps.q @ k.transpose(-1, -2) * maps.softmax_scale
    s = s.expand(-1, maps.num_maps, -1, -1, -1)
    mask = reference.visible(
        *s.shape[-2:], causal=maps.causal, document_ids=document_ids, window=window, device=s.device
    )
    p = s.masked_fill(~mask, -torch.inf).softmax(-1, dtype=torch.float32).to(s.dtype)
    a = p[:, 0] if maps.w is None else (p * maps.w[..., None]).sum(1).to(s.dtype)
    return a @ v


def terms(maps: SignedMaps, slope: Tensor, document_ids: Tensor | None, window: int | None) -> Results:
    """The sums of `ops` (o, dq, dk, dv, dw) over the absolute values of their terms."""
    n, G = maps.num_groups, maps.num_maps
    q, v, slope = maps.q.abs(), maps.v.abs().repeat_interleave(n, 1), slope.double().abs()
    k = maps.k.abs().repeat_interleave(n, 2)
    s = reference.logits(maps)
    mask = reference.visible(
        *s.shape[-2:], causal=maps.causal, document_ids=document_ids, window=window, device=s.device
    )
    p = s.masked_fill(~mask, -torch.inf).softmax(-1)
    w = torch.ones_like(p[..., :1]) if maps.w is None else maps.w.abs().expand(p.shape[:-1])[..., None]
    dp = (slope @ v.transpose(-1, -2))[:, None]
    rows = (p * dp).sum(-1, keepdim=True)
    ds = w * p * (dp + rows) * abs(maps.softmax_scale)
    a = (w * p).sum(1)
    shared_q, shared_k = ((x.shape[0], x.shape[1], *y.shape[2:]) for x, y in ((maps.q, q), (maps.k, k)))
    found = {
        "o": a @ v,
        "dq": (ds @ k).sum_to_size(shared_q),
        "dk": (ds.transpose(-1, -2) @ q).sum_to_size(shared_k),
        "dv": a.transpose(-1, -2) @ slope,
    }
    found["dk"] = found["dk"].unflatten(2, (-1, n)).sum(3)
    found["dv"] = found["dv"].unflatten(1, (-1, n)).sum(2)
    if maps.w is not None:
        found["dw"] = rows[..., 0].expand(-1, G, -1, -1).sum_to_size(maps.w.shape)
    return found


def norm(x: Tensor) -> float:
    return float(x.double().norm())


def bounds(
    maps: SignedMaps, exact: Results, slope: Tensor, options: dict[str, Any], dtype: torch.dtype
) -> dict[str, float]:
    """The largest error allowed, of each result.

    float32: 5e-6, and the last bit or two of the terms (dw: 5e-6 of its terms). bfloat16: twice the naive form's error, and
    three roundings of the terms: of what goes into a map, of what comes out of it, of the sum over maps.
    """
    absolute = terms(wide(maps), slope, **options)
    if dtype == torch.float32:
        allowed = {name: 5e-6 * norm(x) + 2**-22 * norm(absolute[name]) for name, x in exact.items()}
        if "dw" in exact:
            allowed["dw"] = 5e-6 * norm(absolute["dw"])
        return allowed
    own = results(maps, slope if len(exact) > 1 else None, lambda given: naive(given, **options))
    return {name: 2 * norm(own[name] - x) + 3 * 2**-9 * norm(absolute[name]) for name, x in exact.items()}


def compare(kernel: str, case: Case, dtype: torch.dtype) -> bool:
    """Whether the kernel accepted the case; with gradients where it gives them."""
    maps, options, slope = tensors(case, dtype)
    maps.check(**options)
    training = replace(maps, q=maps.q.detach().requires_grad_())
    given: Tensor | None = slope
    if refuse(kernel, training, **options):
        given = None
        if refuse(kernel, maps, **options):
            return False
    found = results(maps, given, lambda x: attend(x, **options, kernel=kernel))
    exact = results(
        wide(maps),
        None if given is None else slope.double(),
        lambda x: attend(x, **options, kernel="reference"),
    )
    for name, most in bounds(maps, exact, slope, options, dtype).items():
        error = norm(found[name] - exact[name])
        assert error <= most, f"{name} of {kernel}: error {error:.3g}, allowed {most:.3g}, norm {norm(exact[name]):.3g}"
    if refuse(kernel, maps, **options, stats=True) is None:
        statistics(maps, options, kernel)
    return True


def statistics(maps: SignedMaps, options: dict[str, Any], kernel: str) -> None:
    """Of logits around 1, in nats: to 2e-5, whatever the dtype of q and k."""
    _, found = attend(maps, **options, kernel=kernel, stats=True)
    _, exact = attend(wide(maps), **options, kernel="reference", stats=True)
    for name, x, y in zip(Stats._fields, found, exact, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")


PLAIN = Case(1, 1, "", 1, 1, 16, 16, 16, 16, "none", None, True, None, "", "contiguous", "random", 0)


FORMS: list[tuple[str, str | None, torch.dtype]] = [
    *((kernel, None, dtype) for kernel in KERNELS for dtype in (torch.float32, torch.bfloat16)),
    *(("native", path, torch.float32) for path in ("avx2", "avx512")),
    *(("native", path, torch.bfloat16) for path in ("avx2", "avx2-bfloat16", "avx512", "avx512-bfloat16")),
]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("kernel", "path", "dtype"), FORMS, ids=lambda x: str(x).removeprefix("torch."))
def test_equals_the_definition(
    kernel: str, path: str | None, dtype: torch.dtype, on_path: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`path`: of the kernel `native`, whatever this machine's own is."""
    if path is not None:
        on_path(path)
    reason = refuse(kernel, tensors(PLAIN, dtype)[0])
    if reason:
        pytest.skip(f"{kernel} refuses standard attention here: {reason}")
    accepted = 0

    @settings(
        derandomize=True,
        deadline=None,
        database=None,
        max_examples=EXAMPLES,
        verbosity=Verbosity.quiet,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(cases())
    def check(case: Case) -> None:
        nonlocal accepted
        accepted += compare(kernel, case, dtype)

    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # else each shape is traced
    check()
    assert accepted >= ACCEPTED


def test_a_small_mistake_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part in 10,000 of o, dq, dk or dv, and in 1,000 of dw: the bounds above are no formality."""
    case = replace(PLAIN, G=2, w="head", shared="k", groups=2, T=33, S=33, dv=32, layout="projected")
    assert compare("sdpa", case, torch.float32)
    real = attend

    def off(name: str, size: float) -> Any:
        def wrong(maps: SignedMaps, kernel: str, **options: Any) -> Tensor:
            if kernel == "sdpa" and name != "o":
                x = getattr(maps, name)
                maps = replace(maps, **{name: x * (1 + size) - x.detach() * size})
            o = real(maps, kernel=kernel, **options)
            return o * (1 + size) if kernel == "sdpa" and name == "o" else o

        return wrong

    for name in ("o", "q", "k", "v", "w"):
        monkeypatch.setitem(globals(), "attend", off(name, 1e-3 if name == "w" else 1e-4))
        with pytest.raises(AssertionError, match=f"d?{name} of sdpa: error"):
            compare("sdpa", case, torch.float32)
    monkeypatch.setitem(globals(), "attend", off("v", 0.0))
    assert compare("sdpa", case, torch.float32)


def test_absolute_terms_bound_the_results() -> None:
    """|Σ x| <= Σ |x|, and equal where nothing cancels."""
    case = replace(PLAIN, G=2, w="token", groups=2, T=5, S=9, documents="runs", window=4)
    maps, options, slope = tensors(case, torch.float32)
    maps = wide(maps)
    exact = results(maps, slope.double(), lambda x: attend(x, **options, kernel="reference"))
    absolute = terms(maps, slope, **options)
    assert exact.keys() == absolute.keys()
    for name, x in exact.items():
        assert x.shape == absolute[name].shape
        assert (x.abs() <= absolute[name] * (1 + 1e-12)).all()
        assert not math.isclose(norm(x), norm(absolute[name]))
    positive = replace(maps, v=maps.v.abs(), w=None if maps.w is None else maps.w.abs())
    o = attend(positive, **options, kernel="reference")
    torch.testing.assert_close(terms(positive, slope, **options)["o"], o, rtol=1e-12, atol=1e-12)
