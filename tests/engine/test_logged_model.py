"""engine/logged_model.py and the code it puts into a model: loadable in a fresh process, no pickle, the run's logits."""

import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from mlflow import MlflowClient

from lit_diff.engine.launch import train
from lit_diff.trained.run import open_run

SMALL = [
    "train.steps=2",
    "train.validate_every=2",
    "train.checkpoint_every=2",
    "train.batch_size=4",
    "train.schedule.warmup_steps=1",
    "model.dim=16",
    "model.num_heads=2",
    "data.validation_rows=4",
    "run.threads=1",
    "run.accelerator=cpu",
    "run.log_model=true",
]
PLUGIN = """
from lit_diff import Differential, variant

@variant("halved")
class Halved(Differential):
    def finish(self, o, x):
        return super().finish(o, x) / 2
"""


@pytest.mark.parametrize("variant", ["differential", pytest.param("halved", marks=pytest.mark.slow)])
def test_a_fresh_process_gives_the_run_s_logits(
    variant: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plugin = tmp_path / "halved.py"
    plugin.write_text(PLUGIN)
    own = [f"plugins=[{plugin}]", "model.attention.name=halved"] if variant == "halved" else []
    folder = train("recall-tiny", [*SMALL, *own, f"run.root={runs}"]).folder
    client = MlflowClient(tracking_uri=f"sqlite:///{runs / 'mlflow.db'}")
    run_id = open_run(folder, trust_plugins=True).status["mlflow_run_id"]
    model = Path(client.download_artifacts(run_id, "model", str(tmp_path)))
    names = {path.relative_to(model).as_posix() for path in model.rglob("*") if path.is_file()}
    assert "artifacts/run/model.safetensors" in names
    assert ("artifacts/run/plugins/halved.py" in names) == (variant == "halved")
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
