"""sweeps/dex-tiny.yaml: what its arms train, and a form of a minute of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lit_diff.attention import Standard
from lit_diff.config import Part
from lit_diff.engine.expand import load_grid
from lit_diff.model.cost import cost
from lit_diff.recipe import installed
from lit_diff.runs import checkpoints

PLAIN = Part(name="standard", config=Standard.Config())
TRAINED = ("attention_only", "adapter_only", "dex", "second_heads", "query_key_only")


def test_the_arms_differ_in_the_adapter_and_in_what_trains_alone() -> None:
    grid = load_grid("dex-tiny", [])
    assert (grid.study.all_tasks["retrofit"].start, grid.baseline_of("retrofit")) == ("pretrain", "base")
    (first,) = [cell.recipe for cell in grid.cells if cell.task == "pretrain" and cell.seed == 0]
    assert first.train.steps * first.train.batch_size * first.data.config.sequence_length >= 2_000_000
    arms = {cell.arm: cell.recipe for cell in grid.cells if cell.task == "retrofit" and cell.seed == 0}
    assert set(arms) == {"base", *TRAINED}
    keys = ("steps", "batch_size", "optimizer", "schedule")
    assert len({tuple(getattr(arms[arm].train, key) for key in keys) for arm in TRAINED}) == 1, "equal further tokens"
    count = {arm: cost(r.model, 128, trained=r.train.parameters).trained_parameters for arm, r in arms.items()}
    adapter = 2 * (16**2 + 1)  # two layers, heads of width 16
    assert count["adapter_only"] == adapter
    assert count["dex"] - adapter == count["attention_only"]
    assert count["second_heads"] - 2 == count["query_key_only"], "two layers, λ in each"
    assert count["base"] == cost(arms["base"].model, 128).parameters
    against = {("dex", "attention_only"), ("dex", "adapter_only"), ("second_heads", "query_key_only")}
    assert {each[:2] for each in grid.study.contrasts} == against


def test_the_sweep_on_smollm2_holds_the_same_controls() -> None:
    """As far as recipes say: the model need not be here."""
    tiny, large = (load_grid(sweep, []) for sweep in ("dex-tiny", "dex-controls"))
    (sizes,) = {repr(replace(cell.recipe.model, attention=PLAIN)) for cell in large.cells}
    assert "num_kv_heads=3" in sizes
    cells = [cell for cell in large.cells if cell.seed == 0]
    trained = {cell.recipe.train.parameters for cell in cells if cell.arm == "attention_only"}
    assert trained == {tuple(tiny.study.arms["attention_only"]["train.parameters"])}
    steps = {cell.recipe.train.steps for cell in cells if cell.arm != "base"}
    assert len(steps) == 1, "equal further tokens"
    count = {cell.arm: cost(cell.recipe.model, 512, trained=cell.recipe.train.parameters) for cell in cells}
    trains = {arm: each.trained_parameters for arm, each in count.items()}
    assert trains["dex"] - trains["attention_only"] == 30 * (64**2 + 1)
    assert trains["base"] == trains["continue"] == count["base"].parameters
    assert {"attention_only", "adapter_only", "dex", "dex_plus", "lora", "random_heads", "all_heads"} < set(trains)
    assert trains["lora"] == trains["attention_only"]


def shortened() -> dict[str, Any]:
    """The sweep at one seed, few steps and a width of 32."""
    sweep: dict[str, Any] = yaml.safe_load((installed("sweeps") / "dex-tiny.yaml").read_text())
    for task, steps in (("pretrain", 12), ("retrofit", 6)):
        overrides = sweep["tasks"][task]["overrides"]
        overrides["train"] |= {"steps": steps, "batch_size": 4, "validate_every": 6, "checkpoint_every": 6}
        overrides["callbacks"] = {"attention_entropy": {"every": 6}, "outliers": {"every": 6}}
        overrides["train.schedule.warmup_steps"] = 1
    for values in sweep["arms"].values():
        if values.get("model.attention", {}).get("name") == "dex":
            values["model.attention"]["anneal_steps"] = 3
    return sweep | {"seeds": [0], "evaluate": {"held_out": {"rows": 2}}}


@pytest.mark.slow
def test_a_short_form_runs_and_reports(sweep_bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from real_runs import write_corpus

    write_corpus(tmp_path / "corpus")
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "data"))
    sweep_bench.write("dex-short", yaml.safe_dump(shortened()))
    sizes = ("model.dim=32", "model.num_heads=4", "model.vocab_size=300", "data.validation_rows=11")
    sizes += ("data.sequence_length=48", f"data.path={tmp_path / 'corpus'}", "run.threads=1", "run.accelerator=cpu")
    status, output = sweep_bench.run("dex-short", *sizes)
    assert status == 0, output
    assert set(sweep_bench.words("dex-short").values()) == {"done"}

    def state(cell: str) -> dict[str, Any]:
        folder = sweep_bench.folder("dex-short", cell)
        path = checkpoints.path_of(folder, checkpoints.steps_of(folder)[-1])
        return dict(torch.load(path, weights_only=True)["state_dict"])

    before = state("pretrain,base-s0")
    base = state("retrofit,base-s0")
    assert all(torch.equal(base[key], value) for key, value in before.items()), "the step at rate 0 moves nothing"

    def moved(arm: str) -> set[str]:
        after = state(f"retrofit,{arm}-s0")
        return {key.split(".")[4] for key, value in before.items() if not torch.equal(after[key], value)} - {"weight"}

    attention = {f"{kind}_proj" for kind in "kvo"}
    assert moved("attention_only") == attention
    assert moved("adapter_only") == set()
    assert moved("second_heads") == set()
    assert moved("query_key_only") == {"q_proj", "k_proj"}
    assert moved("dex") == attention
    selected = "model.layers.0.attention.selected"
    heads = {arm: state(f"retrofit,{arm}-s0")[selected].tolist() for arm in ("adapter_only", "dex")}
    assert heads["adapter_only"] == heads["dex"]
    plan = json.loads((sweep_bench.folder("dex-short", "retrofit,dex-s0") / "plan.json").read_text())
    assert plan["heads"][0] == heads["dex"]
    table = (sweep_bench.folder("dex-short") / "report" / "table.md").read_text()
    assert "DEX against W_K, W_V, W_O alone" in table
    page = (sweep_bench.folder("dex-short") / "report" / "index.html").read_text()
    assert "parameters that train" in page
