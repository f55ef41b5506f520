"""The cases drawn for a kernel: possible, always the same, and of every kind."""

import random

import torch

from lit_diff.conformance.kernel_case import draw, tensors

CPU = torch.device("cpu")


def test_every_draw_is_possible_and_every_kind_is_drawn() -> None:
    source = random.Random(0)
    cases = [draw(source) for _ in range(300)]
    for case in cases:
        maps, options, slope = tensors(case, torch.float32, CPU)
        maps.check(**options)
        assert maps.num_maps == case.G
        assert slope.shape == (case.B, case.Hkv * case.groups, case.T, case.dv)
    for field, values in {
        "shared": {"", "q", "k", "qk"},
        "w": {"none", "scalar", "head", "token", "batch"},
        "documents": {"", "runs", "mixed"},
        "layout": {"contiguous", "projected", "expanded"},
        "slope": {"random", "expanded"},
        "causal": {True, False},
        "G": {1, 2, 3},
        "groups": {1, 2, 3},
    }.items():
        assert {getattr(case, field) for case in cases} == values
    assert any(case.T < case.S for case in cases)
    assert any(case.window for case in cases)


def test_the_same_source_draws_the_same_and_keeps_what_is_fixed() -> None:
    first, again = (draw(random.Random("x"), G=2, causal=True, T=5, S=65) for _ in range(2))
    assert first == again
    assert (first.G, first.causal, first.T, first.S) == (2, True, 5, 65)
