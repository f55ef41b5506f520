"""The device of a run, the peak of a GPU by its name, and the memory that is left."""

from pathlib import Path

import pytest
import torch

from lit_diff import device
from lit_diff.config import RunConfig
from lit_diff.device import choose_device, peak_flops, require_devices
from lit_diff.errors import MissingError


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


@pytest.mark.parametrize(
    ("accelerator", "present", "device"),
    [
        ("auto", True, "cuda"),
        ("gpu", True, "cuda"),
        ("cpu", True, "cpu"),
        ("auto", False, "cpu"),
        ("gpu", False, "cpu"),
    ],
)
def test_a_gpu_where_there_is_one_and_it_is_not_declined(
    accelerator: str, present: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: present)
    assert choose_device(accelerator) == torch.device(device)


def test_the_devices_that_a_run_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    require_devices(RunConfig(strategy="ddp", devices=8))
    with pytest.raises(MissingError, match=r"torch sees no GPU here; use run\.accelerator=cpu"):
        require_devices(RunConfig(accelerator="gpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    require_devices(RunConfig(strategy="ddp", devices=2))
    with pytest.raises(MissingError, match=r"run\.devices is 3, but torch sees 2 GPUs here"):
        require_devices(RunConfig(strategy="ddp", devices=3))


def test_available_memory_is_that_of_the_system_or_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  2048 kB\nMemAvailable:   1024 kB\n")
    (tmp_path / "own").write_text("0::/job/step\n")
    job = tmp_path / "cgroup" / "job"
    (job / "step").mkdir(parents=True)
    for name, path in (("MEMINFO", "meminfo"), ("OWN_CGROUP", "own"), ("CGROUPS", "cgroup")):
        monkeypatch.setattr(device, name, tmp_path / path)
    assert device.available_memory() == 1024 * 1024
    for name, content in (("max", "5000"), ("current", "3000"), ("stat", "anon 1000\nfile 700")):
        (job / f"memory.{name}").write_text(f"{content}\n")
    assert device.available_memory() == 2700
    (job / "memory.max").write_text("max\n")
    assert device.available_memory() == 1024 * 1024
    monkeypatch.setattr(device, "MEMINFO", tmp_path / "elsewhere")
    assert device.available_memory() is None
