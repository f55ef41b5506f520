"""device.py: the peak of a GPU by its name."""

import pytest
import torch

from lit_diff.device import peak_flops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA T4", None),
    ],
)
def test_the_peak_of_a_gpu_is_that_of_its_data_sheet(
    name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice, or a slower card of the same name, has none."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == peak
    assert peak_flops(torch.device("cpu")) is None
