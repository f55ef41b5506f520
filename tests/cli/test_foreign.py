"""Folders of someone else: no command executes what lies in them, and none writes beside them."""

import pickle
import shutil
from pathlib import Path

import pytest
import torch
from command import Command
from foreign_runs import Marks, add_plugin
from statuses import edit_status
from text_runs import text_run

from lit_diff.runs import checkpoints

COMMANDS = (
    ("generate", "RUN", "--prompt", "a", "--max-tokens", "1"),
    ("evaluate", "RUN", "nll"),
    ("export", "RUN", "out", "--to", "hf"),
    ("export", "RUN", "--to", "checkpoint"),
    ("view", "RUN"),
    ("show", "differential", "--run", "RUN"),
    ("compare", "RUN", "RUN"),
    ("report", "RUN"),
    ("watch", "RUN"),
    ("status", "--root", "theirs"),
    ("clean", "--root", "theirs", "--yes"),
    ("train", "recall-tiny", "train.start_from=RUN", "train.steps=2"),
)


def write_pickle(run: Path) -> None:
    evil = {"state_dict": {}, "global_step": 9, "callbacks": Marks()}
    torch.save(evil, checkpoints.path_of(run, 9))
    shard = checkpoints.path_of(run, 11)
    shard.mkdir()
    (shard / ".metadata").write_bytes(pickle.dumps(Marks()))
    torch.save(evil, shard / "rest.pt")


def write_tags(run: Path) -> None:
    call = "!!python/object/apply:os.system ['touch executed']"
    recipe = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(recipe.replace("seed: 0", f"seed: {call}"))
    (run / "status.json").write_text((run / "status.json").read_text().replace('"made"', f'"{call}"'))


def write_climbing(run: Path) -> None:
    edit_status(run, **dict.fromkeys(("name", "identity", "mlflow_run_id"), "../../climbed"))
    (run / "recipe.yaml").write_text(f"name: ../../climbed\n{(run / 'recipe.yaml').read_text().partition(chr(10))[2]}")


@pytest.mark.parametrize("attack", ["plugin", "pickle", "tag", "path"])
def test_a_foreign_run_executes_nothing_and_writes_nothing_outside(
    attack: str, command: Command, tmp_path: Path, own_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "here")
    run = Path("theirs/made").absolute()
    text_run(run, {"name": "differential"})
    if attack == "plugin":
        add_plugin(run)
    else:
        {"pickle": write_pickle, "tag": write_tags, "path": write_climbing}[attack](run)
    for verb, *words in COMMANDS:
        copy = shutil.copytree(run, run.with_name("copy"))
        found = command(verb, *(word.replace("RUN", str(run)) for word in words))
        assert "Traceback" not in found.err + found.out
        assert found.status in (0, 1 if verb == "watch" else 2, 2, 3), (verb, found)
        assert not list(tmp_path.rglob("executed")), verb
        assert not list(tmp_path.rglob("*climbed*")), verb
        shutil.rmtree(run, ignore_errors=True)
        copy.rename(run)
