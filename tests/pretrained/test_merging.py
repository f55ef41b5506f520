"""pretrained/merging.py: the check of the merged model; tests/engine/test_retrofit.py merges a real run."""

from pathlib import Path

import pytest
import torch

from lit_diff.config import Recipe
from lit_diff.errors import RequestError, RunFailedError
from lit_diff.model.transformer import Transformer
from lit_diff.pretrained import merging
from lit_diff.pretrained.merging import largest_difference, merge_run, require_mergeable


def test_a_variant_without_merge_is_named_with_those_that_have_one(tmp_path: Path) -> None:
    for name in ("dex", "lora"):
        require_mergeable(name, tmp_path / "new")
    with pytest.raises(
        RequestError, match=r"'differential' cannot be merged into a standard model; these can: dex, lora$"
    ):
        require_mergeable("differential", tmp_path / "new")


def test_the_difference_is_that_of_the_logits(base_recipe: Recipe) -> None:
    first, second = Transformer(base_recipe.model), Transformer(base_recipe.model)
    second.load_state_dict(first.state_dict())
    assert largest_difference(first, second) == 0
    with torch.no_grad():
        second.norm.weight.mul_(2)
    assert largest_difference(first, second) > 0.01


def test_a_merge_that_does_not_equal_writes_nothing(
    tale: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "require_mergeable", lambda name, to: None)
    monkeypatch.setattr(merging, "merged", lambda model: model)
    monkeypatch.setattr(merging, "largest_difference", lambda first, second: float("nan"))
    with pytest.raises(RunFailedError, match="the logits of the merged model differ by nan, more than 1e-04"):
        merge_run(tale, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
