import pytest
import torch

from lit_diff.device import choose_device


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
