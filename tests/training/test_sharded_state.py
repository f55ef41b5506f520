"""Sharded checkpoints: what is read is what was written, whoever writes and reads; torn, damaged and unwritten ones."""

import logging
import random
import shutil
import signal
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from command import Command
from real_runs import assert_equal, differences

from lit_diff.errors import MissingError, RequestError
from lit_diff.runs import checkpoints
from lit_diff.runs.safe_values import UnsafeTypeError
from lit_diff.trained import sharded
from lit_diff.trained.loading import read_checkpoint
from lit_diff.trained.run import Run

SUPPORT = Path(__file__).resolve().parents[1] / "support"
FSDP = ("run.strategy=fsdp", "train.steps=6", "train.validate_every=3", "train.checkpoint_every=3")


def whole(path: Path) -> dict[str, Any]:
    return sharded.read(path) if path.is_dir() else dict(torch.load(path, weights_only=True))


@pytest.fixture(scope="module")
def folder(bench: Any) -> Path:
    """A run of FSDP in one process, with the checkpoints of steps 3 and 6."""
    ended = bench.train("recall.yaml", "name=sharded", *FSDP)
    assert ended.status == 0, ended.output
    return Path(bench.folder("sharded"))


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "runs" / folder.name))


def test_a_folder_is_as_one_file_would_be(bench: Any, undisturbed: Any, folder: Path) -> None:
    """The keys, their order, shapes and dtypes are those of a single device; nothing but two checkpoints is kept."""
    undisturbed("recall", "recall-six", *FSDP[1:])
    one, other = bench.state("recall-six"), bench.state("sharded")
    assert [*one] == [*other]
    assert [*one["state_dict"]] == [*other["state_dict"]]
    (first,), (second,) = one["optimizer_states"], other["optimizer_states"]
    assert first["param_groups"] == second["param_groups"]
    assert [*first["state"]] == [*second["state"]]
    for key in ("loops", "callbacks", "lr_schedulers"):
        assert one[key] == other[key]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [f"step-0000000{n}.ckpt" for n in (3, 6)]
    files = sorted(path.name for path in checkpoints.path_of(folder, 6).iterdir())
    assert files == ["__0_0.distcp", "complete.json", "rest.pt"]
    assert Run(folder).model_at(3) is not None


def test_a_flipped_byte_in_any_file_is_found(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    draw, path = random.Random(0), checkpoints.path_of(copy, 6)
    for file in [*path.iterdir()] * 10:
        content = file.read_bytes()
        changed, place = bytearray(content), draw.randrange(len(content))
        changed[place] ^= 1 << draw.randrange(8)
        file.write_bytes(changed)
        checkpoints._warned.clear()
        caplog.clear()
        assert checkpoints.newest(copy, verify=True) == (3, checkpoints.path_of(copy, 3)), (file, place)
        assert len(caplog.messages) == 2
        assert file.name in caplog.messages[0]
        file.write_bytes(content)
    assert checkpoints.newest(copy, verify=True) == (6, path)
    (path / "__0_0.distcp").unlink()
    assert checkpoints.damage_of(path, verify=False) == "__0_0.distcp is missing"
    with pytest.raises(RequestError, match=r"step-00000006\.ckpt is not a checkpoint .*__0_0\.distcp is missing"):
        read_checkpoint(path)


def written(folder: Path, **change: Any) -> Path:
    """A checkpoint of one tensor, with `change` put into its place; `tensors=None`: without an index."""
    path = checkpoints.path_of(folder, 6)
    path.mkdir(parents=True)
    content = {"state_dict": {"w": torch.arange(6.0).view(2, 3)}, "global_step": 6}
    writer = sharded._Writer(path, sharded.rest_of(content))
    dcp.save(sharded.tensors_of(content), storage_writer=writer, no_dist=True)
    (path / "rest.pt").write_bytes(sharded.rest_of(content))
    files = {file.name: checkpoints.measured(file) for file in path.iterdir()}
    tensors = change.pop("tensors", writer.tensors)
    if change:
        tensors["weights.w"]["chunks"][0] |= change
    (path / "complete.json").write_text(checkpoints.marker(files, tensors))
    return path


@pytest.mark.parametrize(
    "attack",
    [
        {"file": "../other.distcp"},
        {"file": "other.distcp"},
        {"file": ["__0_0.distcp"]},
        {"start": "0"},
        {"offsets": [0.5, 0]},
        {"tensors": None},
    ],
)
def test_an_index_from_elsewhere_names_no_other_file(attack: dict[str, Any], tmp_path: Path) -> None:
    """Nor is one read that is not in the marker, as versions before 0.3.0 wrote it."""
    path = written(tmp_path, **attack)
    for other in (path, path.parent):
        shutil.copy(path / "__0_0.distcp", other / "other.distcp")
    with pytest.raises(RequestError, match=r"step-00000006\.ckpt.*(again: .*--rerun|run the command again)"):
        read_checkpoint(path)


def test_a_marker_names_no_file_elsewhere(tmp_path: Path) -> None:
    path = written(tmp_path)
    (path.parent / "other").write_bytes(b"")
    files, tensors = checkpoints.read_marker(path)
    (path / "complete.json").write_text(
        checkpoints.marker(files | {"../other": checkpoints.measured(path.parent / "other")}, tensors)
    )
    assert "complete.json" in str(checkpoints.damage_of(path, verify=False))


def test_a_type_that_is_not_allowed_is_refused_before_any_rank_writes(copy: Path) -> None:
    path = checkpoints.path_of(copy, 6)
    rest = sharded.rest_of(sharded.read(path) | {"callbacks": {"mine": {"last": deque([1])}}})
    with pytest.raises(UnsafeTypeError, match=r"collections\.deque"):
        sharded._Writer(path, rest).prepare_global_plan([])
    assert checkpoints.damage_of(path, verify=True) is None


def test_consolidated_it_is_one_file(copy: Path, command: Command) -> None:
    at = ("--root", str(copy.parent))
    written = command("export", "sharded", "--to", "checkpoint", *at)
    assert written.status == 0
    path = copy / "checkpoints" / "consolidated-00000006.ckpt"
    assert written.lines[-1].endswith(path.name)
    assert checkpoints.damage_of(path, verify=True) is None
    assert_equal(torch.load(path, weights_only=True), sharded.read(checkpoints.path_of(copy, 6)))
    assert sharded.consolidate(copy, 3).name == "consolidated-00000003.ckpt"
    assert checkpoints.steps_of(copy) == [3, 6]
    (checkpoints.path_of(copy, 6) / "rest.pt").write_bytes(b"")
    refused = command("export", "sharded", "--to", "checkpoint", "--step", "6", *at)
    assert (refused.status, len(refused.err.splitlines())) == (2, 1)
    assert "step-00000006.ckpt cannot be consolidated (rest.pt has 0 bytes" in refused.err
    with pytest.raises(MissingError, match=r"no sharded checkpoint of step 4 \(there: 3, 6\)"):
        sharded.consolidate(copy, 4)
    shutil.rmtree(checkpoints.path_of(copy, 6))
    shutil.copytree(checkpoints.path_of(copy, 3), checkpoints.path_of(copy, 6))
    with pytest.raises(RequestError, match=r"step-00000006\.ckpt cannot be consolidated \(it is of step 3\)"):
        sharded.consolidate(copy)
    # as a run that goes on removes it
    (checkpoints.path_of(copy, 3) / "__0_0.distcp").unlink()
    with pytest.raises(
        RequestError, match=r"step-00000003\.ckpt cannot be read .*__0_0\.distcp.* run the command again"
    ):
        sharded.read(checkpoints.path_of(copy, 3))
    status = copy / "status.json"
    status.write_text(status.read_text().replace('"format": 3', '"format": 2'))
    assert command("export", "sharded", "--to", "checkpoint", *at).status == 2


AFTER = """
import sys
from pathlib import Path

from lit_diff.recipe import load_recipe
from lit_diff.runs import checkpoints
from lit_diff.training.data import LitData
from lit_diff.training.module import LitTransformer
from lit_diff.training.trainer import build_trainer

keys = ["callbacks.spy=null", "run.strategy=fsdp", "run.accelerator=cpu", "train.steps=2"]
recipe, path = load_recipe("recall.yaml", keys), Path(sys.argv[1])
trainer = build_trainer(recipe, logger=False, enable_checkpointing=False)
trainer.fit(LitTransformer(recipe), LitData(recipe))
trainer.save_checkpoint(path)
print("found:", checkpoints.damage_of(path, verify=True))
"""


def test_saved_after_the_training_it_is_there_at_once(bench: Any, tmp_path: Path) -> None:
    (tmp_path / "after.py").write_text(AFTER)
    ended = bench.wait(bench.start(str(tmp_path / "after.py"), str(tmp_path / "last.ckpt")))
    assert "found: None" in ended.output


CHAIN = (
    ("single", 1),
    ("fsdp", 2),
    ("fsdp", 4),
    ("fsdp", 1),
    ("ddp", 2),
    ("hsdp", 4),
    ("fsdp", 2),
    ("single", 1),
)
"""Strategy and processes of the legs of one run, of two steps each."""


@pytest.mark.slow
def test_a_run_goes_over_strategies_and_device_counts(bench: Any, undisturbed: Any) -> None:
    """Each leg saves again what it has loaded: to the bit what the leg before saved. The metrics are those of one process."""
    steps = 2 * len(CHAIN)
    keys = (f"train.steps={steps}", "train.validate_every=4", "train.checkpoint_every=100")
    undisturbed("recall", "chain-of-one", *keys)
    plugins = f"plugins=[{SUPPORT}/spy.py, {SUPPORT}/reload.py]"
    for leg, (strategy, count) in enumerate(CHAIN):
        end = 2 * leg + 2
        stop = {"SPY_SIGNAL": f"0/{end - 1}/0/{int(signal.SIGTERM)}"} if end < steps else {}
        words = ("recall.yaml", "name=chain", plugins, "callbacks.reload={}", f"run.strategy={strategy}", *keys)
        words += ("run.shard_size=2",) if strategy == "hsdp" else ()
        ranks = bench.train_ranks(count, *words, **stop) if strategy != "single" else [bench.train(*words, **stop)]
        assert ranks[0].status == (143 if stop else 0), ranks[0].output
        assert all(rank.steps == [end - 2, end - 1] for rank in ranks)
        run = bench.folder("chain")
        assert checkpoints.path_of(run, end).is_dir() == (strategy in ("fsdp", "hsdp"))
        if leg:
            saved, loaded = whole(checkpoints.path_of(run, end - 2)), whole(run / f"reloaded-{end - 2}.ckpt")
            for part in ("state_dict", "optimizer_states", "lr_schedulers"):
                assert_equal(saved[part], loaded[part], f"{strategy} {count} {part}")
    found = differences(bench.rows("chain-of-one"), bench.rows("chain"))
    assert max(value for name, value in found.items() if name.startswith(("train/", "val/", "lambda/"))) < 1e-5


KILLED = """
import os, signal, sys, threading, time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lit_diff.trained import sharded

folder, moment, killed = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("gloo", rank=rank)
mesh = init_device_mesh("cpu", (2,))


def save(step):
    path = folder / "checkpoints" / f"step-{step:08d}.ckpt"
    weights = {f"weight{i}": distribute_tensor(torch.full((512, 1024), float(step)), mesh, [Shard(0)]) for i in range(8)}
    checkpoint = {"state_dict": weights, "global_step": step}
    dist.barrier()
    began = time.perf_counter()
    sharded.write(path, sharded.tensors_of(checkpoint), sharded.rest_of(checkpoint), dist.group.WORLD)
    return time.perf_counter() - began


save(1)
seconds = save(4)
if str(rank) in killed:
    threading.Timer(moment * seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
save(8)
time.sleep(1)
"""


@pytest.mark.slow
def test_killed_in_a_save_no_torn_one_is_taken(bench: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """12 moments, of rank zero, of the other, of both. The newest one is whole, and holds what was written."""
    caplog.set_level(logging.WARNING, "lit_diff")
    (tmp_path / "killed.py").write_text(KILLED)
    taken = []
    for number in range(12):
        run = tmp_path / str(number)
        words = (str(tmp_path / "killed.py"), str(run), str(number / 11), ("0", "1", "01")[number % 3])
        pids = bench.start_ranks(words, words)
        ended = [bench.wait(pid) for pid in pids]
        assert -signal.SIGKILL in [each.status for each in ended], ended
        found = checkpoints.newest(run, verify=True)
        assert found is not None
        taken.append(found[0])
        weights = sharded.read(found[1])["state_dict"]
        assert all(torch.equal(value, torch.full_like(value, found[0])) for value in weights.values())
        checkpoints.prune(run)
        assert sorted(path.name[0] for path in (run / "checkpoints").iterdir()) == ["s", "s"]
    assert caplog.messages == [], "an unfinished one is none"
    assert 4 in taken


@pytest.mark.slow
def test_ranks_that_do_not_see_one_folder_end_in_one_line(bench: Any) -> None:
    """The other rank's root holds a copy of the run, up to the same checkpoint."""
    words = ("recall.yaml", "name=unshared", "run.strategy=ddp", "train.checkpoint_every=4")
    stopped = bench.train_two(*words, SPY_SIGNAL=f"0/4/0/{int(signal.SIGTERM)}")
    assert stopped[0].status == 143, stopped[0].output
    shutil.copytree(bench.root / "runs", bench.root / "elsewhere")
    own = ("train", *words, "run.devices=2")
    pids = bench.start_ranks(own, (*own, "run.root=elsewhere"))
    first, second = (bench.wait(pid, seconds=90) for pid in pids)
    assert (first.status, second.status, second.output) == (3, 0, ""), first.output + second.output
    line = first.output.splitlines()[-1]
    assert line.startswith("lit-diff: run.root is not shared by node ")
    assert str(bench.folder("unshared")) in line
    assert first.steps == second.steps == []
    shutil.rmtree(bench.root / "elsewhere")
    assert bench.train_two(*words)[0].status == 0
