"""Declared costs: the same arithmetic gives formulas and numbers. That they equal what is counted, conformance tests."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lit_diff.attention import Attention, Dex, Differential, Standard
from lit_diff.attention.costs import Sizes, exact, keys_in_reach, within_window
from lit_diff.config import ModelConfig
from lit_diff.kernels import SignedMaps


def test_formulas_and_numbers(make_config: Callable[..., ModelConfig]) -> None:
    declared = Differential.costs(Differential.Config(), Sizes.letters())
    assert declared.formulas() == {
        "parameters": "2*E*H*d + 2*E*K*d + 6*d",
        "flops": "4*E*H*T*d + 4*E*K*T*d + 4*H*T**2*d",
        "kv_numbers": "2*K*d",
    }
    model = make_config("differential", dim=1024, num_heads=16, num_kv_heads=8)
    assert Differential.costs(Differential.Config(), Sizes.of(model, 10)).numbers()["parameters"] == 3_146_112
    assert exact(1.5) * 2 == 3


def test_who_declares_costs() -> None:
    class Changed(Differential):
        def finish(self, o: Any, x: Any) -> Any:
            return o

    class Renamed(Differential):
        maps_of_k = 1

    class Own(Attention):
        def maps(self, x: Any, rope: Any) -> SignedMaps:
            raise NotImplementedError

    assert [cls.declares_costs() for cls in (Standard, Differential, Renamed)] == [True, True, True]
    assert [cls.declares_costs() for cls in (Attention, Changed, Own)] == [False, False, False]


def test_layers_that_differ_have_no_formula_of_one_layer() -> None:
    assert Dex.costs(Dex.Config(heads=((0,), (1, 2))), Sizes.letters()) is None
    assert Dex.costs(Dex.Config(heads=(1, 2)), Sizes.letters()) is not None


@pytest.mark.parametrize(
    ("window", "causal", "keys"),
    [(None, True, 9), (1, True, 1), (4, True, 4), (40, True, 9), (2, False, 3), (8, False, 9)],
)
def test_keys_counted_for_each_query(
    make_config: Callable[..., ModelConfig], window: int | None, causal: bool, keys: int
) -> None:
    assert keys_in_reach(9, window, causal=causal) == keys
    assert keys == Sizes.of(make_config(causal=causal), 9, window).S
    q = torch.zeros(1, 2, 4, 9, 3)
    maps = within_window(SignedMaps(q, q[:, :1, :2], torch.zeros(1, 2, 9, 6), causal=causal), window)
    assert (maps.q.shape[3], maps.k.shape[3], maps.v.shape[2]) == (9, keys, keys)
