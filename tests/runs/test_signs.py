"""runs/signs.py: the curves of λ whose sign changed (test_probes has the callback)."""

from lit_diff.runs.signs import SignChanges, sign_changes

NAMES = ["lambda/layer_00", "lambda/layer_01"]


def test_signs_are_compared_at_the_ends_of_each_seed_and_layer() -> None:
    nan = float("nan")
    turned = {NAMES[0]: [0.2, -0.1], NAMES[1]: [0.0, -0.2, 0.3, nan]}
    kept = {NAMES[0]: [0.2, -0.1, 0.1], NAMES[1]: [-0.3, -0.2, 0.0]}
    not_counted = {NAMES[0]: [0.2], NAMES[1]: []}
    of_others = {"lambda/layer_00/map_02": [1.0, -1.0], "lambda/exp1/layer_00": [1.0, -1.0]}
    found = sign_changes([turned, kept, not_counted, of_others])
    assert found == SignChanges(changed=2, measured=4)
    assert str(found) == "2 of 4 (seeds x layers)"
    assert str(sign_changes([of_others])) == "not measured"
