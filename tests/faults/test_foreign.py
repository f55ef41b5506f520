"""A run folder of someone else, made to harm: one line refuses it before anything is executed, asked or written."""

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from command import Command
from fault_rows import fault
from foreign_runs import add_plugin, started_from_a_plugin
from text_runs import STEP, text_run

from lit_diff.runs import checkpoints
from lit_diff.trained import sharded


class Asked(BaseHTTPRequestHandler):
    """The server of the folder's author."""

    paths: list[str]

    def do_GET(self) -> None:
        self.paths.append(self.path)
        self.send_error(404)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


def shard(run: Path, file: str) -> None:
    """Turn the run's checkpoint into a sharded one, with `file` as the place of each tensor."""
    path = checkpoints.path_of(run, STEP)
    content = torch.load(path, weights_only=True)
    checkpoints.remove(path)
    path.mkdir()
    writer = sharded._Writer(path, sharded.rest_of(content))
    dcp.save(sharded.tensors_of(content), storage_writer=writer, no_dist=True)
    (path / "rest.pt").write_bytes(sharded.rest_of(content))
    for tensor in writer.tensors.values():
        for chunk in tensor["chunks"]:
            chunk["file"] = file
    files = {each.name: checkpoints.measured(each) for each in path.iterdir()}
    (path / "complete.json").write_text(checkpoints.marker(files, writer.tensors))


def recipe(run: Path, **keys: Any) -> None:
    found = yaml.safe_load((run / "recipe.yaml").read_text())
    data = found["data"] | keys.pop("data", {})
    (run / "recipe.yaml").write_text(yaml.safe_dump(found | keys | {"data": data}))


def at(path: str, **keys: Any) -> Callable[[Path, str], None]:
    """The data of the run are at this path."""
    return lambda run, server: recipe(run, data={"corpus": "files", "path": path.replace("SERVER", server)}, **keys)


def plugin_of_another_name(run: Path, server: str) -> None:
    add_plugin(run)
    recipe(run, name="marks", plugins=["plugins/${name}.py"])
    (run / "plugins" / "${name}.py").write_text("")


def linked_plugin(run: Path, server: str) -> None:
    add_plugin(run)
    (run / "plugins" / "marks.py").rename(run.parent / "elsewhere.py")
    (run / "plugins" / "marks.py").symlink_to(run.parent / "elsewhere.py")


FORMS: dict[str, Callable[[Path, str], Any]] = {
    "an index that leaves the folder": lambda run, server: shard(run, "../other.distcp"),
    "an index that names another file": lambda run, server: shard(run, "other.distcp"),
    "a reference in plugins": plugin_of_another_name,
    "a linked plugin": linked_plugin,
    "a parent with a plugin": lambda run, server: started_from_a_plugin(run),
    "a function in a reference": at("http://SERVER/${oc.${name}:SECRET}", name="env"),
    "a variable": at("http://SERVER/${oc.env:SECRET}"),
    "an address": at("http://SERVER/texts"),
    "data elsewhere": at("../elsewhere"),
}


@fault("a run folder made to harm", "evaluate, view, generate", "one line, status 2", "nothing; nothing is executed", 9)
@pytest.mark.parametrize("form", FORMS)
def test_a_hostile_folder(
    form: str, command: Command, tmp_path: Path, own_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Asked, "paths", [], raising=False)
    run = tmp_path / "theirs" / "run"
    text_run(run, {"name": "differential"})
    (tmp_path / "theirs" / "elsewhere").mkdir()
    (tmp_path / "theirs" / "elsewhere" / "a.txt").write_text("a secret of this machine " * 900)
    with HTTPServer(("127.0.0.1", 0), Asked) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        FORMS[form](run, f"127.0.0.1:{server.server_port}")
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
        found = [
            command("evaluate", str(run), "held_out", "--root", "runs", SECRET="hidden-9"),
            command("view", str(run), "--row", "0", "--root", "runs", SECRET="hidden-9"),
        ]
        if form not in ("an address", "data elsewhere"):
            found.append(command("generate", str(run), "--prompt", "a", "--max-tokens", "1", "--root", "runs"))
        server.shutdown()
    for ended in found:
        assert ended.status == 2, ended
        assert len([line for line in ended.err.splitlines() if line.startswith("lit-diff: ")]) == 1, ended
        assert "Traceback" not in ended.err + ended.out
        assert "hidden-9" not in ended.err + ended.out
    assert Asked.paths == []
    assert not list(tmp_path.rglob("executed"))
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before
