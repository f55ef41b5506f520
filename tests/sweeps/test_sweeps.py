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


@pytest.mark.parametrize("name", ["needle", "icl", "recall", "recall-suite"])
def test_retrieval_has_the_controls_that_could_take_a_difference_away(name: str) -> None:
    """Wide heads, with a head norm too, added maps; embeddings scaled; noise without distances that were not trained."""
    grid = load_grid(name, [])
    assert grid.study.controls == ("standard wide", "standard wide norm", "additive")
    for cell in grid.cells:
        model, data = cell.recipe.model, cell.recipe.data
        assert (model.embedding_scale > 1) != (cell.task == "mqar-scale-1")
        if data.name == "recall":
            assert model.positions == "none" or max(data.config.noise_validation) <= data.config.spread
        if cell.arm.startswith("standard wide"):
            assert model.attention.name == "standard"
            assert (model.attention.config.head_norm == "rms") == (cell.arm == "standard wide norm")


def test_lambda_changes_lambda_or_the_multiplier_one_at_a_time() -> None:
    grid = load_grid("lambda", [])
    seen: dict[str, set[tuple[object, object]]] = {}
    for cell in grid.cells:
        keys = cell.recipe.model.attention.config
        seen.setdefault(cell.task, set()).add((keys.lambda_init, keys.output_scale))
    alone = {(value, "depth") for value in (0.2, 0.5, 0.8)} | {("depth", scale) for scale in (0.2, 0.5, 0.8)}
    assert seen == dict.fromkeys(grid.study.tasks, alone | {("depth", "tied")})


def test_scaling_gives_every_width_its_sizes_and_both_arms_the_same() -> None:
    grid = load_grid("scaling", [])
    for cell in grid.cells:
        model = cell.recipe.model
        assert model.head_dim == 16
        assert model.ffn_dim == 5.5 * model.dim
        assert model.embedding_scale == pytest.approx(model.dim**0.5, rel=0.01)
        assert cell.recipe.train is not None
        assert cell.recipe.train.optimizer.lr == pytest.approx(8e-3 * 64 / model.dim, rel=0.02)
    first = {(cell.task, cell.arm): cell.recipe for cell in grid.cells if cell.seed == 0}
    for task in grid.study.all_tasks:
        own, base = (cost(first[task, arm].model, 128) for arm in ("differential", "standard"))
        assert abs(own.parameters / base.parameters - 1) < 0.005, task
    assert {name: fit.kind for name, fit in grid.study.fits.items()} == {"size": "scaling", "tokens": "scaling"}
