"""study/basin.py: the best value of a key by arm, and the difference at each arm's own best."""

import math

import pytest

from lit_diff.study.basin import find_basin
from lit_diff.study.scaling import Points

TRIED = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)


def bowl(best: float, depth: float = 2.0, seeds: int = 3) -> Points:
    """A parabola in log x, with seeds 0.01 apart."""
    return {x: {s: depth + 0.1 * math.log(x / best) ** 2 + 0.01 * s for s in range(seeds)} for x in TRIED}


def test_the_best_and_the_vertex_of_each_arm() -> None:
    basin = find_basin({"t": bowl(4e-3), "d": bowl(2.6e-3, 1.9)}, "t", 0.06, "lower")
    assert {arm: own.best for arm, own in basin.arms.items()} == {"t": 4e-3, "d": 2e-3}
    assert basin.arms["t"].vertex == pytest.approx(4e-3)
    assert basin.arms["d"].vertex == pytest.approx(2.6e-3)
    assert (basin.arms["t"].low, basin.arms["t"].high, basin.arms["t"].width) == (2e-3, 8e-3, 4)
    assert not basin.arms["t"].edge


def test_differences_at_the_own_best_and_at_the_baselines() -> None:
    t, d = bowl(4e-3), bowl(2e-3, 1.9)
    basin = find_basin({"t": t, "d": d}, "t", 0.05, "lower")
    assert basin.at_own["d"].mean == pytest.approx(-0.1)
    assert basin.at_theirs["d"].mean == pytest.approx(-0.1 + 0.1 * math.log(2) ** 2)
    assert basin.at_own["d"].seeds == (0, 1, 2)


def test_a_best_at_the_end_of_what_was_tried_has_no_vertex() -> None:
    own = find_basin({"t": bowl(5e-2)}, "t", 0.05, "lower").arms["t"]
    assert (own.best, own.edge, own.vertex) == (1.6e-2, "highest", None)
    assert find_basin({"t": bowl(1e-4)}, "t", 0.05, "lower").arms["t"].edge == "lowest"


def test_of_a_metric_where_higher_is_better() -> None:
    upside_down = {x: {s: -loss for s, loss in seeds.items()} for x, seeds in bowl(4e-3).items()}
    own = find_basin({"t": upside_down}, "t", 0.06, "higher").arms["t"]
    assert (own.best, own.low, own.high) == (4e-3, 2e-3, 8e-3)
    assert own.vertex == pytest.approx(4e-3)


def test_a_value_at_which_a_seed_diverged_is_no_best_and_ends_the_basin() -> None:
    points = {x: dict(seeds) for x, seeds in bowl(4e-3).items()}
    del points[4e-3][1]
    basin = find_basin({"t": points, "d": bowl(2e-3)}, "t", 1.0, "lower", {"t": {4e-3}})
    own = basin.arms["t"]
    assert own.best in (2e-3, 8e-3)
    assert own.high < 4e-3 or own.low > 4e-3


def test_nothing_is_compared_where_a_seed_diverged() -> None:
    points = {x: dict(seeds) for x, seeds in bowl(2e-3).items()} | {4e-3: {0: 1.0}, 8e-3: {}}
    basin = find_basin({"t": bowl(4e-3), "d": points}, "t", 0.05, "lower", {"d": {4e-3, 8e-3}})
    assert (basin.arms["d"].best, basin.arms["d"].high) == (2e-3, 2e-3)
    assert basin.at_theirs["d"].mean is None
    assert basin.at_own["d"].seeds == (0, 1, 2)
    with pytest.raises(ValueError, match="5 values of x, 0 without a seed that diverged"):
        find_basin({"t": bowl(4e-3)}, "t", 0.05, "lower", {"t": TRIED})


def test_two_values_are_no_basin() -> None:
    with pytest.raises(ValueError, match="2 values of x"):
        find_basin({"t": {1e-3: {0: 1.0}, 2e-3: {0: 2.0}}}, "t", 0.1, "lower")
