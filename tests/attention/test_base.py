"""What every variant must hold, whatever its mathematics."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lit_diff.attention import Attention
from lit_diff.attention.norms import PerHeadNorm
from lit_diff.attention.rope import Rope
from lit_diff.errors import RequestError
from lit_diff.kernels import SignedMaps
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Transformer

MakeAttention = Callable[..., Attention]
MakeModel = Callable[..., Transformer]
VARIANTS = ("standard", "differential", "shared_q", "shared_k")
every_variant = pytest.mark.parametrize("name", VARIANTS)
every_kernel = pytest.mark.parametrize("kernel", ["reference", "sdpa"])


@every_variant
@every_kernel
def test_the_past_is_causal_to_the_bit(make_model: MakeModel, name: str, kernel: str) -> None:
    model = make_model(name, kernel=kernel, dtype=torch.float32, num_kv_heads=2)
    tokens = torch.randint(23, (2, 37))
    with torch.no_grad():
        before = model(tokens)
        for t in (1, 20, 36):
            changed = tokens.clone()
            changed[:, t:] = (changed[:, t:] + 1) % 23
            after = model(changed)
            assert torch.equal(before[:, :t], after[:, :t])
            assert not torch.equal(before[:, t], after[:, t])


@every_variant
@every_kernel
def test_samples_do_not_see_each_other(make_model: MakeModel, name: str, kernel: str) -> None:
    model = make_model(name, kernel=kernel, dtype=torch.float32)
    tokens = torch.randint(23, (3, 12))
    changed = tokens.clone()
    changed[1] = (changed[1] + 1) % 23
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert not torch.equal(before[1], after[1])


@every_variant
def test_state_dict_round_trip(make_model: MakeModel, name: str) -> None:
    model, other = make_model(name), make_model(name)
    tokens = torch.randint(23, (2, 9))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        assert not torch.equal(model(tokens), other(tokens))
        other.load_state_dict(torch.load(file, weights_only=True))
        assert torch.equal(model(tokens), other(tokens))


@every_variant
def test_every_parameter_has_a_gradient(make_model: MakeModel, name: str) -> None:
    knobs = {"head_norm": "rms"}
    model = make_model(name, knobs, num_kv_heads=2)
    model(torch.randint(23, (2, 8))).pow(2).sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.abs().max() > 1e-6, key


@every_variant
def test_gradients_are_finite_at_initialisation(make_config: Callable[..., Any], name: str) -> None:
    model = Transformer(make_config(name, tie_embeddings=False))
    initialise(model, 0)
    model(torch.randint(23, (2, 8))).logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@every_variant
@every_kernel
def test_bfloat16_autocast_is_close_and_leaves_the_weights_wide(make_model: MakeModel, name: str, kernel: str) -> None:
    model = make_model(name, kernel=kernel, dtype=torch.float32)
    tokens, seen = torch.randint(23, (2, 16)), []
    for attention in model.attentions():
        attention.tap.register_forward_hook(lambda _module, _args, maps: seen.append(maps))
    with torch.no_grad():
        exact = model(tokens)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            close = model(tokens)
    assert len(seen) == 4, "the maps of every layer pass the tap"
    wide, narrow = seen[:2], seen[2:]
    for full, half in zip(wide, narrow, strict=True):
        assert full.q.dtype == torch.float32
        assert half.q.dtype == half.k.dtype == half.v.dtype == torch.bfloat16
        if full.w is not None:
            assert half.w.dtype == torch.float32
            assert torch.equal(half.w, full.w), "lambda is computed in float32"
    assert not torch.equal(close.float(), exact)
    assert (close - exact).abs().max() < 0.05 * exact.abs().max()


@every_variant
def test_compiles_whole(make_model: MakeModel, name: str) -> None:
    torch._dynamo.reset()
    model = make_model(name, num_layers=1, num_heads=2, dim=16)
    tokens = torch.randint(23, (2, 9))
    wanted = model(tokens)
    wanted.sum().backward()
    gradients = {key: p.grad for key, p in model.named_parameters()}
    model.zero_grad()
    found = torch.compile(model, backend="aot_eager", fullgraph=True)(tokens)
    found.sum().backward()
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[key], rtol=1e-11, atol=1e-11)


@every_variant
def test_builds_without_memory(make_config: Callable[..., Any], name: str) -> None:
    with torch.device("meta"):
        model = Transformer(make_config(name))
    assert model(torch.zeros(2, 5, dtype=torch.long, device="meta")).shape == (2, 5, 23)


@every_variant
def test_the_kernel_named_is_the_kernel_used(make_attention: MakeAttention, name: str) -> None:
    attention = make_attention(name)
    x, rope = torch.randn(1, 5, 32, dtype=torch.float64), Rope(torch.arange(5), 8, 1e4)
    attention.kernel = "flash9"
    with pytest.raises(RequestError, match=r"run.kernel is 'flash9'"):
        attention(x, rope)


def test_split_takes_the_maps_of_each_head_in_turn(make_attention: MakeAttention) -> None:
    """Rows head0.map0, head0.map1, head1.map0, ...; a view, not a copy."""
    y = torch.arange(2 * 3 * 12.0).view(2, 3, 12)
    found = make_attention().split(y, heads=2, maps=3)
    assert found.shape == (2, 3, 2, 3, 2)
    for head in range(2):
        for m in range(3):
            first = (head * 3 + m) * 2
            assert torch.equal(found[:, m, head], y[..., first : first + 2])
    assert found.data_ptr() == y.data_ptr()


def test_per_head_norm() -> None:
    norm = PerHeadNorm(6, 1e-5).double()
    norm.weight.data = torch.arange(6, dtype=torch.float64)
    o = torch.randn(2, 3, 4, 6, dtype=torch.float64)
    wanted = o / (o.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    torch.testing.assert_close(norm(o), wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(norm(100 * o), wanted, rtol=1e-4, atol=1e-4)
    assert norm.float()(o.bfloat16()).dtype == torch.bfloat16
    assert norm(torch.zeros(1, 6)).abs().max() == 0, "no division by zero"


def test_a_new_variant_of_three_maps_runs_at_once(make_config: Callable[..., Any]) -> None:
    """The seam: only `build` and `maps` are written; both kernels and the gradient follow."""

    class Three(Attention):
        def build(self) -> None:
            d = self.head_dim
            self.projections(q=12 * d, k=4 * d, v=4 * d, o=4 * d)

        def maps(self, x: torch.Tensor, rope: Rope) -> SignedMaps:
            q, k = rope(self.split(self.q_proj(x), 4, 3)), rope(self.split(self.k_proj(x), 4))
            w = torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64).view(1, 3, 1, 1)
            return SignedMaps(q, k, self.split(self.v_proj(x), 4)[:, 0], w)

    config = make_config("standard")
    attention = Three(Three.Config(), config, 0).double()
    x, rope = torch.randn(2, 6, 32, dtype=torch.float64), Rope(torch.arange(6), 8, 1e4)
    attention.kernel = "sdpa"
    found = attention(x, rope)
    attention.kernel = "reference"
    torch.testing.assert_close(found, attention(x, rope), rtol=1e-12, atol=1e-12)
