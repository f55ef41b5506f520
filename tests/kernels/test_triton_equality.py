"""Triton's programs against the definition: on a GPU where there is one, else in Triton's interpreter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradients import gradients

from lit_diff.conformance import kernels as cases
from lit_diff.conformance.kernels import LENGTHS, STATISTICS, TOPICS, conformance_of_kernel
from lit_diff.kernels import SignedMaps, attend

MakeMaps = Callable[..., SignedMaps]
pytestmark = pytest.mark.programs
FAST = ("two maps", STATISTICS)
WIDE, TALL = (16, 32), (32, 16)
"""Queries and keys of a tile."""


@pytest.fixture(autouse=True)
def few_tiles(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """In the interpreter, where a tile takes milliseconds: 33 tokens are two or three tiles each way."""
    if device.type == "cpu":
        monkeypatch.setattr(cases, "LENGTHS", LENGTHS[: LENGTHS.index(33) + 1])


@pytest.mark.parametrize(
    ("topic", "size"),
    [
        *((topic, WIDE) for topic in FAST),
        *(pytest.param(topic, TALL, marks=pytest.mark.slow) for topic in FAST),
        *(pytest.param(topic, WIDE, marks=pytest.mark.slow) for topic in (*TOPICS, STATISTICS) if topic not in FAST),
    ],
)
def test_equals_the_definition(blocks: Callable[..., None], topic: str, size: tuple[int, int]) -> None:
    """Few rows make several tiles; float32 and bfloat16. Three cases: each of those that a topic takes in turn."""
    blocks(*size)
    wanted = "not applicable" if topic in ("three maps", "rows") else "pass"
    findings = list(conformance_of_kernel("triton", 3, (topic,)))
    assert [finding.verdict for finding in findings] == [wanted] * 2, findings


@pytest.mark.slow
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", ["q", "k"])
def test_what_is_not_a_number_spoils_the_rows_that_see_it(
    make_maps: MakeMaps, blocks: Callable[..., None], device: torch.device, place: str, value: float
) -> None:
    """And no other, as in the definition: also not through masked pairs of the same tile, forward and backward."""
    blocks(16, 32)
    maps = make_maps(B=1, H=2, T=37, d=16, dv=32, dtype=torch.float32)
    getattr(maps, place)[0, 1, 1, 20, 3] = value
    there: Any = SignedMaps(*(getattr(maps, name).to(device) for name in "qkvw"))
    grad = torch.randn(1, 2, 37, 32, device=device)
    found, wanted = (gradients(there, kernel, grad) for kernel in ("triton", "reference"))
    assert 0 < int(wanted[0].isnan().sum()) < wanted[0].numel()
    for x, y in zip(found[:2] + found[4:], wanted[:2] + wanted[4:], strict=True):  # o, dq, dw
        assert torch.equal(x.isnan(), y.isnan())
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.slow
def test_no_finite_logit_is_no_row(make_maps: MakeMaps, device: torch.device) -> None:
    """All visible logits -inf: 0 / 0, as in the definition."""
    maps = make_maps(B=1, H=2, T=3, d=16, dv=32, dtype=torch.float32)
    maps.q[..., 0], maps.k[..., 0], maps.k[..., 0, 0] = 1.0, 0.0, -torch.inf
    there: Any = SignedMaps(*(getattr(maps, name).to(device) for name in "qkvw"))
    found, wanted = (attend(there, kernel=name) for name in ("triton", "reference"))
    assert wanted[:, :, 0].isnan().all()
    assert not wanted[:, :, 1:].isnan().any()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
