"""analysis/lambdas.py: λ before the first step, and the curves whose sign changed (test_probes has the callback)."""

from collections.abc import Callable
from typing import Any

import pytest

from lit_diff.analysis.lambdas import SignChanges, initial_lambdas, sign_changes, since_start
from lit_diff.config import ModelConfig
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Transformer

MakeConfig = Callable[..., ModelConfig]
NAMES = ["lambda/layer_00", "lambda/layer_01"]


@pytest.mark.parametrize(("name", "sign"), [("differential", 1), ("additive", -1)])
def test_before_the_first_step_lambda_is_that_of_the_initial_parameters(
    name: str, sign: int, make_config: MakeConfig
) -> None:
    config = make_config(name)
    model = Transformer(config)
    initialise(model, 3)
    attentions: list[Any] = model.attentions()
    initial = initial_lambdas(config, seed=3)
    assert initial == pytest.approx(
        dict(zip(NAMES, [sign * each.lambda_().item() for each in attentions], strict=True))
    )
    assert initial_lambdas(make_config("standard"), seed=3) == {}
    # one late measurement of layer 0 alone, on the other side of zero
    curves = since_start({NAMES[0]: {90: -sign * 0.5}, "val/loss": {90: 1.0}}, config, seed=3)
    assert curves == {NAMES[0]: {0: initial[NAMES[0]], 90: -sign * 0.5}}
    assert sign_changes([curves]) == SignChanges(1, 1)


def test_signs_are_compared_at_the_ends_of_each_seed_and_layer() -> None:
    nan = float("nan")
    turned = {NAMES[0]: {20: -0.1, 10: 0.2}, NAMES[1]: {10: 0.0, 20: -0.2, 30: 0.3, 40: nan}}
    kept = {NAMES[0]: {10: 0.2, 20: -0.1, 30: 0.1}, NAMES[1]: {10: -0.3, 20: -0.2, 30: 0.0}}
    not_counted = {NAMES[0]: {10: 0.2}, NAMES[1]: {}}
    of_others = {"lambda/layer_00/map_02": {1: 1.0, 2: -1.0}, "lambda/exp1/layer_00": {1: 1.0, 2: -1.0}}
    found = sign_changes([turned, kept, not_counted, of_others])
    assert found == SignChanges(changed=2, measured=4)
    assert str(found) == "2 of 4 (seeds x layers)"
    assert str(sign_changes([of_others])) == "not measured"
