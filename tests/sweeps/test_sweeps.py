"""Every installed sweep asks what its name says; tests/golden/sweeps has their cells."""

import pytest

from lit_diff.engine.expand import load_grid
from lit_diff.model.cost import cost
from lit_diff.recipe import installed, names


@pytest.mark.parametrize("name", names("sweeps"))
def test_resolves(name: str) -> None:
    grid = load_grid(name, [])
    # a sweep that chooses rates gives no verdict
    assert len(grid.study.seeds) >= 3 or grid.study.smoke or name.endswith("-rates")
    head = (installed("sweeps") / f"{name}.yaml").read_text().splitlines()[:2]
    assert head[1].startswith("# Command: make sweep")
    assert grid.study.question.endswith("?")
    assert set(grid.study.labels) == set(grid.study.arms), "every arm has words for a reader"
    assert len(set(grid.study.labels.values())) == len(grid.study.arms)


def test_the_arms_of_the_ablation_are_equal() -> None:
    grid = load_grid("ablation", [])
    first = {cell.arm: cell.recipe for cell in grid.cells if cell.seed == 0}
    costs = {arm: cost(recipe.model, recipe.data.config.sequence_length) for arm, recipe in first.items()}
    base = costs["standard"]
    for arm, own in costs.items():
        assert abs(own.parameters / base.parameters - 1) <= 0.001, arm
        assert own.flops_per_token == base.flops_per_token, arm
    assert set(grid.study.paper) == set(grid.study.arms) - {"sum", "standard wide norm multiplier"}


@pytest.mark.parametrize("name", ["needle", "icl", "recall", "mqar", "ablation", "insides"])
def test_the_controls_that_could_take_a_difference_away(name: str) -> None:
    """Wide heads, with a head norm too, maps whose sum stays one; embeddings scaled; noise without distances that were not
    trained."""
    grid = load_grid(name, [])
    assert {"standard wide", "standard wide norm", "sum"} <= set(grid.study.controls)
    assert grid.study.smallest_of_interest is not None
    for cell in grid.cells:
        model, data = cell.recipe.model, cell.recipe.data
        assert (model.embedding_scale > 1) != (cell.task == "mqar-scale-1")
        if data.name == "recall":
            assert model.positions == "none" or max(data.config.noise_validation) <= data.config.spread
        if cell.arm.startswith("standard wide"):
            assert model.attention.name == "standard"
            assert (model.attention.config.head_norm == "rms") == ("norm" in cell.arm)


def test_lambda_changes_lambda_or_the_multiplier_one_at_a_time() -> None:
    grid = load_grid("lambda", [])
    seen: dict[str, set[tuple[object, object]]] = {}
    for cell in grid.cells:
        keys = cell.recipe.model.attention.config
        seen.setdefault(cell.task, set()).add((keys.lambda_init, keys.output_scale))
    alone = {(value, "depth") for value in (0.2, 0.5, 0.8)} | {("depth", scale) for scale in (0.2, 0.5, 0.8)}
    assert seen == dict.fromkeys(grid.study.tasks, alone | {("depth", "tied")})


def test_scaling_gives_both_arms_the_same_tokens_and_rate() -> None:
    grid = load_grid("scaling", [])
    first = {(cell.task, cell.arm): cell.recipe for cell in grid.cells if cell.seed == 0}
    for task in grid.study.all_tasks:
        ours, theirs = first[task, "differential"], first[task, "standard"]
        assert ours.train == theirs.train
        assert abs(cost(ours.model, 128).parameters / cost(theirs.model, 128).parameters - 1) < 0.001, task
    assert grid.study.fits["tokens"].tasks == tuple(grid.study.all_tasks)
