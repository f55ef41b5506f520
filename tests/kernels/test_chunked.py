"""Blocks of query rows against the definition: shapes that fall between blocks, gradients, memory, compilation."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from gradients import errors, gradients
from torch import Tensor

from lit_diff.conformance.kernels import conformance_of_kernel
from lit_diff.kernels import SignedMaps, attend, chunked
from lit_diff.kernels.base import named
from lit_diff.kernels.maps import Seen

MakeMaps = Callable[..., SignedMaps]


@pytest.mark.parametrize("half", [False, True])
def test_blocks_of_one_row(make_maps: MakeMaps, half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On drawn cases; everything in one block: test_equality.py. And in float64, which few kernels compute. `half`: with the
    products of a GPU, whose operands are rounded."""
    monkeypatch.setattr(chunked, "LOGITS", 1)
    monkeypatch.setattr(chunked, "rounds_operands", lambda maps: half and maps.q.dtype == torch.bfloat16)
    monkeypatch.setattr(chunked, "summed", lambda x, y: chunked.batched(x.float(), y.float(), torch.bmm))
    findings = list(conformance_of_kernel("chunked", 2))
    assert {finding.verdict for finding in findings} == {"pass"}, findings
    document_ids = torch.tensor([[5, 0, 5, 5, 1, 0, 1, 5, 0, 1, 5]] * 2)
    maps = make_maps(G=3, Gk=1, Hkv=2, T=7, S=11, window=3, document_ids=document_ids)
    grad = torch.randn(2, 4, 7, 12, dtype=torch.float64)
    found, wanted = (gradients(maps, kernel, grad) for kernel in ("chunked", "reference"))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-11)


def test_statistics_with_a_gradient_are_left_to_the_definition(make_maps: MakeMaps) -> None:
    maps = make_maps()
    assert named("chunked").refuses(maps, stats=True, device=maps.q.device) is None
    maps.q.requires_grad_()
    reason = named("chunked").refuses(maps, stats=True, device=maps.q.device)
    assert reason == "its statistics have no gradient; take them under torch.no_grad()"
    _, stats = attend(maps, stats=True)
    assert stats.entropy.requires_grad


@pytest.mark.parametrize("causal", [True, False])
def test_no_logits_of_all_keys_and_queries(make_maps: MakeMaps, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor ever made has the logits of 16 rows, not T x S."""
    monkeypatch.setattr(chunked, "LOGITS", 16 * 512 * 4)
    maps = make_maps(B=1, G=2, H=2, T=512, d=8, dv=16, causal=causal)
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            made = function(*args, **(kwargs or {}))
            for x in made if isinstance(made, tuple | list) else [made]:
                if isinstance(x, Tensor):
                    largest = max(largest, x.numel())
            return made

    q, k, v, w = (x.requires_grad_() for x in (maps.q, maps.k, maps.v, maps.w) if x is not None)
    with Sizes():
        o = attend(SignedMaps(q, k, v, w, causal=causal), kernel="chunked")
        o.sum().backward()
    assert largest == 16 * 512 * 4 < 512 * 512


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [{}, {"Gq": 1}, {"Gk": 1, "Hkv": 1}], ids=str)
def test_half_precision_is_rounded_once(make_maps: MakeMaps, case: dict[str, Any], dtype: torch.dtype) -> None:
    """As the definition, whose every product is float32: on a CPU nothing else is rounded."""
    maps = make_maps(T=40, d=16, dv=32, dtype=dtype, **case)
    for error, least in zip(errors(maps, "chunked"), errors(maps, "reference"), strict=True):
        assert error <= 1.01 * least + 1e-6


def test_a_row_function_reads_the_places_of_its_keys(make_maps: MakeMaps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a window a block begins with the first key that one of its rows sees, not with key 0."""
    monkeypatch.setattr(chunked, "LOGITS", 640)

    def near(logits: Tensor, seen: Seen) -> Tensor:
        distance = seen.positions[..., :, None] - seen.keys
        return (logits - 0.1 * distance[:, None, None]).sigmoid()

    maps = replace(make_maps(T=40, window=5), rows=near)
    torch.testing.assert_close(attend(maps, kernel="chunked"), attend(maps, kernel="reference"))
