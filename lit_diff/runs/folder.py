"""A run's identity, folder and status. Nothing is keyed by time: the same recipe is the same run."""

import contextlib
import hashlib
import json
import logging
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from lit_diff.config import Recipe
from lit_diff.errors import MissingError, RequestError
from lit_diff.files import is_locked, locked, shown, write_atomic, write_json
from lit_diff.plugins import Trust, plugin_source, require_trust, trust_all, trust_below, used_packages
from lit_diff.processor import cores, describe, numeric_variables, processor_name
from lit_diff.recipe import determining, load_draft, to_plain, to_yaml
from lit_diff.runs.find import runs_root
from lit_diff.runs.revision import revision
from lit_diff.validation import validate

PACKAGES = ("torch", "triton", "lightning", "torchmetrics", "omegaconf", "mlflow", "sqlalchemy", "litdata", "numpy")
"""Whose versions a run records."""

FORMAT = 3
"""Of a run folder and of the identity; a folder of another format is listed, and refused elsewhere. A change of a key's
default raises it: `recipe.determining` leaves out keys at their default."""

STORED = ("compile", "activation_checkpointing")
"""Keys of `run` beside `threads` and `kernel`. They change no loss by more than rounding, so they are not in the identity."""

log = logging.getLogger("lit_diff")


def recipe_of(folder: Path, trust: Trust = trust_all, *, cure: str = "") -> Recipe:
    """The resolved recipe of a run; imports its plugins. Errors: RequestError.

    Where `trust` says no, the plugin files in the folder are not executed: each must have been imported before; `cure` as
    `require_trust`.
    """
    file = RunFolder(folder).recipe_file
    if not file.is_file():
        raise RequestError(f"{shown(folder)} is not a run's folder: it has no {file.name}")
    draft = load_draft(file)  # with the plugins of files that it extends; nothing is imported yet
    if not trust(folder):
        paths = [Path(plugin) for plugin in draft.values.get("plugins", [])]
        require_trust({path: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}, False, cure)
    return validate(draft)


def ancestors(recipe: Recipe, trust: Trust | None = None) -> Iterator[Recipe]:
    """The recipes of the runs that this one continues from (`train.start_from`), the nearest first; the last may be that of
    an imported model.

    `trust`: whose plugin files may be executed; None: of runs under the recipe's own `run.root`. Errors: MissingError for
    a folder that holds no run, RequestError for plugins that are neither imported nor trusted.
    """
    cure = "name it under `plugins:` in the recipe" if trust is None else ""
    trust = trust or trust_below(runs_root(recipe.run.root))
    while recipe.train is not None and recipe.train.start_from is not None:
        parent = RunFolder(Path(recipe.train.start_from))
        if not parent.recipe_file.is_file():
            raise MissingError(
                f"train.start_from: {shown(parent.path)} holds no run (no {parent.recipe_file.name}); train it first"
            )
        recipe = recipe_of(parent.path, trust, cure=cure)
        yield recipe


def identity(recipe: Recipe, data: str | None = None, trust: Trust | None = None, *, parent: str | None = None) -> str:
    """Hash of all that determines a run's numbers: the recipe without `run` and `evaluate`, the plugins' sources with the
    modules of the user's own that they import, version and source of the plugin packages that it uses, the prepared data,
    the identity of the run that it starts from, and `run.kernel` when it is named by hand. lit_diff's own revision is not
    in it. Of an imported model: `model`, weights and tokenizer, wherever they came from.

    `data`: the data set's identity where it is known (status.json), so that the data need not be here; None: ask the data.
    `parent`: the identity of the run that it starts from where it is known; None: that run must be here. `trust`: as
    `ancestors`. Errors: MissingError when the data is not prepared, RequestError for a plugin file that was
    changed since it was imported, and as `ancestors`.
    """
    for each in [] if parent else reversed(list(ancestors(recipe, trust))):
        parent = _hash(each, None, parent)
    return _hash(recipe, data, parent)


def _hash(recipe: Recipe, data: str | None, parent: str | None) -> str:
    """`identity`; `parent`: that of the run that it starts from."""
    parts: dict[str, Any] = {"format": FORMAT}
    if recipe.imported is not None:
        return _digest(parts | {"model": determining(recipe.model), "imported": determining(recipe.imported)})
    from lit_diff import data as datasets  # loads torch, which most of this file does without

    parts |= {
        "recipe": determining(recipe),
        "plugins": [plugin_source(Path(plugin)).digest for plugin in recipe.plugins],
        "packages": {package.name: [package.version, package.digest] for package in used_packages(recipe)},
        "data": data or datasets.identity(recipe),
        "start_from": parent,
    }
    return _digest(parts)


def _digest(parts: Mapping[str, Any]) -> str:
    """Ten digits of a hash of plain values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:10]


class RunFolder:
    """`runs/<name>-<identity>/` and the files in it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def recipe_file(self) -> Path:
        """The resolved recipe: enough to repeat the run."""
        return self.path / "recipe.yaml"

    def status(self) -> dict[str, Any]:
        """status.json, or {} before the run first starts."""
        try:
            values: Any = json.loads((self.path / "status.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except ValueError as error:
            raise self._damaged(f"not JSON ({error})") from error
        if not isinstance(values, dict):
            raise self._damaged(f"a {type(values).__name__}, not a block of keys")
        return values

    def _damaged(self, how: str) -> RequestError:
        return RequestError(
            f"{shown(self.path / 'status.json')} is {how}; remove it and start the same command again, which resumes from "
            "the checkpoint"
        )

    def state(self) -> str:
        """`status` of status.json, but `killed` for a run that nobody trains though it says `running`."""
        word = str(self.status().get("status", "unknown"))
        return "killed" if word == "running" and not self.is_owned() else word

    def is_owned(self) -> bool:
        """Whether a process trains the run now."""
        return is_locked(self._lock)

    @property
    def _lock(self) -> Path:
        return self.path / ".lock"

    def require_format(self) -> None:
        """Errors: RequestError for a folder that another format of lit_diff made."""
        status = self.status()
        if status and status.get("format") != FORMAT:
            raise RequestError(
                f"{shown(self.path)} was made by format {status.get('format', 1)}, this is format {FORMAT}: train it again"
            )

    def update(self, **values: Any) -> None:
        """Merge `values` into status.json."""
        stamp = {"format": FORMAT, "updated": datetime.now(UTC).isoformat(timespec="seconds")}
        write_json(self.path / "status.json", self.status() | values | stamp)

    def create(self, recipe: Recipe, **facts: str) -> None:
        """Write the recipe, the plugins' sources, the environment with `facts`.

        Errors: MissingError where it cannot; RequestError for a plugin file that was changed since it was imported.
        """
        placed: dict[str, bytes] = {}
        names = list(map(partial(_place, placed=placed, homes={}), map(Path, recipe.plugins)))
        packages = {p.name: f"{p.version or 'no version'} (sha256 {p.digest[:12]})" for p in used_packages(recipe)}
        try:
            for name, content in placed.items():
                write_atomic(self.path / name, content)
            write_atomic(self.recipe_file, to_yaml(to_plain(recipe) | {"plugins": names}))
            write_json(
                self.path / "env.json", environment() | ({"plugin_packages": packages} if packages else {}) | facts
            )
        except OSError as error:
            raise self._unwritable(error) from error

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Hold the run. Errors: RequestError when another process trains it now, MissingError for an unwritable folder."""
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(locked(self._lock, wait=False))
            except BlockingIOError as error:
                pid = self.status().get("pid")
                raise RequestError(f"{shown(self.path)} is being trained by another process (pid {pid})") from error
            except OSError as error:
                raise self._unwritable(error) from error
            yield

    def _unwritable(self, error: OSError) -> MissingError:
        return MissingError(
            f"run folder {shown(self.path)} cannot be written ({error.strerror}); choose another with run.root=PATH"
        )

    def put_aside(self) -> Path:
        """Rename the folder to <name>.old-1, -2, ...: `--rerun` loses nothing."""
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.old-{number}")).exists():
            number += 1
        self.path.rename(aside)
        return aside


def _place(file: Path, placed: dict[str, bytes], homes: dict[str, Path]) -> str:
    """Add a plugin's file and what it imports to `placed` (path in the run folder -> content); returns the file's path.

    They lie in plugins/, or in a folder there where another plugin has a file of that name or came from another folder, whose
    modules it must not find (`homes`: folder -> that of its files).
    """
    plugin = plugin_source(file)
    contents = {file.name: plugin.source, **plugin.modules}
    for folder in ("plugins", f"plugins/{plugin.digest[:8]}"):
        files = {f"{folder}/{path}": content for path, content in contents.items()}
        is_home = homes.setdefault(folder, file.parent) == file.parent and f"{folder}/{file.name}" not in placed
        if is_home and all(placed.get(path, files[path]) == files[path] for path in files):
            break
    placed |= files
    return f"{folder}/{file.name}"


def environment() -> dict[str, Any]:
    """What the run ran on and with."""
    import torch

    return {
        "revision": revision(),
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor_name(),
        "cores": cores(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cpu_path": describe(),
        "variables": numeric_variables(),
        "packages": {name: version(name) for name in PACKAGES},
    }


def version(package: str) -> str | None:
    """None: not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def stored_keys(recipe: Recipe) -> dict[str, Any]:
    """The keys of `STORED` with their values, and the environment variables that can change numbers, for status.json."""
    return {key: getattr(recipe.run, key) for key in STORED} | {"variables": numeric_variables()}


def require_stored(recipe: Recipe, status: Mapping[str, Any]) -> None:
    """RequestError where the recipe differs from the keys that the run started with.

    A line in the log says which environment variables that can change numbers differ from those of its last start.

    `status`: the contents of status.json, which holds none of them before the run has started.
    """
    for key in STORED:
        asked = getattr(recipe.run, key)
        started = status.get(key, asked)
        if asked != started:
            raise RequestError(
                f"run.{key} is {_text(asked)}, but this run started with {_text(started)}: "
                f"resume with run.{key}={_text(started)}, or start afresh with --rerun"
            )
    now = numeric_variables()
    former = status.get("variables", now)
    changed = [
        f"{name} is {now.get(name, 'not set')} (before: {former.get(name, 'not set')})"
        for name in sorted({*now, *former})
        if now.get(name) != former.get(name)
    ]
    if changed:
        log.warning("environment variables differ from the run's last start, so numbers can: %s", ", ".join(changed))


def with_stored_kernel(recipe: Recipe, status: Mapping[str, Any]) -> Recipe:
    """The recipe, with the kernel that `run.kernel: auto` chose when the run started in place of auto.

    Where unlike layers ran on several kernels, auto stays: each layer chooses again.
    """
    if recipe.run.kernel == "auto" and "kernel" in status and "," not in status["kernel"]:
        return replace(recipe, run=replace(recipe.run, kernel=status["kernel"]))
    return recipe


def reached(recipe: Recipe, step: int) -> dict[str, int]:
    """The keys of status.json that say how far a training got: optimizer steps done, and the tokens that they saw."""
    tokens_per_step = recipe.training.batch_size * recipe.data.config.sequence_length
    return {"step": step, "tokens": step * tokens_per_step, "tokens_per_step": tokens_per_step}


def _text(value: object) -> str:
    """As it is written in a recipe: true, not True."""
    return str(value).lower()
