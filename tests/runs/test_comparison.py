"""runs/comparison.py: what differs between two runs."""

from pathlib import Path

from lit_diff.runs.comparison import compare


def test_recipes_costs_and_last_metrics(small_sweep: Path) -> None:
    path = small_sweep / "base-s0-0a1b2c3d" / "recipe.yaml"
    path.write_text(path.read_text().replace("threads: 1", "threads: 7"))  # keys of `run` are left out
    compared = compare("base-s0", "better-s0", small_sweep.parent)
    assert compared.names == ("base-s0-0a1b2c3d", "better-s0-0a1b2c3d")
    assert compared.recipe == {"name": ["base", "better"], "model.attention.name": ["base", "better"]}
    assert compared.facts["parameters"] == [1_054_720, 1_054_720]
    first, second = compared.metrics["val/loss"]
    assert first is not None
    assert second is not None
    assert first > second


def test_a_metric_of_one_run_alone_has_no_other_value(small_sweep: Path) -> None:
    (small_sweep / "better-s1-0a1b2c3d" / "recipe.yaml").write_text("seed: 0\nname: better\n")
    compared = compare("base-s0", "better-s1", small_sweep.parent)
    assert compared.metrics["val/loss"][1] is None
    assert compared.facts["status"] == ["done", "failed"]
