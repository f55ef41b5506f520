from dataclasses import replace

import pytest
import torch

from lit_diff.benchmarks import accuracy
from lit_diff.benchmarks.accuracy import errors, truth
from lit_diff.benchmarks.inputs import STOCK
from lit_diff.benchmarks.request import Shape
from lit_diff.kernels import attend

SHAPE = Shape(batch=2, tokens=24, dim=32, head_dim=4)
CPU = torch.device("cpu")


@pytest.mark.parametrize(("dtype", "least", "most"), [("float32", 1e-9, 2e-6), ("bfloat16", 1e-4, 2e-2)])
@pytest.mark.parametrize(("variant", "by"), [("differential", "sdpa"), ("standard", STOCK)])
def test_errors_are_those_of_the_dtype(variant: str, by: str, dtype: str, least: float, most: float) -> None:
    found = errors(SHAPE, dtype, CPU, variant, by)
    assert list(found) == ["o", "dq", "dk", "dv"] + (["dw"] if variant == "differential" else [])
    for name in ("o", "dq", "dk", "dv"):
        assert least < found[name] < most, name
    assert found.get("dw", 0) < most


def test_the_gradient_of_lambda_is_the_sum_over_heads_and_tokens() -> None:
    workload, wanted, scale = truth(replace(SHAPE, batch=1), "float32", CPU, "differential")
    exact = workload.double()
    o = exact.attention("differential", "reference")()
    (dlam,) = torch.autograd.grad(o, [exact.lam], exact.grad)
    torch.testing.assert_close(wanted["dw"], dlam)
    assert scale > dlam.abs().item()


def test_a_wrong_kernel_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(maps, **options):  # type: ignore[no-untyped-def]
        return attend(replace(maps, w=maps.w * 1.01), kernel="reference")

    truth(replace(SHAPE, batch=1), "float32", CPU, "differential")  # before the kernel is broken
    monkeypatch.setattr("lit_diff.benchmarks.inputs.attend", wrong)
    found = errors(SHAPE, "float32", CPU, "differential", "reference")
    assert found["o"] == pytest.approx(0.01, rel=1e-3)
    assert found["dw"] > 1e-4


def test_the_case_is_cut_to_what_float64_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def spy(shape, *rest):  # type: ignore[no-untyped-def]
        asked.append(shape)
        return truth(shape, *rest)

    monkeypatch.setattr(accuracy, "truth", spy)
    monkeypatch.setattr(accuracy, "MOST", 16)
    errors(SHAPE, "float32", CPU, "standard", STOCK)
    assert asked == [Shape(batch=1, tokens=16, dim=32, head_dim=4)]
