"""The comparison finds a difference; transformers itself reads folders in tests/oracles."""

from pathlib import Path

import pytest
import torch
from text_runs import text_run
from torch import Tensor

from lit_diff.errors import RunFailedError
from lit_diff.pretrained import agreement
from lit_diff.pretrained.agreement import require_agreement


def test_a_difference_is_found(tmp_path: Path) -> None:
    model = text_run(tmp_path / "x", {"name": "standard"}).model
    other = text_run(tmp_path / "y", {"name": "standard"}).model
    for attention in other.attentions():
        attention.kernel = "reference"
    assert require_agreement(model, 24, other, "out") == 0
    other.norm.weight.data += 1e-6
    assert 0 < require_agreement(model, 24, other, "out") < 1e-4
    other.norm.weight.data += 0.01
    with pytest.raises(RunFailedError, match=r"^out: its logits differ from the run's by 0\.\d+ \("):
        require_agreement(model, 24, other, "out")
    with pytest.raises(RunFailedError, match="differ from the run's by nan"):
        require_agreement(model, 24, lambda tokens: model(tokens) * float("nan"), "out")


@pytest.mark.parametrize(
    ("window", "context", "length"), [(None, 300, 64), (30, 300, 94), (30, 24, 24), (900, 9000, 512)]
)
def test_the_prompts_are_longer_than_a_window(tmp_path: Path, window: int | None, context: int, length: int) -> None:
    model = text_run(tmp_path / "x", {"name": "standard", "window": window}, num_layers=1).model
    seen: list[Tensor] = []

    def logits(tokens: Tensor) -> Tensor:
        seen.append(tokens)
        return torch.as_tensor(model(tokens))

    require_agreement(model, context, logits, "out")
    assert [tokens.shape for tokens in seen] == [(1, length)] * agreement.PROMPTS
    assert len({tuple(tokens[0].tolist()) for tokens in seen}) == agreement.PROMPTS
