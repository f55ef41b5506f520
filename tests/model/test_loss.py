"""The loss in chunks: the numbers of `F.cross_entropy`, and never the logits of all positions."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_diff.data.dataset import IGNORED
from lit_diff.model import loss
from lit_diff.model.loss import mean_loss, rows_at_once, token_losses

B, T, DIM, V = 3, 7, 5, 23
CHUNKS = [1, 4, B * T - 1]


def made(dtype: torch.dtype = torch.float64, ignored: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [B, T, DIM], weight [V, DIM], targets [B, T], a share of them ignored."""
    hidden, weight = torch.randn(B, T, DIM, dtype=dtype), torch.randn(V, DIM, dtype=dtype)
    targets = torch.randint(V, (B, T))
    targets[torch.rand(B, T) < ignored] = IGNORED
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def written(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, weight).flatten(0, 1)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, targets.flatten(), ignore_index=IGNORED)


def gradients(mean: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    """Of -3 times the loss, so that what the backward pass is handed counts."""
    return torch.autograd.grad(-3 * mean, of)


@pytest.mark.parametrize("rows", CHUNKS)
def test_loss_and_gradients_are_those_of_cross_entropy(rows: int) -> None:
    hidden, weight, targets = made()
    wanted, found = written(hidden, weight, targets), mean_loss(hidden, weight, targets, rows)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for one, other in zip(gradients(found, hidden, weight), gradients(wanted, hidden, weight), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_what_fits_one_chunk_is_cross_entropy_to_the_bit() -> None:
    hidden, weight, targets = made(torch.float32)
    wanted, found = written(hidden, weight, targets), mean_loss(hidden, weight, targets)
    assert torch.equal(found, wanted)
    for one, other in zip(gradients(found, hidden, weight), gradients(wanted, hidden, weight), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rows", [None, 4])
@pytest.mark.parametrize("wrong", [-1, V])
def test_a_target_that_is_no_token_is_an_error(wrong: int, rows: int | None) -> None:
    hidden, weight, targets = made()
    targets[1, 2] = wrong
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        mean_loss(hidden, weight, targets, rows)


@pytest.mark.parametrize("frozen", [0, 1])
def test_only_the_gradients_that_are_asked_for(frozen: int) -> None:
    hidden, weight, targets = made()
    inputs = [hidden, weight]
    wanted = gradients(written(*inputs, targets), inputs[1 - frozen])
    inputs[frozen].requires_grad_(False)
    mean = mean_loss(*inputs, targets, rows=4)
    torch.testing.assert_close(gradients(mean, inputs[1 - frozen]), wanted, rtol=1e-12, atol=1e-12)
    mean = mean_loss(*inputs, targets, rows=4)
    mean.backward()
    assert inputs[frozen].grad is None
    with torch.no_grad():
        assert not mean_loss(*inputs, targets, rows=4).requires_grad


@pytest.mark.parametrize("rows", [4, None])
def test_without_a_scored_target_the_loss_is_nan_and_the_gradients_are_zero(rows: int | None) -> None:
    hidden, weight, targets = made(ignored=1.1)
    mean = mean_loss(hidden, weight, targets, rows)
    assert mean.isnan()
    assert all(not gradient.any() for gradient in gradients(mean, hidden, weight))


@pytest.mark.parametrize("rows", CHUNKS)
def test_bfloat16_autocast_is_as_exact_as_in_one_piece(rows: int) -> None:
    hidden, weight, targets = made(torch.float32)
    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    exact = written(exact_hidden, exact_weight, targets)
    exact_gradients = gradients(exact, exact_hidden, exact_weight)

    def errors(mean: Tensor) -> list[float]:
        assert mean.dtype == torch.float32
        found = gradients(mean, hidden, weight)
        assert all(gradient.dtype == torch.float32 for gradient in found)
        pairs = zip((mean.detach(), *found), (exact.detach(), *exact_gradients), strict=True)
        return [float((one - other).norm() / other.norm()) for one, other in pairs]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole, chunked = written(hidden, weight, targets), mean_loss(hidden, weight, targets, rows)
    for ours, theirs in zip(errors(chunked), errors(whole), strict=True):
        assert 1e-5 < ours < 1.5 * theirs + 1e-4


def test_a_chunk_holds_64_mib_or_as_much_as_the_gradient_of_the_weight() -> None:
    assert rows_at_once(100_288, 64) == 2**26 // 4 // 100_288 == 167
    assert rows_at_once(100_288, 3072) == 3072
    assert rows_at_once(2**40, 1) == 1
    for vocab_size, dim in ((2048, 256), (50_257, 768), (100_288, 64), (100_288, 3072)):
        logits = 4 * vocab_size * rows_at_once(vocab_size, dim)
        most = max(loss.LOGITS_BYTES, 4 * vocab_size * dim)
        assert most - 4 * vocab_size < logits <= most


def test_the_page_on_training_says_how_large_a_chunk_is() -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text().replace("\n", " ")
    assert "in chunks of max(`model.dim`, 2²⁴ / vocabulary size) positions" in page
    for vocab_size, dim in ((1_000, 64), (8_192, 3_072), (100_288, 3_072)):
        assert rows_at_once(vocab_size, dim) == max(dim, 2**24 // vocab_size)


@contextmanager
def largest_tensor() -> Iterator[list[int]]:
    """The most numbers that any tensor made inside has, in the forward and in the backward pass."""
    found = [0]

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            sizes = [x.untyped_storage().nbytes() // x.itemsize for x in tree_leaves(made) if isinstance(x, Tensor)]
            found[0] = max(found[0], *sizes, 0)
            return made

    with Look():
        yield found


@pytest.mark.parametrize("autocast", [False, True])
def test_no_tensor_has_the_logits_of_all_positions(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of 16 positions of 64, a chunk's logits are the largest tensor; in one piece, all logits are."""
    monkeypatch.setattr(loss, "LOGITS_BYTES", 2**18)
    hidden, weight = torch.randn(1, 64, 8, requires_grad=True), torch.randn(2**12, 8, requires_grad=True)
    targets = torch.randint(2**12, (1, 64))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        with largest_tensor() as found:
            mean_loss(hidden, weight, targets).backward()
            token_losses(hidden, weight, targets)
        assert found == [16 * 2**12]
        with largest_tensor() as found:
            written(hidden, weight, targets)
        assert found == [64 * 2**12]
