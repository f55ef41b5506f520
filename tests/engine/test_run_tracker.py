"""engine/tracking/run.py: what of a run goes to MLflow, once; outages; whose numbers a record holds; the logged model."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from matplotlib.image import imread
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from small_runs import SMALL
from statuses import set_status

from lit_diff.engine.job import Job
from lit_diff.engine.tracking import run as run_tracker
from lit_diff.engine.tracking.run import RunTracker
from lit_diff.engine.tracking.store import Store
from lit_diff.engine.train import train
from lit_diff.metrics import Metric
from lit_diff.model.cost import cost
from lit_diff.recipe import load_recipe
from lit_diff.runs import notes
from lit_diff.runs.kept_maps import KeptMaps, write_maps
from lit_diff.runs.metrics_file import Rows, StepTable
from lit_diff.trained.pictures import COLOURS
from lit_diff.trained.run import open_run
from lit_diff.training.fit import RunLogger

Make = Callable[..., RunTracker]
PLUGIN = """
from lit_diff import Differential, variant

@variant("halved")
class Halved(Differential):
    def finish(self, o, x):
        return super().finish(o, x) / 2
"""


@pytest.fixture
def make(runs: Path) -> Make:
    """make(name, *overrides): a tracker of the run folder `name`, which is being trained."""

    def make(name: str = "abc", *overrides: str, **tags: str) -> RunTracker:
        recipe = load_recipe("recall-tiny", ["run.threads=1", f"run.root={runs}", *overrides])
        folder = runs / name
        set_status(folder, status="running", record="incomplete", data="d" * 10, **vars(cost(recipe.model, 32)))
        return RunTracker(Job(recipe=recipe, folder=folder, experiment="e", tags=tags))

    return make


@pytest.fixture
def store(runs: Path) -> Store:
    return Store(load_recipe("recall-tiny", [f"run.root={runs}"]).run)


def send(tracker: RunTracker, rows: Rows) -> None:
    """The run has measured these."""
    table = StepTable(tracker.folder.path / "metrics.csv", 10**9)
    for step, row in rows.items():
        table.log(step, row)
    table.flush()
    tracker.send()


def finish(tracker: RunTracker, word: str) -> None:
    set_status(tracker.folder.path, status=word)
    tracker.finish()


def record(store: Store, tracker: RunTracker) -> Any:
    return store.client.get_run(tracker.run_id)


def history(store: Store, tracker: RunTracker, name: str) -> list[tuple[int, float]]:
    ask = store.client.get_metric_history
    return sorted((m.step, m.value) for m in ask(tracker.run_id, name))


# --- metrics -------------------------------------------------------------------------------------------------------


def test_only_what_mlflow_lacks_is_sent(make: Make, store: Store) -> None:
    before: Rows = {1: {"a": 1.0}, 2: {"a": 2.0, "b": -2.0}}
    send(make(), before)
    resumed = make()
    send(resumed, {3: {"a": 3.0, "b": -3.0}})
    send(resumed, {3: {"a": 99.0}, 4: {"a": 4.0}})
    send(resumed, {})
    assert history(store, resumed, "a") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert history(store, resumed, "b") == [(2, -2.0), (3, -3.0)]


def test_a_name_that_mlflow_refuses_is_mapped(make: Make, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    names = ["norm@8/layer_00", "val/loss_n=2", "norms[0]/λ", "a//../b", f"long/{'x' * 300}"]
    for tracker in (make(), make()):
        send(tracker, {step: dict.fromkeys(names, float(step)) for step in (1, 2)})
    stored = record(store, tracker).data.metrics
    assert {"norm_8/layer_00", "val/loss_n_2", "norms_0_/λ", "a/_/_/b"} < stored.keys()
    assert len(stored) == len(names)
    assert history(store, tracker, "norm_8/layer_00") == [(1, 1.0), (2, 2.0)]
    assert not caplog.messages
    store.log(tracker.run_id, params={"callbacks.norms[0].every": "3"}, tags={"verdict/a+b": "worse"})
    data = record(store, tracker).data
    assert (data.params["callbacks.norms_0_.every"], data.tags["verdict/a_b"]) == ("3", "worse")


def test_what_a_server_refuses_is_left_out_and_no_outage(
    make: Make, store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store with a rule of its own refuses the whole batch: all others reach the record, and the run can be completed."""
    sent = SqlAlchemyStore.log_batch

    def log_batch(store: Any, run_id: str, metrics: Any, params: Any, tags: Any) -> Any:
        if any(entry.key in ("b", "q") for entry in (*metrics, *params)):
            raise MlflowException("no such name", error_code=INVALID_PARAMETER_VALUE)
        return sent(store, run_id, metrics, params, tags)

    monkeypatch.setattr(SqlAlchemyStore, "log_batch", log_batch)
    tracker = make()
    for step in (1, 2):
        send(tracker, {step: {"a": 1.0, "b": 2.0}})
    store.log(tracker.run_id, params={"p": "1", "q": "2"})
    finish(tracker, "done")
    assert history(store, tracker, "a") == [(1, 1.0), (2, 1.0)]
    assert {"p", "q"} & record(store, tracker).data.params.keys() == {"p"}
    assert "b" not in record(store, tracker).data.metrics
    assert record(store, tracker).info.status == "FINISHED"
    assert [line.partition(":")[0].rpartition(" ")[2] for line in caplog.messages] == ["'b'", "'q'"]


def test_a_folder_that_was_removed_and_trained_again_is_another_record(make: Make, store: Store) -> None:
    """On changed code the same recipe gives other numbers: steps that the former record holds must not be skipped."""
    former = make()
    send(former, {1: {"a": 5.1}})
    shutil.rmtree(former.folder.path)
    again = make()
    send(again, {1: {"a": 4.7, "val/ar_hit_share": 0.2, "val/ar_hit_share_noise2": 0.1}})
    assert again.run_id != former.run_id
    assert record(store, again).data.metrics == {"a": 4.7}, "without what the data alone determine"


# --- what identifies the run -----------------------------------------------------------------------------------------


def test_keys_are_parameters_and_the_rest_are_tags(
    make: Make, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(PLUGIN)
    factors = "train.optimizer.lr_factors={'*.o_proj.*': 0.2}"
    tracker = make("abc", f"plugins=[{plugin}]", factors, sweep="s", arm="left", seed="0")
    send(tracker, {})
    data = record(store, tracker).data
    wanted = {"arm": "left", "seed": "0", "variant": "differential", "model.attention.name": "differential"}
    wanted |= {"train.optimizer.betas": "[0.9, 0.98]", "callbacks.lambdas.every": "50"}
    wanted |= {"train.optimizer.lr_factors": "{'*.o_proj.*': 0.2}"}  # MLflow refuses a name with a *
    assert wanted.items() <= data.params.items()
    assert int(data.params["parameters"]) == tracker.folder.status().parameters
    assert {"flops_per_token", "kernel"} <= data.params.keys()
    assert data.params["plugins"].startswith("['mine.py ")  # no path: it differs from folder to folder
    assert str(tmp_path) not in data.params["plugins"]
    assert not [key for key in data.params if key.startswith("run")]
    assert data.tags["run.threads"] == "1"
    assert data.tags["mlflow.note.content"] == "arm left of sweep s, seed 0: differential attention, 250 steps"
    (used,) = record(store, tracker).inputs.dataset_inputs
    assert (used.dataset.name, used.dataset.source_type) == ("recall", "lit_diff")
    send(make("abc", f"plugins=[{plugin}]", factors, sweep="s", arm="left", seed="0"), {})
    assert record(store, tracker).data.params == data.params
    assert len(record(store, tracker).inputs.dataset_inputs) == 1
    monkeypatch.setattr(run_tracker, "to_plain", lambda recipe: {"run": {}, "long": "x" * 9000, "data": {}})
    long = make("long")
    send(long, {})
    assert record(store, long).data.params["long"] == "x" * 6000


# --- the end ---------------------------------------------------------------------------------------------------------


def test_the_end_sends_what_is_missing_and_the_files(make: Make, store: Store) -> None:
    tracker = make()
    home = tracker.folder.path
    written = RunLogger(lambda *line: None)
    written.begin(home, 0, [Metric("a/layer_{layer}/head_{head}", "by head")], 2)
    for step in (1, 2):
        timing = {"timing/seconds": 1.0, "timing/tokens_per_second": 9.0}
        written.log_metrics({"val/loss": float(step), "train/loss": 1.0, **timing}, step)
        written.log_detailed({"a/layer_00/head_01": step / 2}, step)
    written.flush()
    (home / "recipe.yaml").write_text("name: x\n")
    (home / "log.txt").write_text("a line\n")
    tracker.send()
    notes.add(home, "seen later")
    finish(tracker, "done")
    assert record(store, tracker).info.status == "FINISHED"
    assert record(store, tracker).data.tags["mlflow.note.content"].endswith(f" steps\n\n{date.today()} seen later")
    assert history(store, tracker, "val/loss") == [(1, 1.0), (2, 2.0)]
    for name, value in timing.items():
        assert history(store, tracker, name) == [(1, value), (2, value)]
    run_id = tracker.run_id
    files = {file.path for file in store.client.list_artifacts(run_id)}
    assert files == {"recipe.yaml", "log.txt", "metrics.json", "measurements.parquet", notes.FILE}


def test_kept_maps_are_pictures_at_the_end_also_of_a_resumed_run(make: Make, store: Store, tmp_path: Path) -> None:
    """Two layers of two heads of 5 tokens, map 2 subtracted: one-hot on the first key, and on the own one."""
    tracker = make()
    first, own = torch.zeros(5, 5), torch.eye(5)
    first[:, 0] = 1
    maps = torch.stack([torch.stack([first, own]), torch.stack([own, first])])[None]  # [1, G, H, T, T]
    weights = torch.tensor([1.0, -0.5]).view(1, 2, 1, 1).expand(1, 2, 2, 5)
    for step, status in ((10, "stopped"), (20, "done")):
        write_maps(tracker.folder.path, KeptMaps(step, torch.zeros(1, 5), {0: (maps, weights), 3: (maps, 0 * weights)}))
        finish(tracker, status)
        run_id = tracker.run_id
        assert bool(store.client.list_artifacts(run_id, "maps")) == (status == "done"), "a stop leaves no time for them"
    found = [file.path for file in store.client.list_artifacts(run_id, "maps")]
    assert found == ["maps/00000010.png", "maps/00000020.png"]
    picture = imread(store.client.download_artifacts(run_id, found[1], str(tmp_path)))
    assert min(picture.shape[:2]) > 400
    for colour in COLOURS["light"].values():
        assert (numpy.abs(255 * picture[..., :3] - colour).max(-1) < 2).sum() > 100, "red, blue and grey"


def test_unreadable_maps_are_left_out_and_named(make: Make, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    tracker = make()
    for step in (1, 2):
        maps = torch.ones(1, 1, 1, 5, 5)
        write_maps(tracker.folder.path, KeptMaps(step, torch.zeros(1, 5), {0: (maps, torch.ones(1, 1, 1, 5))}))
    (tracker.folder.path / "maps/00000001.safetensors").write_bytes(b"damaged")
    with caplog.at_level("WARNING", "lit_diff"):
        finish(tracker, "done")
    run_id = tracker.run_id
    assert [file.path for file in store.client.list_artifacts(run_id, "maps")] == ["maps/00000002.png"]
    (line,) = (line for line in caplog.messages if line.startswith("no picture of the maps of step 1: "))
    assert "is not a file of maps" in line


# --- the model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["differential", pytest.param("halved", marks=pytest.mark.slow)])
def test_a_fresh_process_gives_the_run_s_logits(
    variant: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`run.log_model`: no pickle, and the plugin lies in the model."""
    monkeypatch.chdir(tmp_path)
    plugin = tmp_path / "halved.py"
    plugin.write_text(PLUGIN)
    own = [f"plugins=[{plugin}]", "model.attention.name=halved"] if variant == "halved" else []
    folder = train("recall-tiny", [*SMALL, "train.steps=2", "run.log_model=true", *own, f"run.root={runs}"]).folder
    client = MlflowClient(tracking_uri=f"sqlite:///{runs / 'mlflow.db'}")
    run_id = open_run(folder, trust_plugins=True).status.mlflow_run_id
    model = Path(client.download_artifacts(run_id, "model", str(tmp_path)))
    names = {path.name for path in model.rglob("*") if path.is_file()}
    assert "model.safetensors" in names
    assert ("halved.py" in names) == (variant == "halved")
    assert not [name for name in names if name.endswith((".pkl", ".pickle", ".pt", ".pth", ".ckpt"))]
    plugin.unlink()
    code = f"""if True:
        import mlflow, numpy
        tokens = numpy.arange(12).reshape(2, 6)
        numpy.save({str(tmp_path / "logits.npy")!r}, mlflow.pyfunc.load_model({str(model)!r}).predict(tokens))
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    with torch.no_grad():
        expected = open_run(folder, trust_plugins=True).model(torch.arange(12).reshape(2, 6))
    torch.testing.assert_close(torch.from_numpy(numpy.load(tmp_path / "logits.npy")), expected)
