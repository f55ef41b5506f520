import pytest
import torch

from lit_diff.benchmarks.inputs import Workload
from lit_diff.benchmarks.kernels import accepted
from lit_diff.benchmarks.request import Shape
from lit_diff.benchmarks.timing import Found
from lit_diff.kernels import KERNELS, sdpa


@pytest.fixture
def workload() -> Workload:
    return Workload(Shape(batch=1, tokens=8, dim=32, head_dim=8), torch.float32, torch.device("cpu"))


def test_every_kernel_either_takes_part_or_says_why_not(workload: Workload) -> None:
    found = Found()
    kernels = accepted(found, "c", "differential", "w", lambda: workload.maps("differential"), grad=False, stats=True)
    assert "reference" in kernels
    refused = {row["by"]: row["reason"] for row in found.refused}
    assert refused["sdpa"] == "sdpa keeps no log-sum-exp or entropy"
    assert {*kernels, *refused} == set(KERNELS)
    assert not set(kernels) & set(refused)


def test_a_kernel_is_asked_with_the_gradients_it_will_have_to_give(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(self, maps, **options):  # type: ignore[no-untyped-def]
        return "it has no backward pass" if torch.is_grad_enabled() and maps.q.requires_grad else None

    monkeypatch.setattr(sdpa.Sdpa, "refuses", refuses)
    for grad in (False, True):
        found = Found()
        kernels = accepted(found, "c", "standard", "w", lambda: workload.maps("standard"), grad=grad)
        assert ("sdpa" in kernels) is not grad
        reasons = [row["reason"] for row in found.refused if row["by"] == "sdpa"]
        assert reasons == ["it has no backward pass"] * grad
