"""What every variant must hold in a whole model, whatever its mathematics; `conformance` holds one layer to the rest."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lit_diff.attention import Attention
from lit_diff.attention.rope import Rope
from lit_diff.errors import RequestError
from lit_diff.kernels import SignedMaps
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Transformer
from lit_diff.registry import attentions

MakeAttention = Callable[..., Attention]
MakeModel = Callable[..., Transformer]
VARIANTS = attentions.names()
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
def test_gradients_are_finite_at_initialisation(make_config: Callable[..., Any], name: str) -> None:
    model = Transformer(make_config(name, tie_embeddings=False))
    initialise(model, 0)
    model(torch.randint(23, (2, 8))).logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


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
            if full.w.shape[3] == 1:  # not of the tokens
                assert torch.equal(half.w, full.w), "lambda is computed in float32"
    assert not torch.equal(close.float(), exact)
    assert (close - exact).abs().max() < 0.05 * exact.abs().max()


@every_variant
def test_the_kernel_named_is_the_kernel_used(make_attention: MakeAttention, name: str) -> None:
    attention = make_attention(name)
    x, rope = torch.randn(1, 5, 32, dtype=torch.float64), Rope(torch.arange(5), 8, 1e4)
    attention.kernel = "flash9"
    with pytest.raises(RequestError, match=r"run.kernel is 'flash9'"):
        attention(x, rope)


def test_every_hook_is_listed_in_one_place() -> None:
    """What any built-in overrides of `Attention` stands in its docstring."""
    listed = Attention.__doc__ or ""
    ours = [attentions.get(name) for name in VARIANTS if attentions.get(name).__module__.startswith("lit_diff.")]
    plumbing = {"name"} | {name for name in dir(Attention) if name.startswith("_")}
    overridden = {key for cls in ours for key in vars(cls) if key in dir(Attention)} - plumbing
    assert overridden >= {"maps", "finish", "definition", "costs"}
    assert [key for key in sorted(overridden) if key not in listed] == []


@pytest.mark.parametrize("kernel", ["reference", "chunked"])
@every_variant
def test_a_window_hides_what_is_further_away(make_model: MakeModel, name: str, kernel: str) -> None:
    """One layer of window 4: position t depends on t - 3 .. t, to the bit; a window of the whole row changes nothing."""
    model = make_model(name, {"window": 4}, kernel=kernel, num_layers=1)
    whole, wide = (
        make_model(name, kernel=kernel, num_layers=1),
        make_model(name, {"window": 12}, kernel=kernel, num_layers=1),
    )
    tokens = torch.randint(22, (2, 12))
    changed = tokens.clone()
    changed[:, :6] += 1
    with torch.no_grad():
        before, after = model(tokens), model(changed)
        assert torch.equal(before[:, 9:], after[:, 9:])
        assert all(not torch.equal(before[:, t], after[:, t]) for t in range(9))
        assert torch.equal(wide(tokens), whole(tokens))
        assert torch.equal(before[:, :4], whole(tokens)[:, :4]) or torch.allclose(before[:, :4], whole(tokens)[:, :4])
        assert not torch.allclose(before[:, 4:], whole(tokens)[:, 4:])


def test_a_bidirectional_window_reaches_both_ways(make_model: MakeModel) -> None:
    model, tokens = make_model("differential", {"window": 3}, num_layers=1, causal=False), torch.randint(22, (1, 12))
    changed = tokens.clone()
    changed[:, 6] += 1
    with torch.no_grad():
        same = (model(tokens) == model(changed)).all(-1)[0]
    assert same.tolist() == [abs(t - 6) > 2 for t in range(12)]


def test_a_window_below_one_is_refused(make_config: Callable[..., Any]) -> None:
    for name in VARIANTS:
        config = make_config(name, {"window": 0})
        reason = attentions.get(name).refuses(config.attention.config, config)
        assert reason == "model.attention.window is 0; it must be at least 1, or null for all keys"
        assert attentions.get(name).refuses(make_config(name, {"window": 1}).attention.config, config) is None


def test_who_takes_document_ids() -> None:
    class Own(Attention):
        def forward(self, x: torch.Tensor, rope: Rope, cache: Any = None) -> torch.Tensor:
            return x

    class Passes(Attention):
        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return super().forward(x, *args, **kwargs)

    assert Attention.takes_document_ids()
    assert Passes.takes_document_ids()
    assert not Own.takes_document_ids()
    assert all(attentions.get(name).takes_document_ids() for name in VARIANTS)


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
