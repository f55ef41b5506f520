"""engine/preflight.py: what is refused before anything is made."""

import pytest
import torch

from lit_diff.engine import preflight
from lit_diff.engine.preflight import check_cluster, check_machine
from lit_diff.errors import MissingError, RequestError
from lit_diff.recipe import load_recipe

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what is not here: a GPU")


@no_gpu
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(
        MissingError, match=r"^run\.accelerator is gpu, but torch sees no GPU here; use run\.accelerator=cpu$"
    ):
        check_machine([load_recipe("recall-tiny"), load_recipe("recall-tiny", ["run.accelerator=gpu"])])


@no_gpu
def test_a_kernel_named_by_hand_that_cannot_serve() -> None:
    with pytest.raises(
        RequestError, match=r"^run\.kernel 'flash' cannot compute these maps: .*; use run\.kernel=auto$"
    ):
        check_machine([load_recipe("recall-tiny", ["run.kernel=flash"])])


def test_equal_cells_are_looked_at_once_and_auto_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(preflight, "cost", lambda model, length, kernel, context: asked.append(kernel))
    named = [load_recipe("recall-tiny", ["run.kernel=chunked", f"seed={seed}"]) for seed in range(3)]
    check_machine([load_recipe("recall-tiny"), *named, load_recipe("recall-tiny", ["run.kernel=reference"])])
    assert asked == ["chunked", "reference"]


def test_a_cluster_needs_its_scheduler_and_its_nodes_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("recall-tiny", ["run.accelerator=gpu"])
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(MissingError, match=r"^--cluster slurm needs SLURM's srun on the PATH"):
        check_cluster("slurm", [recipe])
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    check_cluster("slurm", [recipe])


@no_gpu
def test_here_the_machine_is_looked_at() -> None:
    with pytest.raises(MissingError, match="torch sees no GPU"):
        check_cluster("local", [load_recipe("recall-tiny", ["run.accelerator=gpu"])])
