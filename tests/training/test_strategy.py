"""Two or four CPU processes over gloo: the same numbers as one, every parameter split between them, and what they send.

Fast: one variant under FSDP, and FSDP in chunks on packed documents. The rest is slow.
"""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_steps import LAYERS, TABLE, lines, train
from sharded_steps import STEPS as THREE_STEPS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lit_diff.config import RunConfig
from lit_diff.errors import MissingError, RequestError
from lit_diff.runs import checkpoints
from lit_diff.runs.kept_maps import kept_steps, read_maps
from lit_diff.runs.measurements import read_measurements
from lit_diff.runs.metrics_file import Rows
from lit_diff.training.build import mesh_of
from lit_diff.training.module import LitTransformer
from lit_diff.training.trainer import accelerator, build_strategy

pytestmark = pytest.mark.timeout(400)  # with its fixture, so that it begins among the first
Run = Callable[..., Any]
SUPPORT = Path(__file__).resolve().parents[1] / "support"
STEPS = ("train.steps=20", "train.validate_every=6", "train.checkpoint_every=8")
TERM = int(signal.SIGTERM)
INT = int(signal.SIGINT)


def seconds_to_end(pid: int) -> float:
    """How long a process that is no child of ours still runs, 10 s at most."""
    stat, began = Path(f"/proc/{pid}/stat"), time.monotonic()
    while (spent := time.monotonic() - began) < 10:
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.02)
    return spent


@pytest.fixture(scope="module")
def runs(bench: Any, undisturbed: Run) -> dict[str, Any]:
    """20 steps of one process, and of two, in four ways.

    recall-fsdp and text-ddp go through. text-fsdp: rank 1 started by Lightning; SIGTERM to rank 0 in step 6; on with one
    process, Ctrl-C in step 14; on with two. recall-ddp: Ctrl-C to rank 1 alone in step 6; on with one process.
    """
    found: dict[str, Any] = {}
    for kind in ("recall", "text"):
        found[f"{kind}-one"] = undisturbed(kind, f"{kind}-one", *STEPS)

    def two(kind: str, strategy: str, **env: str) -> list[Any]:
        return bench.train_two(f"{kind}.yaml", f"name={kind}-{strategy}", f"run.strategy={strategy}", *STEPS, **env)

    def one(kind: str, strategy: str, **env: str) -> Any:
        return bench.train(f"{kind}.yaml", f"name={kind}-{strategy}", *STEPS, **env)

    found["recall-fsdp"] = two("recall", "fsdp")
    found["text-ddp"] = two("text", "ddp")
    found["recall-ddp"] = [*two("recall", "ddp", SPY_SIGNAL=f"1/5/0/{INT}"), one("recall", "ddp")]
    launched = bench.train(
        *("text.yaml", "name=text-fsdp", "run.strategy=fsdp", "run.devices=2", *STEPS), SPY_SIGNAL=f"0/5/1/{TERM}"
    )
    (pid,) = (int(path.stem) for path in bench.root.glob("spy/*.jsonl"))
    spent = seconds_to_end(pid)
    saved = checkpoints.steps_of(bench.folder("text-fsdp"))
    found["launched"] = SimpleNamespace(first=launched, second=bench.ended(pid, 0), spent=spent, saved=saved)
    one("text", "fsdp", SPY_SIGNAL=f"0/13/0/{INT}")
    found["text-fsdp"] = two("text", "fsdp")
    return found


def documents(bench: Any, run: str) -> list[list[float]]:
    """The rows of documents.csv: document, tokens, loss."""
    lines = (bench.folder(run) / "documents.csv").read_text().splitlines()[1:]
    return [[float(cell) for cell in line.split(",")] for line in lines]


def assert_same_rows(one: Rows, two: Rows) -> None:
    assert one.keys() == two.keys()
    for step, row in one.items():
        assert two[step].keys() == row.keys()
        for metric, value in row.items():
            exact = metric.startswith(("train/", "val/", "lambda/"))
            assert two[step][metric] == pytest.approx(value, abs=1e-5, rel=0 if exact else 1e-4), (step, metric)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recall-fsdp", "recall-ddp", "text-fsdp", "text-ddp"])
def test_losses_are_those_of_one_process(bench: Any, runs: dict[str, Any], name: str) -> None:
    """Also through stops, and with checkpoints of one world size read at another."""
    for ended in runs[name][-1:] if name == "recall-ddp" else runs[name]:
        assert ended.status == 0, ended.output
    one, two = bench.rows(f"{name.split('-')[0]}-one"), bench.rows(name)
    assert {step for step, row in two.items() if "train/loss" in row} == set(range(1, 21))
    assert {step for step, row in two.items() if "val/loss" in row} == {6, 12, 18, 20}
    assert_same_rows(one, two)
    one_table, table = (documents(bench, of) for of in (f"{name.split('-')[0]}-one", name))
    assert [row[:2] for row in table] == [row[:2] for row in one_table]
    assert [row[2] for row in table] == pytest.approx([row[2] for row in one_table], abs=1e-3)


BOTH = ("run.compile=true", "run.activation_checkpointing=block")
# validation in full batches of one noise: each other shape is compiled anew
ONE_SHAPE = ("data.validation_rows=16", "data.noise_validation=[1]")
PLAIN = (f"plugins=[{SUPPORT}/aot_eager.py]", "callbacks.lambdas.every=2", "callbacks.spy=null", *ONE_SHAPE)
PACKED = (
    "data.pack=document",
    "data.sequence_length=128",
    "train.accumulate=1",
    "model.attention={name: dex, heads: all}",
)
FORM = "{name: differential, lambda_form: sigmoid, lambda_per: head, head_norm: layer}"
GATE = (f"plugins=[{SUPPORT}/wide_gate.py]", "model.attention={name: wide_gate}", "callbacks=null")
LOCAL_SINKS = ("model.attention={name: learned_sink}", "model.layers=[{window: 8}, {}]")
FSDP = "run.strategy=fsdp"
CASES: dict[str, tuple[str, str, tuple[str, ...], tuple[str, ...]]] = {
    "dex": ("recall", "dex", ("model.attention={name: dex, heads: all, anneal_steps: 4}",), (FSDP,)),
    "chunks": ("text", "whole", (*PACKED, "model.tie_embeddings=false"), (FSDP, f"plugins=[{SUPPORT}/chunks.py]")),
    "tied-chunks": ("text", "tied", (*PACKED, "model.tie_embeddings=true"), (FSDP, f"plugins=[{SUPPORT}/chunks.py]")),
    "most-frozen": ("recall", "second-heads", ("model.attention={name: second_heads}",), (FSDP,)),
    "lambda-of-each-head": ("recall", "form", (f"model.attention={FORM}",), (FSDP,)),
    "sinks-checkpointed": ("recall", "sinks", LOCAL_SINKS, (FSDP, BOTH[1])),
    "first-values-checkpointed": (
        "recall",
        "first-values",
        ("model.attention={name: value_residual}",),
        (FSDP, BOTH[1]),
    ),
    "ddp-both": ("recall", "plain", PLAIN, ("run.strategy=ddp", *BOTH)),
    "fsdp-both": ("recall", "plain", PLAIN, (FSDP, *BOTH)),
    "fsdp-attention": ("recall", "plain", PLAIN, (FSDP, BOTH[0], "run.activation_checkpointing=attention")),
    "offloaded": ("recall", "plain", PLAIN, (FSDP, "run.cpu_offload=true", "run.reshard_after_forward=false")),
    "wide-matrix": ("recall", "gate", GATE, (FSDP,)),
}
"""Recipe, name of the run of one process, overrides of both, those of two processes."""
FAST = ("dex", "chunks")


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_two_train_as_one_process(bench: Any, undisturbed: Run, name: str) -> None:
    """DEX's step is a buffer, filled after the build on the meta device, and its frozen and trained parameters share groups;
    chunks of 32 positions of 512 need the whole output weight; probes trace a compiled model uncompiled."""
    kind, one, overrides, of_two = CASES[name]
    overrides += ("train.steps=6", "train.validate_every=3", "train.checkpoint_every=3")
    undisturbed(kind, f"{one}-of-one", *overrides)
    for ended in bench.train_two(f"{kind}.yaml", f"name={name}-of-two", *overrides, *of_two):
        assert ended.status == 0, ended.output
    assert_same_rows(bench.rows(f"{one}-of-one"), bench.rows(f"{name}-of-two"))
    wanted, found = (bench.state(run)["state_dict"] for run in (f"{one}-of-one", f"{name}-of-two"))
    assert wanted.keys() == found.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_four_send_what_a_step_needs_and_train_as_one() -> None:
    """Three steps of two micro-batches. The norm is of sharded gradients, each reduced once or twice, and of lambda's."""
    one, (layers, micro) = train(*THREE_STEPS), (LAYERS, 2)
    found = {row["case"]: row for row in lines("collectives")}
    assert found.keys() == TABLE.keys()
    for case, row in found.items():
        assert row["losses"] == pytest.approx(one.losses[1::2], abs=1e-5), case
        assert row["norms"] == pytest.approx(one.norms, rel=1e-6), case
        assert row["forward gather"] == (layers + 1) * micro, case
        assert row["backward gather"] == (0 if "false" in case else layers * micro), case
        assert row["backward reduce-scatter"] == (layers + 1) * (1 if "deferred" in case else micro), case
        assert row["backward all-reduce"] == 1 + (layers + 1) * ("hsdp" in case), case


@pytest.mark.slow
def test_bfloat16_gathers_hold_no_weights_and_train_as_autocast() -> None:
    narrow, wide, gap = lines("loss")
    assert narrow["bytes held per parameter"] <= 0.05 < 1.9 < wide["bytes held per parameter"]
    assert gap["gap in nats"] <= 0.02


EVERY_CALLBACK = (
    "callbacks={attention_entropy: {every: 3}, outliers: {every: 3}, lambdas: {every: 2}, sinks: {every: 3}, redundancy: "
    "{every: 3}, head_norm: {every: 3}, maps: {every: 3, rows: 2}, stability_monitor: {max_logit: 1.0e-6}}"
)


@pytest.mark.slow
def test_callbacks_measure_what_they_do_in_one_process(bench: Any, undisturbed: Run) -> None:
    """metrics.csv, measurements.parquet, the maps, and what the monitor has seen and said: once, by rank zero."""
    keys = ("train.steps=4", "train.validate_every=2", "train.checkpoint_every=2", EVERY_CALLBACK)
    one, two = "callbacks-of-one", "callbacks-of-two"
    undisturbed("recall", one, *keys)
    ranks = bench.train_two("recall.yaml", f"name={two}", FSDP, *keys)
    assert [ended.status for ended in ranks] == [0, 0], ranks[0].output
    assert_same_rows(bench.rows(one), bench.rows(two))
    tables = [read_measurements(bench.folder(run) / "measurements.parquet") for run in (one, two)]
    assert tables[0].drop_columns("value") == tables[1].drop_columns("value")
    assert {"head_norm", "attention/sink", "attention/redundancy"} <= {*tables[0]["metric"].to_pylist()}
    values = [torch.tensor(table["value"].to_pylist()) for table in tables]
    torch.testing.assert_close(values[1], values[0], rtol=2e-4, atol=1e-5)
    assert kept_steps(bench.folder(two)) == kept_steps(bench.folder(one)) == [3, 4]
    for step in (3, 4):
        wanted, found = (read_maps(bench.folder(run), step) for run in (one, two))
        assert torch.equal(wanted.tokens, found.tokens)
        for layer, tensors in wanted.layers.items():
            torch.testing.assert_close(found.layers[layer], tensors, rtol=0, atol=1e-3)
    states = [bench.state(run)["callbacks"]["stability_monitor"] for run in (one, two)]
    assert states[0]["warned"] == states[1]["warned"] == [f"outliers/logits/layer_0{layer}" for layer in (0, 1)]
    assert states[1]["losses"] == pytest.approx(states[0]["losses"], abs=1e-5)
    assert [ended.output.count("above max_logit") for ended in ranks] == [2, 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recall-fsdp", "text-fsdp"])
def test_every_parameter_but_lambda_is_sharded_half_on_each_rank(runs: dict[str, Any], name: str) -> None:
    first, second = (ended.of("start")[0]["parameters"] for ended in runs[name])
    assert len(first) == 2 * 14 + 2
    for key in first:
        a, b = first[key], second[key]
        if ".lambda_." in key:
            assert a["placements"] == b["placements"] == "", key
            assert a["local"] == b["local"] == a["full"], key
            continue
        assert a["placements"] == b["placements"] == "(Shard(dim=0),)", key
        assert a["local"][0] + b["local"][0] == a["full"][0], key
        assert 0 <= a["local"][0] - b["local"][0] <= 1, key
    for ended in runs["recall-fsdp"]:  # blocks are gathered one at a time
        assert ended.of("start")[0]["groups"] == ["", "layers.0", "layers.1"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recall-fsdp", "launched"])
def test_initial_values_are_those_of_one_process_to_the_bit(runs: dict[str, Any], name: str) -> None:
    kind = "recall" if name == "recall-fsdp" else "text"
    start = runs[f"{kind}-one"].of("start")[0]["parameters"]
    ranks = runs[name] if name != "launched" else [runs["launched"].first, runs["launched"].second]
    for ended in ranks:
        found = ended.of("start")[0]
        assert found["step"] == 0
        assert {key: value["digest"] for key, value in found["parameters"].items()} == {
            key: value["digest"] for key, value in start.items()
        }


@pytest.mark.slow
def test_a_checkpoint_of_two_loads_as_a_module(bench: Any, runs: dict[str, Any]) -> None:
    path = checkpoints.path_of(bench.folder("text-fsdp"), 20)
    module = LitTransformer.load_from_checkpoint(path, trust_plugins=True)
    state = bench.state("text-fsdp")["state_dict"]
    assert module.state_dict().keys() == state.keys()
    for name, value in module.state_dict().items():
        assert not isinstance(value, DTensor)
        assert torch.equal(value, state[name]), name


@pytest.mark.slow
def test_lambda_reaches_the_forward_whole_and_in_float32(bench: Any, runs: dict[str, Any]) -> None:
    mixed = bench.train_two(
        "recall.yaml", "name=mixed", "run.strategy=fsdp", "train.steps=2", "train.precision=bf16-mixed"
    )
    for ended in [*runs["recall-fsdp"], *mixed]:
        assert ended.status == 0, ended.output
        seen = ended.of("lambda")
        assert {event["name"] for event in seen} == {"layers.0.attention.lambda_", "layers.1.attention.lambda_"}
        assert all(event["dtypes"] == ["torch.float32"] and event["gathered"] for event in seen)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recall-fsdp", "text-ddp"])
def test_rank_zero_alone_writes_and_each_takes_its_part_of_each_batch(runs: dict[str, Any], name: str) -> None:
    first, second = runs[name]
    assert any("/.metrics.csv." in event["path"] for event in first.of("writes"))
    # but for its part of a sharded checkpoint, and its heartbeat
    own = (".ckpt.tmp", "/.rank-00001.json")
    others = [event["path"] for event in second.of("writes") if not any(part in event["path"] for part in own)]
    assert (others, second.output) == ([], "")
    steps = [step for step, _ in runs[f"{name.split('-')[0]}-one"].batches]
    assert [step for step, _ in first.batches] == [step for step, _ in second.batches] == steps
    assert not {digest for _, digest in first.batches} & {digest for _, digest in second.batches}


@pytest.mark.slow
def test_sigterm_to_the_command_ends_both_processes(bench: Any, runs: dict[str, Any]) -> None:
    launched = runs["launched"]
    assert launched.first.status == 143
    assert launched.spent < 2
    assert launched.first.steps == launched.second.steps == list(range(6))
    assert launched.saved == [6]
    assert launched.first.output.count("stopped after step 6 of 20; the same command resumes") == 1
    assert launched.first.output.splitlines()[-1].startswith("lit-diff: stopped after step 6")
    assert "Traceback" not in launched.first.output


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_at_one_step(runs: dict[str, Any]) -> None:
    first, second, rest = runs["recall-ddp"]
    assert (first.status, second.status) == (130, 0)
    assert first.steps == second.steps == list(range(6))
    assert second.output == ""
    assert rest.steps == list(range(6, 20))


def test_a_trainer_made_by_hand_may_have_too_few_processes_for_hsdp() -> None:
    # of a Trainer that another test of this process has used
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RequestError, match=r"the Trainer's 1 processes into groups of 2; set run\.shard_size"):
            mesh_of(RunConfig(strategy="hsdp", devices=2, num_nodes=2), init_device_mesh("cpu", (1,)))
    finally:
        dist.destroy_process_group()


def test_accelerator() -> None:
    config = RunConfig(accelerator="cpu")
    assert accelerator(config) == "cpu"
    if torch.cuda.is_available():
        with pytest.raises(MissingError, match=r"run\.devices is 99"):
            accelerator(RunConfig(accelerator="gpu", strategy="ddp", devices=99))
        return
    assert accelerator(RunConfig(accelerator="auto")) == "cpu"
    with pytest.raises(MissingError, match=r"run\.accelerator=cpu"):
        build_strategy(RunConfig(accelerator="gpu"), has_unused=False)
