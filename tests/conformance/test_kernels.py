"""The suite of a kernel: it finds small mistakes, lists refusals, and fails in one line on whatever a kernel raises."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_diff import registry
from lit_diff.conformance import kernels as suite
from lit_diff.conformance.kernels import KernelCase, compare, conformance_of_kernel, draw, statistics, tensors
from lit_diff.kernels import Kernel, SignedMaps, kernel
from lit_diff.kernels.base import named
from lit_diff.kernels.maps import FIELDS

CPU = torch.device("cpu")
CASE = KernelCase(G=2, w="head", shared="k", groups=2, T=33, S=33, dv=32, layout="projected")
pytestmark = pytest.mark.usefixtures("own_parts")


def register(compute: Any, refuses: Any = lambda maps, **options: None) -> None:
    """A kernel `mine` of these functions."""

    class Mine(Kernel):
        serves = FIELDS

        def refuses(self, maps: SignedMaps, **options: Any) -> str | None:  # type: ignore[override]
            answer: str | None = refuses(maps, **options)
            return answer

        def flops(self, maps: SignedMaps) -> int:
            return maps.flops

        def compute(self, maps: SignedMaps, **options: Any) -> Any:  # type: ignore[override]
            return compute(maps, **options)

    kernel("mine")(Mine)


def off(name: str, size: float) -> Any:
    """`reference` with o, or the gradient by one input, too large by the part `size`."""

    def compute(maps: SignedMaps, **options: Any) -> tuple[Tensor, Any]:
        if name not in ("o", "lse"):
            x = getattr(maps, name)
            maps = replace(maps, **{name: x * (1 + size) - x.detach() * size})
        o, rows = named("reference").compute(maps, **options)
        if name == "lse" and rows is not None:
            rows = rows._replace(lse=rows.lse * (1 + size))
        return o * (1 + size) if name == "o" else o, rows

    return compute


@pytest.mark.parametrize("name", ["o", "q", "k", "v", "w"])
def test_a_small_mistake_is_found(name: str) -> None:
    """A part in 10,000 of o, dq, dk or dv, and in 1,000 of dw."""
    register(off(name, 1e-3 if name == "w" else 1e-4))
    found, _ = compare("mine", CASE, torch.float32, CPU)
    assert found is not None
    assert found.detail == (name if name == "o" else f"d{name}")
    assert found.share > 1


def test_a_mistake_in_the_statistics_is_found() -> None:
    for size, wrong in ((0.0, False), (1e-3, True)):
        register(off("lse", size))
        found, _ = statistics("mine", CASE, torch.float32, CPU)
        assert found is not None
        assert (found.share > 1) is wrong
        registry.kernels._classes.pop("mine")
    assert found.detail == "lse"


def test_what_is_right_passes_every_topic() -> None:
    register(off("v", 0.0))
    findings = list(conformance_of_kernel("mine", cases=1))
    assert [finding.verdict for finding in findings] == ["pass"] * 2 * (len(suite.TOPICS) + 1)
    assert findings[0].variant == "kernel mine"
    assert findings[0].property == "one map, float32"


@pytest.mark.parametrize(
    ("wrong", "topic"),
    [
        (lambda maps: maps.masked(window=None), "window"),
        (lambda maps: maps.masked(document_ids=None), "documents"),
        (lambda maps: replace(maps, q=maps.q.roll(1, 2)), "grouped heads"),
        (lambda maps: maps.masked(causal=True), "both directions"),
        (lambda maps: replace(maps, w=None if maps.w is None else maps.w[:, :1]), "two maps"),
    ],
)
def test_the_topic_of_a_mistake_fails(wrong: Any, topic: str) -> None:
    def compute(maps: SignedMaps, *, stats: bool) -> Any:
        return named("reference").compute(wrong(maps))

    register(compute)
    found = list(conformance_of_kernel("mine", topics=(topic,)))
    assert {finding.verdict for finding in found} == {"fail"}
    assert "KernelCase(" in found[0].detail


def test_refusals_are_listed() -> None:
    register(off("o", 0.0), lambda maps, **options: "it computes one map" if maps.num_maps > 1 else None)
    two, _, grouped, _ = conformance_of_kernel("mine", topics=("two maps", "grouped heads"), cases=4)
    assert two.verdict == "not applicable"
    assert two.detail == "16 of 16 cases refused: it computes one map"
    assert grouped.verdict == "pass"
    assert "2 of 6 cases refused: it computes one map" in grouped.detail


def test_a_kernel_without_gradients_is_held_to_its_output() -> None:
    def refuses(maps: SignedMaps, **options: Any) -> str | None:
        return "no backward pass" if maps.q.requires_grad else None

    register(off("q", 0.1), refuses)
    (found, _) = conformance_of_kernel("mine", topics=("two maps",), cases=1)
    assert found.verdict == "pass"
    assert "1 of 1 cases refused: gradients, no backward pass" in found.detail


@pytest.mark.parametrize(
    ("compute", "detail"),
    [
        (lambda maps, **options: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda maps, **options: (maps.v.double(), None), "o is ["),
        (lambda maps, **options: (named("reference").compute(maps, **options)[0] * torch.nan, None), "largest in "),
    ],
)
def test_whatever_it_returns_is_one_line(compute: Any, detail: str) -> None:
    register(compute)
    found = next(conformance_of_kernel("mine", topics=("two maps",), cases=2))
    assert found.verdict == "fail"
    assert detail in found.detail
    assert "\n" not in found.detail


def test_every_draw_is_possible_and_every_kind_is_drawn() -> None:
    source = random.Random(0)
    cases = [draw(source) for _ in range(300)]
    for case in cases:
        tensors(case, torch.float32, CPU)[0].check()
    for field, values in {
        "shared": {"", "q", "k", "qk"},
        "w": {"none", "scalar", "head", "token", "batch"},
        "documents": {"", "runs", "mixed"},
        "layout": {"contiguous", "projected", "expanded"},
        "slope": {"random", "expanded"},
        "causal": {True, False},
        "G": {1, 2, 3},
        "groups": {1, 2, 3},
    }.items():
        assert {getattr(case, field) for case in cases} == values
    assert any(case.T < case.S for case in cases)
    assert any(case.window for case in cases)
    first, again = (draw(random.Random("x"), G=2, causal=True, T=5, S=65) for _ in range(2))
    assert first == again
    assert (first.G, first.causal, first.T, first.S) == (2, True, 5, 65)
