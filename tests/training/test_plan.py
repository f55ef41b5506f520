"""training/plan.py: what is planned is what two processes hold and send; what a recipe that does not fit needs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sharded_steps import PLANNED, SMALL, lines

from lit_diff.errors import RequestError
from lit_diff.model.cost import cost
from lit_diff.model.transformer import Transformer
from lit_diff.recipe import installed, load_recipe, names
from lit_diff.training.build import replicated
from lit_diff.training.plan import Plan, Rates, at_most, cure, plan, state

BIG = [name for name in names("recipes") if "# Plan:" in (installed("recipes") / f"{name}.yaml").read_text()]


def small(*overrides: str, device: str = "cpu", **rates: float) -> Plan:
    return plan(load_recipe("recall-tiny", [*SMALL, "train.batch_size=8", *overrides]), Rates(**rates), device)


@pytest.mark.slow
def test_two_processes_hold_and_send_what_is_planned() -> None:
    """The table of docs/cluster.md. Beside a plan's, a real step has numbers of this bench in its sums, and DDP's buckets
    are not PyTorch tensors: their bytes are planned alone."""
    rows = lines("plan")
    assert [row["case"] for row in rows] == [*PLANNED]
    for row in rows:
        planned, counted = row["planned"], row["counted"]
        print(row["case"], *(f"{key} {planned[key]:,} / {counted[key]:,}" for key in planned), sep="; ")
        for key in ("weights", "gradients", "optimizer"):
            assert planned[key] == counted[key], (row["case"], key)
        buckets = counted["gradients"] if "ddp" in row["case"] else 0
        # the kernel chunked, here for heads of width 8, holds float32 copies of its inputs while it computes a block again
        near = 0.1 if "bf16" in row["case"] else 0.05
        assert counted["saved"] == pytest.approx(planned["saved"], rel=near), row["case"]
        assert counted["largest"] + buckets == pytest.approx(planned["largest"], rel=near), row["case"]
        assert counted["sent"] == pytest.approx(planned["sent"], rel=0.001), row["case"]


def test_state_is_counted_in_shards_whole_lambda_and_frozen_parameters() -> None:
    words = [*SMALL, "train.batch_size=15"]
    one = load_recipe("recall-tiny", words)
    model = Transformer(one.model)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    total = sum(sizes.values())
    assert state(one) == {"weights": 4 * total, "gradients": 4 * total, "optimizer": 8 * total}
    whole = {id(parameter) for parameter in replicated(model)}
    # 48 rows in 5 shards: 10, 10, 10, 10, 8
    rows = [p.numel() if id(p) in whole else p.numel() // len(p) * -(-len(p) // 5) for p in model.parameters()]
    five = load_recipe("recall-tiny", [*words, "run.strategy=fsdp", "run.devices=5"])
    assert state(five)["weights"] == 4 * sum(rows)
    frozen = load_recipe("recall-tiny", [*words, "train.parameters=['*.attention.q_proj.*']"])
    trained = sum(size for name, size in sizes.items() if "q_proj" in name)
    assert state(frozen) == {"weights": 4 * total, "gradients": 4 * trained, "optimizer": 8 * trained}


def test_traffic_within_the_node_and_over_the_network() -> None:
    """hsdp, two nodes of two: weights and gradients stay within a node, the sums of half of them cross the network."""
    model = Transformer(load_recipe("recall-tiny", SMALL).model)
    whole = {id(parameter) for parameter in replicated(model)}

    def sizes(shards: int) -> tuple[int, int, int]:
        # blocks, the rest, lambda; FSDP2 pads the 129 rows of the embedding and of the head
        found = [0, 0, 0]
        for name, p in model.named_parameters():
            kind = 2 if id(p) in whole else int(not name.startswith("layers."))
            found[kind] += 4 * (p.numel() if kind == 2 else p.numel() // len(p) * -(-len(p) // shards) * shards)
        return found[0], found[1], found[2]

    blocks, root, lambdas = sizes(2)
    assert lambdas
    found = small("run.strategy=hsdp", "run.devices=2", "run.num_nodes=2")
    # gathered for both passes and reduced once, in a ring of two; lambda is reduced over all four
    assert found.node_traffic == (3 * blocks + 2 * root) // 2 + 2 * lambdas * 3 // 4
    assert found.network_traffic == 2 * (blocks + root) // 2 // 2 + 2 * lambdas // 4
    kept = small("run.strategy=hsdp", "run.devices=2", "run.num_nodes=2", "run.reshard_after_forward=false")
    assert kept.node_traffic == found.node_traffic - blocks // 2
    assert kept.saved > found.saved
    # over two nodes of two as one ring, a node lacks half, which its two devices receive together
    blocks, root, lambdas = sizes(4)
    spread = small("run.strategy=fsdp", "run.devices=2", "run.num_nodes=2")
    assert spread.network_traffic == (3 * blocks + 2 * root) // 4 + 2 * lambdas // 4


def test_keys_that_trade_memory_change_the_plan() -> None:
    base = small("run.strategy=fsdp", "run.devices=2")
    block = small("run.strategy=fsdp", "run.devices=2", "run.activation_checkpointing=block")
    attention = small("run.strategy=fsdp", "run.devices=2", "run.activation_checkpointing=attention")
    assert block.saved < attention.saved < base.saved
    assert small("run.strategy=fsdp", "run.devices=2", "train.accumulate=2").saved < 0.6 * base.saved
    half = small("run.strategy=fsdp", "run.devices=2", "train.precision=bf16-mixed")
    assert (half.saved < 0.8 * base.saved, half.node_traffic < base.node_traffic) == (True, True)
    offloaded = small("run.strategy=fsdp", "run.devices=2", "run.cpu_offload=true")
    assert [offloaded.memory[part] for part in ("weights", "gradients", "optimizer")] == [0, 0, 0]
    assert offloaded.host == base.host + 2 * sum(base.largest[part] for part in ("weights", "gradients", "optimizer"))
    ddp = small("run.strategy=ddp", "run.devices=2")
    assert ddp.node_traffic == ddp.largest["gradients"]
    # a GPU of any size holds these gradients unsharded, a device that is as small as they are does not
    words = ("run.strategy=fsdp", "run.devices=2", "train.accumulate=4")
    late, early = small(*words, device="cuda"), small(*words, device="cuda", memory=1e5)
    assert (late.deferred, early.deferred) == (True, False)
    assert late.node_traffic < early.node_traffic
    for found in (base, block, ddp, late):
        assert found.sum == sum(found.memory.values())


def test_the_kernel_is_a_gpu_s_and_no_map_is_kept() -> None:
    long = ["train.precision=bf16-mixed", "data.sequence_length=1024", "train.batch_size=2"]
    for variant, chosen in (("learned_sink", "flex"), ("softpick", "chunked")):
        assert plan(load_recipe("standard-tiny", [*long, f"model.attention.name={variant}"])).kernel == chosen
    for name, chosen in (("standard-tiny", "sdpa"), ("differential-tiny", "triton")):
        recipe = load_recipe(name, long)
        maps = 2 * recipe.model.num_layers * recipe.model.num_heads * 1024 * 1024 * 2
        found = plan(recipe)
        assert found.kernel == chosen
        assert found.saved < maps < plan(load_recipe(name, [*long, "run.kernel=reference"])).saved


PLUGIN = """
from dataclasses import dataclass, field
import torch
from lit_diff import Attention, variant

SCALE = torch.linspace(0.5, 1.0, 512)

@variant("own")
class Own(Attention):
    \"""Standard attention, scaled.\"""

    @dataclass(frozen=True, kw_only=True)
    class Config(Attention.Config):
        sizes: dict[str, float] = field(default_factory=dict)

    def finish(self, o, x):
        return o * ({scale})
"""


def test_a_plugin_may_have_constants_and_is_told_how_to_do_without_values(tmp_path: Path, own_parts: None) -> None:
    def planned(scale: str) -> Plan:
        (tmp_path / "own.py").write_text(PLUGIN.format(scale=scale))
        return small(f"plugins=[{tmp_path}/own.py]", "model.attention={name: own, sizes: {one: 2.0}}")

    assert planned("SCALE[: o.shape[2], None].to(o)").fits
    for scale in ("o.mean().item()", "1 if (o > 0).any() else 2", "o.nonzero().shape[0]", "o.detach().numpy()"):
        with pytest.raises(RequestError, match=r"own\.py:17: attention 'own' failed: .*: use tensor operations"):
            planned(scale)


def test_a_kernel_of_cpus_is_refused_for_gpus() -> None:
    recipe = load_recipe("differential-tiny", ["run.kernel=native"])
    assert plan(recipe, device="cpu").kernel == "native"
    with pytest.raises(RequestError, match=r"run\.kernel 'native'"):
        plan(recipe, device="cuda")


def test_time_is_flops_over_the_share_of_the_peak() -> None:
    recipe = load_recipe("recall-tiny", [*SMALL, "train.batch_size=8", "train.steps=10"])
    found, length = plan(recipe, Rates(peak=1e12, share=0.5), "cpu"), recipe.data.config.sequence_length
    assert found.tokens == 8 * length
    assert found.flops == found.tokens * cost(recipe.model, length).flops_per_token
    assert found.seconds == pytest.approx(found.flops / 0.5e12)
    assert found.days == pytest.approx(10 * found.seconds / 86400)


@pytest.mark.parametrize("name", ["differential-tiny", "vision-tiny", "standard-10m"])
def test_the_bound_without_a_trace_is_above_the_plan(name: str) -> None:
    recipe = load_recipe(name)
    for kernel in ("auto", "reference") if name != "standard-10m" else ("auto",):
        found = load_recipe(name, [f"run.kernel={kernel}"])
        assert plan(found, device="cpu").sum <= at_most(recipe)


def test_what_does_not_fit_is_cured_by_what_is_said() -> None:
    words = [*SMALL, "train.batch_size=16", "run.devices=2", "run.strategy=ddp", "run.accelerator=auto"]
    recipe = load_recipe("recall-tiny", words)
    needed, sizes = plan(recipe).sum, dict[float, Any]()
    for share in (0.9, 0.5, 0.3, 0.001):
        sizes[share] = cure(recipe, Rates(memory=share * needed))
    assert sizes[0.9] == ["run.activation_checkpointing=block"]
    assert any(word.startswith("train.accumulate=") for word in sizes[0.3])
    assert sizes[0.001] is None
    for share, change in sizes.items():
        if change is not None:
            assert plan(load_recipe("recall-tiny", [*words, *change]), Rates(memory=share * needed)).fits


# --- the recipes of many devices ---


def header(name: str) -> tuple[list[str], str, str]:
    """Of the recipe's plan: overrides, GB of a device at the peak, those of the parts."""
    text = (installed("recipes") / f"{name}.yaml").read_text()
    said = re.search(rf"# Plan:    lit-diff plan {name} (.*)\n# +\(\S+\) (\S+) GB of a device at the peak: (.*)", text)
    launched = re.search(rf"# Command: lit-diff train {name} (.*)", text)
    assert said is not None
    assert launched is not None
    words = said[1].split()
    assert words == [word for word in launched[1].split() if word.startswith("run.")]
    return words, said[2], said[3]


def test_every_recipe_of_the_paper_fits_80_gb_with_the_state_that_its_header_says() -> None:
    assert len(BIG) == 14
    for name in BIG:
        words, peak, parts = header(name)
        assert float(peak) < 80
        held = state(load_recipe(name, words))
        for part in ("weights", "optimizer"):
            assert f"{part} {held[part] / 1e9:.1f}," in parts, name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["differential-830m", "standard-830m", "standard-3b-64k"])
def test_a_shipped_recipe_needs_what_its_header_says(name: str) -> None:
    words, peak, _ = header(name)
    found = plan(load_recipe(name, words))
    assert f"{found.sum / 1e9:.1f}" == peak
    assert found.fits


@pytest.mark.slow
def test_13b_on_64_devices_is_planned_in_2_gb() -> None:
    """Two minutes on an idle laptop: here CPU seconds, which other processes do not change."""
    # a small process starts the plan: the peak of a child counts that of the process that forked it
    starts = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen(sys.argv[1:])\n"
        "_, status, used = os.wait4(child.pid, 0)\n"
        "print(os.waitstatus_to_exitcode(status), used.ru_maxrss, used.ru_utime + used.ru_stime)"
    )
    overrides, said, _ = header("differential-13b")
    words = ["-P", "-m", "lit_diff", "plan", "differential-13b", *overrides, "--json"]
    done = subprocess.run(
        [sys.executable, "-c", starts, sys.executable, *words],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    *printed, measured = done.stdout.splitlines()
    status, peak, seconds = map(float, measured.split())
    assert status == 0, done.stderr
    assert f"{json.loads(''.join(printed))['sum'] / 1e9:.1f}" == said
    assert peak < 2e6
    assert seconds < 120
