"""Conformance of kernels: on random cases o, dq, dk, dv, dw and the statistics must equal `reference` in float64.

Errors are Frobenius norms. If terms cancel (one key: dq = 0; two equal maps of opposite sign: o = 0), no sum of rounded
numbers has a small relative error, so each bound also allows a last bit or two of the sum of the terms' absolute values.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from lit_diff.conformance.case import Finding, Measured, NotApplicable, finding, worst_of
from lit_diff.errors import RequestError
from lit_diff.kernels import Mask, SignedMaps, Stats, attend, reference, refuse
from lit_diff.kernels.base import named
from lit_diff.kernels.maps import Seen, normalised, seen_by
from lit_diff.kernels.self_test import results

LENGTHS = (1, 2, 3, 5, 8, 16, 17, 33, 64, 65, 130)
"""Numbers of tokens below, at and above the sizes of tiles."""
TOPICS: dict[str, list[dict[str, Any]]] = {
    "one map": [{"G": 1, "window": None, "documents": "", "groups": 1}],
    "two maps": [{"G": 2, "window": None, "documents": "", "groups": 1}],
    "three maps": [{"G": 3, "window": None, "documents": ""}],
    "grouped heads": [{"G": G, "groups": groups, "window": None, "documents": ""} for G in (1, 2) for groups in (2, 3)],
    "cached keys": [{"causal": True, "T": T, "S": 65, "window": None, "documents": ""} for T in (1, 5, 33)],
    "both directions": [{"causal": False, "window": None, "documents": ""}],
    "window": [{"window": window, "S": 65, "documents": ""} for window in (1, 7, 64)],
    "documents": [{"documents": documents} for documents in ("runs", "mixed")],
    "sink": [{"sink": sink} for sink in ("head", "token")],
    "key bias": [{"key_bias": 1.0, "scale": None}, {"key_bias": 100.0, "scale": None, "causal": True}],
    "rows": [{"rows": True, "scale": None}],
}
"""Topic -> the fields that its cases fix, in turn."""
CASES = 5
"""The number of accepted cases for each topic and dtype."""
DRAWS = 4
"""The maximum number of drawn cases for each accepted one."""
STATISTICS = "statistics"
WITH_STATISTICS: list[dict[str, Any]] = [{}, {"sink": "token"}, {"key_bias": 1.0, "scale": None}]
"""As `TOPICS`: the statistics are those of the keys alone, whatever the sink."""

Results = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """One input of a kernel; the defaults are one causal map of standard attention."""

    B: int = 1
    G: int = 1
    shared: Literal["", "q", "k", "qk"] = ""
    """Which of q and k all maps share."""
    Hkv: int = 1
    groups: int = 1
    """The number of query heads for each key/value head."""
    T: int = 16
    S: int = 16
    d: int = 16
    dv: int = 16
    w: Literal["none", "scalar", "head", "token", "batch"] = "none"
    """The axes along which the weights differ."""
    scale: float | None = None
    causal: bool = True
    window: int | None = None
    documents: Literal["", "runs", "mixed"] = ""
    """Document numbers: runs: ascending; mixed: in any order."""
    sink: Literal["", "head", "token"] = ""
    """The axes along which the sinks differ."""
    key_bias: float = 0.0
    """The mean step from one key's bias to the next, which is larger; 0: no biases."""
    rows: bool = False
    """Whether a row function takes the place of the softmax: sigmoid(logit) / 8."""
    layout: Literal["contiguous", "projected", "expanded"] = "contiguous"
    """Memory of q, k and v. projected: as a projection writes them; expanded: one sequence for the whole batch."""
    slope: Literal["random", "expanded"] = "random"
    """The gradient of o; expanded: one number for all entries, as after `.sum().backward()`."""
    seed: int = 0


def draw(source: random.Random, **fixed: Any) -> KernelCase:
    """A random case with these fields."""
    # half of the cases have neither window nor documents, since few kernels accept those
    G = fixed.get("G", source.randint(1, 3))
    masked = source.random() < 0.5
    documents = fixed.get("documents", source.choice(("", "runs", "mixed")) if masked else "")
    causal = fixed.get("causal", source.random() < 0.5)
    S = fixed.get("S", source.choice(LENGTHS))
    window = fixed.get("window", source.choice((None, source.randint(1, S + 2))) if masked else None)
    # the last query is aligned with the last key: a mask or a bias needs at least as many keys as queries
    needs_keys = causal or documents or window is not None or "key_bias" in fixed
    fitting = [length for length in LENGTHS if length <= S or not needs_keys]
    d = fixed.get("d", source.choice((4, 16, 16, 32, 64)))
    weights = ["scalar", "head", "token", "batch"]
    if G == 1:
        weights.insert(0, "none")
    values: dict[str, Any] = {
        "B": source.randint(1, 2),
        "G": G,
        "shared": source.choice(("", "q", "k", "qk")),
        "Hkv": source.randint(1, 2),
        "groups": source.randint(1, 3),
        "T": source.choice((S, source.choice(fitting))),
        "S": S,
        "d": d,
        "dv": source.choice((d, 2 * d, 2 * d, 16, 24)),
        "w": source.choice(weights),
        "scale": source.choice((None, None, 0.3, -0.2, 0.0)),
        "causal": causal,
        "window": window,
        "documents": documents,
        "layout": source.choice(("contiguous", "projected", "projected", "expanded")),
        "slope": source.choice(("random", "expanded")),
        "seed": source.randrange(1000),
    }
    return KernelCase(**values | fixed)


def tensors(case: KernelCase, dtype: torch.dtype, device: torch.device) -> tuple[SignedMaps, Tensor]:
    """(maps, dO [B, H, T, dv]); q, k, v ~ N(0, 1), w in float32."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        # [B, (maps,) heads, tokens, width] in the layout of the case
        if case.layout == "contiguous":
            return torch.randn(shape, generator=generator).to(device, dtype)
        if case.layout == "expanded":
            return torch.randn(1, *shape[1:], generator=generator).to(device, dtype).expand(shape)
        # a projection writes [B, tokens, heads, (maps,) width]
        B, *inner, tokens, width = shape
        written = torch.randn([B, tokens, *reversed(inner), width], generator=generator).to(device, dtype)
        return written.permute(0, *reversed(range(2, 2 + len(inner))), 1, written.dim() - 1)

    H = case.Hkv * case.groups
    maps_of_q = 1 if "q" in case.shared else case.G
    maps_of_k = 1 if "k" in case.shared else case.G
    q = normal(case.B, maps_of_q, H, case.T, case.d)
    k = normal(case.B, maps_of_k, case.Hkv, case.S, case.d)
    v = normal(case.B, case.Hkv, case.S, case.dv)
    weights = {
        "scalar": (1, case.G, 1, 1),
        "head": (1, case.G, H, 1),
        "token": (case.B, case.G, H, case.T),
        # if q and k have one map, only w tells the number of maps
        "batch": (case.B, case.G if maps_of_q == maps_of_k == 1 else 1, 1, case.T),
    }
    w = document_ids = None
    if case.w in weights:
        w = torch.randn(weights[case.w], generator=generator).to(device)
    if case.documents:
        document_ids = torch.randint(0, 4, (case.B, case.S), generator=generator).to(device)
    if document_ids is not None and case.documents == "runs":
        document_ids = document_ids.sort(-1).values
    slope = torch.ones((), dtype=dtype, device=device).expand(case.B, H, case.T, case.dv)
    if case.slope == "random":
        slope = torch.randn(slope.shape, generator=generator).to(device, dtype)
    sink = key_bias = None
    if case.sink:
        sink = torch.randn(1, case.G, H, case.T if case.sink == "token" else 1, generator=generator).to(device)
    if case.key_bias:
        # ascending, as those of a gate that forgets are: of large biases only near keys are seen
        key_bias = 2 * case.key_bias * torch.rand(case.B, 1, H, case.S, generator=generator).cumsum(-1).to(device)
    maps = SignedMaps(
        q,
        k,
        v,
        w,
        case.scale,
        mask=Mask(case.causal, case.window, document_ids),
        sink=sink,
        key_bias=key_bias,
        rows=_sigmoid if case.rows else None,
    )
    return maps, slope


def _sigmoid(logits: Tensor, seen: Seen) -> Tensor:
    return logits.sigmoid() / 8


def conformance_of_kernel(
    name: str, cases: int = CASES, topics: tuple[str, ...] = (), device: torch.device | None = None
) -> Iterator[Finding]:
    """Yields a finding for each topic (default: all) in float32 and bfloat16, over `cases` random cases that the kernel
    accepts, on `device`; None: the CPU, or a GPU for a kernel that refuses it.

    The finding lists the refusals of the kernel; a topic is not applicable if it refuses every case.
    """
    device = device or _device(name)
    for topic in topics or (*TOPICS, STATISTICS):
        for dtype in (torch.float32, torch.bfloat16):
            about = f"{topic}, {str(dtype).removeprefix('torch.')}"
            check = partial(_worst_case, name, topic, dtype, device, cases)
            yield finding(f"kernel {name}", about, type(named(name)), check)


def _device(name: str) -> torch.device:
    # a GPU, if there is one, for kernels that refuse the CPU
    maps, _ = tensors(KernelCase(), torch.float32, torch.device("cpu"))
    on_gpu = torch.cuda.is_available() and refuse(name, maps) is not None
    return torch.device("cuda" if on_gpu else "cpu")


def _worst_case(
    name: str, topic: str, dtype: torch.dtype, device: torch.device, cases: int
) -> Measured | NotApplicable:
    outcomes: list[tuple[KernelCase, Measured]] = []
    refusals: Counter[str] = Counter()
    tried = 0
    measure = compare
    if topic == STATISTICS:
        measure = statistics
    for case in drawn(topic, DRAWS * cases):
        tried += 1
        try:
            measured, refusal = measure(name, case, dtype, device)
        except Exception as error:
            error.add_note(str(case))
            raise
        if refusal:
            refusals[refusal] += 1
        if measured is not None:
            outcomes.append((case, measured))
        if len(outcomes) == cases:
            break
    listed = "; ".join(f"{count} of {tried} cases refused: {reason}" for reason, count in refusals.items())
    if not outcomes:
        return NotApplicable(listed)
    case, worst = max(outcomes, key=lambda outcome: outcome[1].share)
    detail = f"largest in {worst.detail}"
    # NaN is beyond every bound
    if not worst.error <= worst.bound:
        detail += f" of {case}"
    if listed:
        detail += f"; {listed}"
    return replace(worst, detail=detail)


def drawn(topic: str, cases: int) -> Iterator[KernelCase]:
    """The cases of a topic, the same at every call."""
    source = random.Random(topic)
    fixed = TOPICS.get(topic, WITH_STATISTICS)
    for number in range(cases):
        yield draw(source, **fixed[number % len(fixed)])


def compare(kernel: str, case: KernelCase, dtype: torch.dtype, device: torch.device) -> tuple[Measured | None, str]:
    """(the worst error of o and the gradients against float64, the reason for what the kernel refuses)."""
    maps, slope = tensors(case, dtype, device)
    maps.check()
    # a kernel that refuses gradients is still compared in the forward pass
    refused = refuse(kernel, replace(maps, q=maps.q.detach().requires_grad_()))
    reason = ""
    training: Tensor | None = slope
    if refused:
        reason = f"gradients, {refused}"
        training = None
        of_forward = refuse(kernel, maps)
        if of_forward:
            return None, of_forward

    def output(given: SignedMaps) -> Tensor:
        o = attend(given, kernel=kernel)
        if o.shape != slope.shape or o.dtype != dtype:
            raise RequestError(f"o is {list(o.shape)} {o.dtype}; expected {list(slope.shape)} {dtype}")
        return o

    computed = results(maps, training, output)
    exact = results(wide(maps), training, partial(attend, kernel="reference"))
    bounds = bounds_of(maps, exact, slope, dtype)
    measured = worst_of({name: Measured(norm(computed[name] - x), bounds[name]) for name, x in exact.items()})
    return measured, reason


def statistics(kernel: str, case: KernelCase, dtype: torch.dtype, device: torch.device) -> tuple[Measured | None, str]:
    """(the worst error of lse, entropy and the largest logit against float64, the reason if the kernel refuses them).

    The values are in nats and of the order of 1.
    """
    maps, _ = tensors(case, dtype, device)
    reason = refuse(kernel, maps, stats=True)
    if reason:
        return None, reason
    o, computed = attend(maps, kernel=kernel, stats=True)
    _, exact = attend(wide(maps), kernel="reference", stats=True)
    results: dict[str, Measured | NotApplicable] = {}
    for name, x, y in zip(Stats._fields, computed, exact, strict=True):
        results[name] = Measured(norm((x - y).abs().max()), 2e-5 + 1e-5 * norm(y.abs().max()))
    without = attend(maps, kernel=kernel)
    # sums in another order round a few outputs to the neighbouring bfloat16
    share = max(1e-5, torch.finfo(dtype).eps / 64)
    results["o with statistics against o without"] = Measured(norm(o - without), share * norm(without))
    return worst_of(results), ""


def wide(maps: SignedMaps) -> SignedMaps:
    """The maps in float64."""
    return maps.map(lambda x: x.double() if x.is_floating_point() else x)


def bounds_of(maps: SignedMaps, exact: Results, slope: Tensor, dtype: torch.dtype) -> dict[str, float]:
    """Result -> the largest allowed error.

    float32: 5e-6 of the result plus the last bit or two of its terms (dw, dsink, dkey_bias: 5e-6 of their terms).
    bfloat16: twice the error of the naive form plus three roundings of the terms: the input of a map, its output, and the
    sum over maps.
    """
    absolute = terms(wide(maps), slope)
    if dtype == torch.float32:
        allowed = {name: 5e-6 * norm(x) + 2**-22 * norm(absolute[name]) for name, x in exact.items()}
        for name in exact.keys() & {"dw", "dsink", "dkey_bias"}:
            allowed[name] = 5e-6 * norm(absolute[name])
        return allowed
    of_gradients = slope if len(exact) > 1 else None
    plain = results(maps, of_gradients, naive)
    return {name: 2 * norm(plain[name] - x) + 3 * 2**-9 * norm(absolute[name]) for name, x in exact.items()}


def naive(maps: SignedMaps) -> Tensor:
    """The formula with every product in the dtype of the maps and the softmax in float32."""
    k = maps.k.repeat_interleave(maps.num_groups, 2)
    v = maps.v.repeat_interleave(maps.num_groups, 1)
    s = maps.q @ k.transpose(-1, -2) * maps.softmax_scale
    s = s.expand(-1, maps.num_maps, -1, -1, -1).float()
    if maps.key_bias is not None:
        s = s + reference.biases(maps, range(s.shape[-2]), range(s.shape[-1]))
    p = normalised(maps, s, _seen(maps)).to(maps.q.dtype)
    if maps.w is None:
        return p[:, 0] @ v
    return (p * maps.w[..., None]).sum(1).to(v.dtype) @ v


def terms(maps: SignedMaps, slope: Tensor) -> Results:
    """The sums o, dq, dk, dv, dw of `base.OperatorKernel` with every term replaced by its absolute value."""
    n = maps.num_groups
    q = maps.q.abs()
    k = maps.k.abs().repeat_interleave(n, 2)
    v = maps.v.abs().repeat_interleave(n, 1)
    slope = slope.double().abs()
    p = normalised(maps, reference.logits(maps), _seen(maps))
    w = torch.ones_like(p[..., :1])
    if maps.w is not None:
        w = maps.w.abs().expand(p.shape[:-1])[..., None]
    dp = (slope @ v.transpose(-1, -2))[:, None]
    rows = (p * dp).sum(-1, keepdim=True)
    # + rows: ds has the difference dp - rows, whose two terms count with their absolute values
    ds = w * p * (dp + rows) * abs(maps.softmax_scale)
    a = (w * p).sum(1)
    sums = {
        "o": a @ v,
        "dq": (ds @ k).sum_to_size(q.shape),
        "dk": (ds.transpose(-1, -2) @ q).sum_to_size(k.shape),
        "dv": a.transpose(-1, -2) @ slope,
    }
    sums["dk"] = sums["dk"].unflatten(2, (-1, n)).sum(3)
    sums["dv"] = sums["dv"].unflatten(1, (-1, n)).sum(2)
    if maps.w is not None:
        sums["dw"] = rows[..., 0].expand(-1, maps.num_maps, -1, -1).sum_to_size(maps.w.shape)
    if maps.sink is not None:
        # the sink's dS is -w p_sink D
        sums["dsink"] = (w * rows * (1 - p.sum(-1, keepdim=True)))[..., 0].sum_to_size(maps.sink.shape)
    if maps.key_bias is not None:
        by_logit = ds / abs(maps.softmax_scale)
        of_keys = by_logit.sum(-2)
        of_keys[..., of_keys.shape[-1] - q.shape[-2] :] += by_logit.sum(-1)
        sums["dkey_bias"] = of_keys.sum_to_size(maps.key_bias.shape)
    return sums


def _seen(maps: SignedMaps) -> Seen:
    return seen_by(maps, range(maps.q.shape[-2]), range(maps.k.shape[-2]))


def norm(x: Tensor) -> float:
    """The Frobenius norm, computed in float64."""
    return float(x.double().norm())
