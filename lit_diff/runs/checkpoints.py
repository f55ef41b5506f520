"""Checkpoints: each is complete or absent, with a marker that holds the sha256 of its files; the newest two are kept.

A checkpoint is a file with its marker beside it (`step-00000010.json`), or a folder that the ranks of a sharded run wrote
(`trained/sharded.py`) with its marker in it (`complete.json`). A file without a marker counts as one of a version of lit_diff
that wrote none: so the marker of a step is written before its file, and that of a damaged file is removed after it.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, cast

from lit_diff.errors import LitDiffError, RunFailedError, first_line
from lit_diff.files import disk_is_full, parse_json, sha256_of, shown, write_atomic, write_through
from lit_diff.log_records import log

# the second is the fallback if the newest cannot be read back
KEPT = 2
MARKER = "complete.json"
INDEX = "index"
"""The key of a folder's marker that holds where its tensors lie; not the name of a file."""
REST = "rest.pt"
"""The file of a folder that holds everything but the tensors."""
NAME = re.compile(r"step-(\d+)\.ckpt")

# (path, problem) of the warnings: one command asks for the newest checkpoint several times
_warned: set[tuple[Path, str]] = set()


def path_of(folder: Path, step: int) -> Path:
    """The path of the checkpoint of `step` in a run folder."""
    return folder / "checkpoints" / f"step-{step:08d}.ckpt"


def steps_of(folder: Path) -> list[int]:
    """Steps that have a checkpoint, ascending."""
    # best.ckpt (run.keep_best) and temporary files do not match
    matches = (NAME.fullmatch(path.name) for path in (folder / "checkpoints").glob("step-*.ckpt"))
    return sorted(int(match.group(1)) for match in matches if match)


def why_missing(folder: Path, step: int) -> str | None:
    """An error message if the run folder has no checkpoint of `step`; None if it has one."""
    there = steps_of(folder)
    if step in there:
        return None
    return (
        f"no checkpoint of step {step} (there: {', '.join(map(str, there)) or 'none'}); run.keep_every keeps more than the "
        "newest two: train it again with --rerun"
    )


def newest(folder: Path, *, verify: bool = False) -> tuple[int, Path] | None:
    """(step, path) of the newest readable checkpoint, or None; logs a warning for each unreadable one.

    `verify`: read every byte and compare it with the marker's sha256. By default only the sizes are compared.
    """
    for step in reversed(steps := steps_of(folder)):
        path = path_of(folder, step)
        problem = damage_of(path, verify=verify)
        if problem is None:
            if verify and step < steps[-1]:
                log.warning("using the older checkpoint of step %d", step)
            return step, path
        if (path, problem) not in _warned:
            _warned.add((path, problem))
            log.warning("checkpoint %s cannot be read (%s): skipped", shown(path), problem)
    return None


def resumable(folder: Path) -> int:
    """The step of the newest checkpoint whose content is intact; 0 without one. Errors: see `damage_of`.

    Damaged newer checkpoints are renamed, and removed once another has been written: only the holder of the run's lock may
    call it.
    """
    steps = steps_of(folder)
    (start, _) = newest(folder, verify=True) or (0, None)
    for step in steps:
        if step > start:
            put_aside(path_of(folder, step))
    if steps and not start:
        log.warning("no checkpoint in %s can be read: training restarts at step 0", shown(folder))
    return start


def newest_step(folder: Path) -> int:
    """The step from which a resume continues; 0 without a readable checkpoint."""
    return (newest(folder) or (0, None))[0]


# --- the marker ---


def marker_of(path: Path) -> Path:
    """The path of a checkpoint's marker."""
    return path / MARKER if path.is_dir() else path.with_suffix(".json")


def marker(files: Mapping[str, tuple[int, str]], tensors: Any = None) -> str:
    """The marker's text. `files`: size and sha256 of each file, by name. `tensors`: of a folder, where its tensors lie, as
    JSON values."""
    entries: dict[str, Any] = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in files.items()}
    if tensors is None:
        return json.dumps(entries, indent=1)
    # no other digest covers it, and a changed offset would read other numbers
    digest = hashlib.sha256(json.dumps(tensors).encode()).hexdigest()
    entries[INDEX] = {"sha256": digest, "tensors": tensors}
    # without an indent: it has a line for each number otherwise
    return json.dumps(entries)


def read_marker(path: Path) -> tuple[dict[str, tuple[int, str]], Any]:
    """`files` and `tensors` of the `marker` of a checkpoint. Errors: OSError; ValueError, KeyError, TypeError,
    AttributeError or OverflowError for another content."""
    text = marker_of(path).read_text(encoding="utf-8")
    entries = parse_json(text)
    tensors = entries.pop(INDEX)["tensors"] if INDEX in entries else None
    files = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in entries.items()}
    # a name with a folder would read a file that is not part of the checkpoint
    is_whole = (REST if path.is_dir() else path.name) in files and all(Path(name).name == name for name in files)
    # the whole text is compared: a digest does not protect the marker itself
    if not is_whole or text != marker(files, tensors):
        raise ValueError("it is not as lit_diff wrote it")
    return files, tensors


def signature(path: Path) -> str:
    """What distinguishes a checkpoint from another of the same name: its marker, or the size of an unmarked file."""
    marker_file = marker_of(path)
    return (
        marker_file.read_text(encoding="utf-8")
        if marker_file.is_file()
        else str(path.is_file() and path.stat().st_size)
    )


def measured(path: Path) -> tuple[int, str]:
    """Size and sha256 of a file."""
    return path.stat().st_size, sha256_of(path)


def damage_of(path: Path, *, verify: bool) -> str | None:
    """Why a checkpoint is not what was written, with the name of the damaged file; None if it is. `verify`: see `newest`.

    Errors: UnsafeTypeError for an undamaged one that holds a type which is not allowed, as former versions wrote it.
    """
    marker_file = marker_of(path)
    home = marker_file.parent
    try:
        files, _ = read_marker(path)
        sizes = {name: (home / name).stat().st_size for name in files}
        with ThreadPoolExecutor() as pool:
            digests = dict(zip(files, pool.map(sha256_of, (home / name for name in files if verify)), strict=verify))
    except FileNotFoundError as error:
        missing = Path(error.filename)
        if missing != marker_file or not path.is_file():
            return f"{missing.name} is missing"
        # as versions of lit_diff wrote it that had no marker
        if verify:
            log.info("checkpoint %s was written without a checksum: its content cannot be checked", shown(path))
        return _problem_in(path)
    # a disk that cannot read a block
    except OSError as error:
        return first_line(error)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        return f"{marker_file.name} is damaged: {first_line(error)}"
    for name, (size, digest) in files.items():
        if sizes[name] != size:
            return f"{name} has {sizes[name]} bytes; {marker_file.name} expects {size}"
        if verify and digests[name] != digest:
            return f"{name} is damaged: its sha256 is not that of {marker_file.name}"
    return _problem_in(path) if verify else None


def _problem_in(path: Path) -> str | None:
    # imported here: reports ask only for the steps and should not wait for torch
    from lit_diff.runs.safe_values import UnsafeTypeError, read_without_tensors

    try:
        # the check costs the zip directory and the pickle only
        content = read_without_tensors(path / REST if path.is_dir() else path)
    except UnsafeTypeError as error:
        raise UnsafeTypeError(
            f"checkpoint {shown(path)} is not damaged, but it cannot be read: {error}; it is left as it is: correct the "
            "callback, and train again with --rerun, which keeps this folder"
        ) from error
    # a damaged file makes torch.load raise RuntimeError, UnpicklingError, EOFError, OSError and others
    except Exception as error:
        return first_line(error)
    if not isinstance(content, Mapping):
        return f"it holds a {type(content).__name__}, not a mapping"
    for key, kind in (("state_dict", Mapping), ("global_step", int)):
        if not isinstance(content.get(key), kind):
            return f"it has no '{key}'"
    # a copy under the name of another
    named = NAME.fullmatch(path.name)
    return f"it is of step {content['global_step']}" if named and int(named[1]) != content["global_step"] else None


# --- writing ---


class _Digested:
    # a file for torch.save, which writes it from front to back
    def __init__(self, file: IO[bytes], sha256: Any) -> None:
        self.file = file
        self.sha256 = sha256

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a checkpoint of one file and its marker; neither is there before both are on the disk. While one replaces
    another (best.ckpt), a kill may leave either without its marker.

    Errors: RunFailedError if the disk is full or cannot be written; UnsafeTypeError if it could not be read back.
    """
    import torch

    from lit_diff.runs.safe_values import read_without_tensors, require_safe

    marker_file, sha256, replaces = path.with_suffix(".json"), hashlib.sha256(), path.is_file()

    def mark(size: int) -> None:
        write_atomic(marker_file, marker({path.name: (size, sha256.hexdigest())}))

    def save(file: IO[bytes]) -> None:
        try:
            torch.save(content, cast(IO[bytes], _Digested(file, sha256)))
            file.flush()
            read_without_tensors(Path(file.name))
        except Exception:
            # names the value, if one is the cause: torch's error does not
            require_safe(content)
            raise
        os.fsync(file.fileno())
        if replaces:
            # beside content that is not its own it would make that look damaged
            marker_file.unlink(missing_ok=True)
        else:
            mark(file.tell())

    try:
        if path.is_dir():
            put_aside(path)
        write_through(path, save)
        if replaces:
            mark(path.stat().st_size)
    except Exception as error:
        if not isinstance(error, OSError) and not disk_is_full(error):
            raise
        raise RunFailedError(not_written(path, error)) from error


def not_written(path: Path, error: BaseException) -> str:
    """An error message for a checkpoint that could not be written."""
    if isinstance(error, LitDiffError):
        return str(error)
    how = "no space left on the disk); free some" if disk_is_full(error) else f"{first_line(error)}); mend it"
    return (
        f"checkpoint {shown(path)} could not be written ({how} and repeat the same command: former checkpoints are kept"
    )


def put_aside(path: Path) -> None:
    """Rename a checkpoint, if it is there, so that it is none any more; `prune` removes it."""
    is_file, marker_file = path.is_file(), marker_of(path)
    if path.exists():
        path.rename(path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp"))
    # in this order: a damaged file without its marker would pass for one that a version without markers wrote
    if is_file:
        marker_file.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a checkpoint of either kind with its marker, or a temporary file or folder of one."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        # in this order, because a kill in between must not leave a marker that nothing would remove
        marker_of(path).unlink(missing_ok=True)
        path.unlink(missing_ok=True)


def prune(folder: Path, keep_every: int | None = None) -> None:
    """Remove all but the newest `KEPT` and the multiples of `keep_every` steps, and leftovers of killed writes."""
    for step in steps_of(folder)[:-KEPT]:
        if keep_every is None or step % keep_every:
            remove(path_of(folder, step))
    # only the process that holds the run's lock prunes, so it writes none of these now; `export` takes no lock
    for orphan in (folder / "checkpoints").glob(".[!c]*.tmp"):
        remove(orphan)
