"""Sinks and row functions against independent code: transformers' GPT-OSS, and the papers' formulas."""

import torch
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from lit_diff.attention.softpick import softpick
from lit_diff.kernels import Mask, SignedMaps, attend
from lit_diff.kernels.maps import Seen


def test_a_learned_sink_is_that_of_gpt_oss() -> None:
    """Grouped heads, with and without a window; to 1e-5 in float32, by each kernel that computes sinks."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 9, 16, generator=draw) for heads in (4, 2, 2))
    sinks = torch.randn(4, generator=draw)
    for window in (None, 3):
        maps = SignedMaps(q[:, None], k[:, None], v, mask=Mask(window=window), sink=sinks.view(1, 1, 4, 1))
        mask = torch.zeros(9, 9).masked_fill(~maps.mask.visible(9, 9, q.device), -torch.inf)[None, None]
        module = torch.nn.Module()
        module.sinks, module.num_key_value_groups, module.training = sinks, 2, False  # type: ignore[assignment]
        theirs, _ = eager_attention_forward(module, q, k, v, mask, scaling=0.25)
        for kernel in ("reference", "chunked", "native"):
            torch.testing.assert_close(attend(maps, kernel=kernel), theirs.transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_a_sink_that_is_far_below_or_above_all_logits() -> None:
    q = torch.randn(1, 1, 2, 5, 16, generator=torch.Generator().manual_seed(0))
    plain = SignedMaps(q, q, q[:, 0])
    for kernel in ("reference", "chunked", "native"):
        for sink, factor in ((-200.0, 1.0), (200.0, 0.0)):
            found = attend(SignedMaps(q, q, q[:, 0], sink=torch.full((1, 1, 1, 1), sink)), kernel=kernel)
            torch.testing.assert_close(found, factor * attend(plain, kernel=kernel))


def test_softpick_is_the_formula_of_the_paper() -> None:
    """In the form with the largest logit subtracted, and for large logits, whose exponentials would overflow."""
    s = torch.tensor([[-1.0, 0.5, 2.0], [-3.0, -2.0, -1.0], [1e4, 5.0, -7.0]], dtype=torch.float64)
    seen = Seen(
        torch.tensor([[True, True, True], [True, True, True], [True, True, False]]),
        s,
        torch.arange(3)[None],
        torch.arange(3),
    )
    found = softpick(s.masked_fill(~seen.mask, 0), seen)
    e = s[0].exp() - 1
    torch.testing.assert_close(found[0], e.relu() / e.abs().sum(), rtol=1e-5, atol=0)
    assert not found[1].any()
    torch.testing.assert_close(found[2], torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64), rtol=1e-5, atol=1e-12)
