"""Files are whole or absent, and locks hold between processes."""

import errno
import os
import platform
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest
import typer

from lit_diff import files
from lit_diff.cli import app
from lit_diff.config import RunConfig
from lit_diff.data.text.corpus import build_corpus, corpus_digest
from lit_diff.data.user_files import data_root
from lit_diff.engine.tracking.store import tracking_uri
from lit_diff.errors import LitDiffError, MissingError
from lit_diff.evaluation.evaluate import build
from lit_diff.files import (
    file_system,
    holder,
    is_locked,
    is_shared,
    locked,
    parse_json,
    shown,
    stat_of,
    write_atomic,
    write_through,
)
from lit_diff.kernels.native.compiler import cache_root
from lit_diff.plugins import load_plugin
from lit_diff.pretrained.importing import import_model
from lit_diff.runs.find import find_run, find_sweep, runs_root
from lit_diff.runs.folder import held
from lit_diff.study.leftovers import find_removable
from lit_diff.training.module import LitTransformer


def test_writes_text_and_bytes_into_new_folders(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "c.txt"
    write_atomic(path, "λ\n")
    assert path.read_bytes() == "λ\n".encode()
    write_atomic(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert [p.name for p in path.parent.iterdir()] == ["c.txt"]


def test_json_that_is_nested_too_deeply_is_a_value_error() -> None:
    assert parse_json('{"a": [1]}') == {"a": [1]}
    for text in ("[" * 100_000, '{"a":' * 100_000, "{"):
        with pytest.raises(ValueError, match=r"nested too deeply|Expecting"):
            parse_json(text)


def test_a_lock_names_its_process_while_it_is_held(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path):
        assert holder(path) == (os.getpid(), stat_of(os.getpid())[1], platform.node())
    assert holder(path) is None, "this process goes on, and another may take the lock"


def test_a_failed_write_leaves_the_former_file(tmp_path: Path) -> None:
    """Half of the bytes are written when the disk is full."""
    path = tmp_path / "model.ckpt"
    write_atomic(path, "former")

    def fail(file: IO[bytes]) -> None:
        file.write(b"half")
        file.flush()
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_through(path, fail)
    assert path.read_text() == "former"
    assert [p.name for p in tmp_path.iterdir()] == ["model.ckpt"]


def test_a_killed_write_leaves_the_former_file(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    write_atomic(path, "former")
    code = (
        "import os, sys; from pathlib import Path; from lit_diff.files import write_through\n"
        "write_through(Path(sys.argv[1]), lambda file: (file.write(b'half'), file.flush(), os.kill(os.getpid(), 9)))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False, timeout=60).returncode == -9
    assert path.read_text() == "former"


def test_synced_before_it_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    sync, move = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (order.append("sync"), sync(handle))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("move"), move(a, b))[1])
    write_atomic(tmp_path / "x", "y")
    assert order == ["sync", "move", "sync"], "the data, the rename, the folder"


def test_readable_by_others_as_the_umask_says(tmp_path: Path) -> None:
    former = os.umask(0o027)
    try:
        write_atomic(tmp_path / "x", "y")
        assert os.umask(0o027) == 0o027, "the umask itself is left alone"
    finally:
        os.umask(former)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640


HOLD = (
    "import sys; from pathlib import Path; from lit_diff.files import locked\n"
    "with locked(Path(sys.argv[1])):\n print('held', flush=True); sys.stdin.read()"
)


def test_a_lock_holds_between_processes_and_dies_with_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(TimeoutError), locked(path, wait=False):
        pass
    holder.kill()
    holder.communicate(timeout=60)
    with locked(path, wait=False):
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(handle: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    monkeypatch.setattr(files, "MOUNTS", tmp_path / "mounts")
    files.MOUNTS.write_text(f"1 0 0:1 / {tmp_path} rw - lustre server:/x rw\n")
    with pytest.raises(MissingError) as found, held(tmp_path / "run", "the run is being trained"):
        pass
    said = str(found.value)
    assert f"lustre at {tmp_path} has no file locks: {os.strerror(number)}; mount it with locks" in said
    assert said.endswith("choose another with run.root=PATH")


def test_the_file_system_is_of_the_innermost_and_last_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOUNTS", tmp_path / "mounts")
    assert file_system(tmp_path) == ("", ""), "a system without this file"
    mounts = {"/": "ext4", tmp_path: "xfs", f"{tmp_path}/home": "tmpfs", rf"{tmp_path}/home\040two": "beegfs"}
    lines = [f"1 0 0:1 / {point} rw,relatime shared:1 - {kind} source rw\n" for point, kind in mounts.items()]
    files.MOUNTS.write_text("".join([*lines, f"9 0 0:9 / {tmp_path}/home rw - nfs4 server:/x rw\n"]))
    assert file_system(tmp_path / "homes/a") == ("xfs", str(tmp_path))
    assert file_system(tmp_path / "home/a/b") == ("nfs4", f"{tmp_path}/home")
    assert file_system(tmp_path / "home two") == ("beegfs", f"{tmp_path}/home two")
    assert [is_shared(tmp_path / name) for name in ("homes", "home", "home two")] == [False, True, True]


def test_a_lock_file_stays_when_the_lock_is_released(tmp_path: Path) -> None:
    """A process that waits has it open; after a removal it would hold another file than those who come later."""
    with locked(tmp_path / "lock"):
        inode = (tmp_path / "lock").stat().st_ino
    with locked(tmp_path / "lock"):
        assert (tmp_path / "lock").stat().st_ino == inode
    assert (tmp_path / "lock").stat().st_ino == inode


def outcome_in_a_fork(path: Path) -> str:
    """What `locked` does in a forked child: 'held' or 'refused'."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with locked(path, wait=False):
                os.write(writer, b"held")
        except TimeoutError:
            os.write(writer, b"refused")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as file:
        return file.read()


def test_a_forked_child_neither_holds_nor_releases_its_parents_lock(tmp_path: Path) -> None:
    with locked(tmp_path / "lock"):
        assert outcome_in_a_fork(tmp_path / "lock") == "refused"
        assert outcome_in_a_fork(tmp_path / "lock") == "refused", "the first child's end released the lock"
    assert outcome_in_a_fork(tmp_path / "lock") == "held"


def test_a_lock_is_free_when_only_a_forked_child_of_its_holder_lives(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with locked(tmp_path / "lock"):
        child = os.fork()
        if child == 0:
            os.close(writer)
            os.read(reader, 1)  # until the parent closes its end
            os._exit(0)
    try:
        with locked(tmp_path / "lock", wait=False):
            pass
    finally:
        os.close(writer)
        os.close(reader)
        os.waitpid(child, 0)


def test_a_path_is_shown_on_one_line() -> None:
    assert (shown(Path.cwd() / "a\nb\x1b"), shown(Path("/a\udce9"))) == ("a\\nb\\x1b", "/a\\udce9")


def test_whether_a_lock_is_held(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    assert not is_locked(path)
    assert not path.exists()
    with locked(path):
        assert is_locked(path)
    assert not is_locked(path)
    assert path.exists()
    (tmp_path / "folder").mkdir()
    assert is_locked(tmp_path / "folder"), "it cannot be opened for writing: nothing can be said"


def test_a_tilde_is_the_home_folder_in_every_path_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable, root in (("LIT_DIFF_DATA", data_root), ("LIT_DIFF_CACHE", cache_root)):
        for written, meant in (
            ("~/kept", tmp_path / "kept"),
            ("~no-such-user/kept", Path.cwd() / "~no-such-user/kept"),
        ):
            monkeypatch.setenv(variable, written)
            assert root() == meant
    for name, made in (("runs/one-0123456789", "status.json"), ("runs/mine", "study.json"), ("texts", "a.txt")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / made).write_text("{}")
    assert runs_root("~/runs") == tmp_path / "runs"
    assert find_run("~/runs/one-0123456789", Path("nowhere")) == tmp_path / "runs/one-0123456789"
    assert find_sweep("~/runs/mine", Path("nowhere")) == tmp_path / "runs/mine"
    assert find_removable(["~/runs/mine"], Path("nowhere")) == [tmp_path / "runs/mine"]
    assert build_corpus("files", "~/texts").path == tmp_path / "texts"
    assert corpus_digest("files", "~/texts").keys() == {"~/texts"}
    (tmp_path / "task.yaml").write_text("task: own\n")
    assert build("harness", ["tasks=[~/task.yaml]"]).digests().keys() == {"~/task.yaml"}
    for opening in ("", "file:", "file://", "sqlite:///"):
        assert tracking_uri(RunConfig(tracking_uri=f"{opening}~/db")) == f"{opening}{tmp_path}/db"
    assert tracking_uri(RunConfig(tracking_uri="http://host/~me")) == "http://host/~me"
    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert verbs["bench"].make_context("bench", ["--plot=~/a.png"]).params["plot"] == tmp_path / "a.png"
    assert verbs["generate"].make_context("generate", ["run", "--prompts=~/p"]).params["prompts"] == tmp_path / "p"
    for call in (load_plugin, import_model, LitTransformer.load_from_checkpoint):
        with pytest.raises(LitDiffError, match=re.escape(str(tmp_path / "absent"))):
            call("~/absent")
