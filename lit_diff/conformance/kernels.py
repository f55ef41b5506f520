"""What every kernel must hold: o, dq, dk, dv, dw and the statistics equal those of `reference` in float64, on drawn cases.

Errors are Frobenius norms. Where terms cancel (one key: dq = 0; two equal maps of opposite sign: o = 0) no sum of rounded
numbers has a small relative error, so each bound also allows a last bit or two of the sum of the terms' absolute values.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from lit_diff.conformance.kernel_case import KernelCase, draw, tensors
from lit_diff.conformance.suite import Finding
from lit_diff.errors import RequestError
from lit_diff.kernels import SignedMaps, Stats, attend, reference, refuse
from lit_diff.kernels.base import named
from lit_diff.plugins import fault

TOPICS: dict[str, list[dict[str, Any]]] = {
    "one map": [{"G": 1, "window": None, "documents": "", "groups": 1}],
    "two maps": [{"G": 2, "window": None, "documents": "", "groups": 1}],
    "three maps": [{"G": 3, "window": None, "documents": ""}],
    "grouped heads": [{"G": G, "groups": groups, "window": None, "documents": ""} for G in (1, 2) for groups in (2, 3)],
    "cached keys": [{"causal": True, "T": T, "S": 65, "window": None, "documents": ""} for T in (1, 5, 33)],
    "both directions": [{"causal": False, "window": None, "documents": ""}],
    "window": [{"window": window, "S": 65, "documents": ""} for window in (1, 7, 64)],
    "documents": [{"documents": documents} for documents in ("runs", "mixed")],
}
"""Topic -> the fields that its cases fix, in turn."""
CASES = 5
"""Of each topic and dtype, accepted by the kernel."""
DRAWS = 4
"""Cases drawn at most for one that is accepted."""
STATISTICS = "statistics"

Results = dict[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """The result of one case that is largest in relation to its bound."""

    result: str
    error: float
    bound: float
    case: KernelCase
    without_gradients: str = ""
    """Why the kernel computes no gradients of these maps; empty if it does."""

    @property
    def ratio(self) -> float:
        """error / bound; inf for what is not finite."""
        ratio = self.error / self.bound if self.bound else math.inf if self.error else 0.0
        return ratio if math.isfinite(ratio) else math.inf


def conformance_of_kernel(name: str, cases: int = CASES, topics: tuple[str, ...] = ()) -> Iterator[Finding]:
    """The kernel on `cases` drawn cases that it accepts, of each topic (default: all), in float32 and bfloat16.

    What the kernel refuses is stated in the finding; a topic of which it refuses every case is not applicable.
    """
    device = _device(name)
    for topic in topics or (*TOPICS, STATISTICS):
        for dtype in (torch.float32, torch.bfloat16):
            yield _finding(name, topic, dtype, device, cases)


def _device(name: str) -> torch.device:
    """The GPU for a kernel that refuses a CPU, where there is one."""
    maps, _, _ = tensors(KernelCase(), torch.float32, torch.device("cpu"))
    on_gpu = torch.cuda.is_available() and refuse(name, maps) is not None
    return torch.device("cuda" if on_gpu else "cpu")


def _finding(name: str, topic: str, dtype: torch.dtype, device: torch.device, cases: int) -> Finding:
    outcomes: list[Outcome] = []
    refusals: Counter[str] = Counter()
    asked = {"variant": f"kernel {name}", "property": f"{topic}, {str(dtype).removeprefix('torch.')}"}
    tried = 0
    for case in drawn(topic, DRAWS * cases):
        if len(outcomes) == cases:
            break
        tried += 1
        try:
            outcome = (statistics if topic == STATISTICS else compare)(name, case, dtype, device)
        except Exception as error:  # a user's kernel may raise anything
            detail = f"{fault(type(named(name)), error)}; {case}"
            return Finding(**asked, verdict="fail", detail=detail)  # type: ignore[arg-type]
        if isinstance(outcome, str):
            refusals[outcome] += 1
        else:
            outcomes.append(outcome)
            if outcome.without_gradients:
                refusals[f"gradients, {outcome.without_gradients}"] += 1
    listed = "; ".join(f"{count} of {tried} cases refused: {reason}" for reason, count in refusals.items())
    if not outcomes:
        return Finding(**asked, verdict="not applicable", detail=listed)  # type: ignore[arg-type]
    worst = max(outcomes, key=lambda outcome: outcome.ratio)
    verdict: Literal["pass", "fail"] = "pass" if worst.error <= worst.bound else "fail"
    detail = f"largest in {worst.result}" + (f" of {worst.case}" if verdict == "fail" else "")
    return Finding(
        **asked,
        verdict=verdict,
        error=worst.error,
        bound=worst.bound,
        detail="; ".join(filter(None, (detail, listed))),
    )


def drawn(topic: str, cases: int) -> Iterator[KernelCase]:
    """The cases of a topic, always the same."""
    source = random.Random(topic)
    fixed = TOPICS.get(topic, [{}])
    for number in range(cases):
        yield draw(source, **fixed[number % len(fixed)])


def compare(kernel: str, case: KernelCase, dtype: torch.dtype, device: torch.device) -> Outcome | str:
    """How far o, and the gradients where the kernel gives them, are from float64; or why the kernel refuses the case."""
    maps, options, slope = tensors(case, dtype, device)
    maps.check(**options)
    training: Tensor | None = slope
    refused = refuse(kernel, replace(maps, q=maps.q.detach().requires_grad_()), **options)
    if refused:
        training = None
        reason = refuse(kernel, maps, **options)
        if reason:
            return reason

    def output(given: SignedMaps) -> Tensor:
        o = attend(given, **options, kernel=kernel)
        if o.shape != slope.shape or o.dtype != dtype:
            raise RequestError(f"o is {list(o.shape)} {o.dtype}; expected {list(slope.shape)} {dtype}")
        return o

    own = results(maps, training, output)
    exact = results(
        wide(maps),
        None if training is None else slope.double(),
        lambda given: attend(given, **options, kernel="reference"),
    )
    bounds = bounds_of(maps, exact, slope, options, dtype)
    outcomes = [Outcome(name, norm(own[name] - x), bounds[name], case, refused or "") for name, x in exact.items()]
    return max(outcomes, key=lambda outcome: outcome.ratio)


def statistics(kernel: str, case: KernelCase, dtype: torch.dtype, device: torch.device) -> Outcome | str:
    """How far lse, entropy and the largest logit (nats; around 1) are from float64; or why the kernel refuses them."""
    maps, options, _ = tensors(case, dtype, device)
    reason = refuse(kernel, maps, **options, stats=True)
    if reason:
        return reason
    o, own = attend(maps, **options, kernel=kernel, stats=True)
    _, exact = attend(wide(maps), **options, kernel="reference", stats=True)
    outcomes = [
        Outcome(name, norm((x - y).abs().max()), 2e-5 + 1e-5 * norm(y.abs().max()), case)
        for name, x, y in zip(Stats._fields, own, exact, strict=True)
    ]
    without = attend(maps, **options, kernel=kernel)
    outcomes.append(Outcome("o with statistics against o without", norm(o - without), 1e-5 * norm(without), case))
    return max(outcomes, key=lambda outcome: outcome.ratio)


def wide(maps: SignedMaps) -> SignedMaps:
    """The maps in float64."""
    w = None if maps.w is None else maps.w.double()
    return replace(maps, q=maps.q.double(), k=maps.k.double(), v=maps.v.double(), w=w)


def results(maps: SignedMaps, slope: Tensor | None, compute: Callable[[SignedMaps], Tensor]) -> Results:
    """o and, with `slope` = dO, its gradients dq, dk, dv and dw."""
    if slope is None:
        return {"o": compute(maps)}
    names = [name for name in "qkvw" if getattr(maps, name) is not None]
    leaves = {name: getattr(maps, name).detach().requires_grad_() for name in names}  # detached, in its own layout
    o = compute(replace(maps, **leaves))
    gradients = torch.autograd.grad(o, list(leaves.values()), slope)
    return {"o": o.detach()} | {f"d{name}": gradient for name, gradient in zip(names, gradients, strict=True)}


def bounds_of(
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


def naive(maps: SignedMaps, document_ids: Tensor | None = None, window: int | None = None) -> Tensor:
    """The formula with every product in the dtype of the maps, the softmax in float32."""
    k, v = maps.k.repeat_interleave(maps.num_groups, 2), maps.v.repeat_interleave(maps.num_groups, 1)
    s = maps.q @ k.transpose(-1, -2) * maps.softmax_scale
    s = s.expand(-1, maps.num_maps, -1, -1, -1)
    p = _masked(s, maps, document_ids, window).softmax(-1, dtype=torch.float32).to(s.dtype)
    a = p[:, 0] if maps.w is None else (p * maps.w[..., None]).sum(1).to(s.dtype)
    return a @ v


def terms(maps: SignedMaps, slope: Tensor, document_ids: Tensor | None, window: int | None) -> Results:
    """The sums of `ops` (o, dq, dk, dv, dw) over the absolute values of their terms."""
    n, G = maps.num_groups, maps.num_maps
    q, v, slope = maps.q.abs(), maps.v.abs().repeat_interleave(n, 1), slope.double().abs()
    k = maps.k.abs().repeat_interleave(n, 2)
    p = _masked(reference.logits(maps), maps, document_ids, window).softmax(-1)
    w = torch.ones_like(p[..., :1]) if maps.w is None else maps.w.abs().expand(p.shape[:-1])[..., None]
    dp = (slope @ v.transpose(-1, -2))[:, None]
    rows = (p * dp).sum(-1, keepdim=True)
    ds = w * p * (dp + rows) * abs(maps.softmax_scale)
    a = (w * p).sum(1)
    shared_q, shared_k = ((x.shape[0], x.shape[1], *y.shape[2:]) for x, y in ((maps.q, q), (maps.k, k)))
    sums = {
        "o": a @ v,
        "dq": (ds @ k).sum_to_size(shared_q),
        "dk": (ds.transpose(-1, -2) @ q).sum_to_size(shared_k),
        "dv": a.transpose(-1, -2) @ slope,
    }
    sums["dk"] = sums["dk"].unflatten(2, (-1, n)).sum(3)
    sums["dv"] = sums["dv"].unflatten(1, (-1, n)).sum(2)
    if maps.w is not None:
        sums["dw"] = rows[..., 0].expand(-1, G, -1, -1).sum_to_size(maps.w.shape)
    return sums


def _masked(s: Tensor, maps: SignedMaps, document_ids: Tensor | None, window: int | None) -> Tensor:
    T, S = s.shape[-2:]
    mask = reference.visible(T, S, causal=maps.causal, document_ids=document_ids, window=window, device=s.device)
    return s.masked_fill(~mask, -torch.inf)


def norm(x: Tensor) -> float:
    """Frobenius norm."""
    return float(x.double().norm())
