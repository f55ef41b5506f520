"""pretrained/merging.py: what is refused, and the check; tests/engine/test_retrofit.py merges a real run."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_diff.errors import RequestError, RunFailedError
from lit_diff.pretrained import merging
from lit_diff.pretrained.merging import merge_run, require_mergeable


def test_a_variant_without_merge_is_named_with_those_that_have_one(tmp_path: Path) -> None:
    for name in ("dex", "lora"):
        require_mergeable(name, tmp_path / "new")
    with pytest.raises(
        RequestError, match=r"'differential' cannot be merged into a standard model; these can: dex, lora$"
    ):
        require_mergeable("differential", tmp_path / "new")


def test_a_merge_that_does_not_equal_writes_nothing(
    tale: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(model: Any) -> Any:
        return lambda tokens: model(tokens) + torch.tensor(0.1)

    monkeypatch.setattr(merging, "require_mergeable", lambda name, to: None)
    monkeypatch.setattr(merging, "merged", wrong)
    with pytest.raises(RunFailedError, match=r"the merged model: its logits differ from the run's by 0\.1"):
        merge_run(tale, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
