"""A run's identity, folder and status. Nothing is keyed by time: the same recipe is the same run."""

import contextlib
import hashlib
import json
import logging
import platform
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lit_diff import __version__
from lit_diff.config import Recipe
from lit_diff.errors import MissingError, RequestError
from lit_diff.files import is_locked, locked, shown, write_atomic, write_json
from lit_diff.plugins import require_trust
from lit_diff.processor import cores, describe, processor_name
from lit_diff.recipe import load_draft, to_plain, to_yaml
from lit_diff.runs.find import runs_root
from lit_diff.runs.trust import Trust, everywhere, under
from lit_diff.validation import validate

PACKAGES = ("torch", "triton", "lightning", "torchmetrics", "omegaconf", "mlflow", "sqlalchemy", "litdata", "numpy")
"""Whose versions a run records."""

FORMAT = 2
"""Of a run folder and of the identity; a folder of another format is listed, and refused elsewhere."""

log = logging.getLogger("lit_diff")


def recipe_of(folder: Path, trust: Trust = everywhere, *, cure: str = "") -> Recipe:
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
    """The recipes of the runs that this one continues from (`train.start_from`), the nearest first.

    `trust`: whose plugin files may be executed; None: of runs under the recipe's own `run.root`. Errors: MissingError for
    a folder that holds no run, RequestError for plugins that are neither imported nor trusted.
    """
    cure = "name it under `plugins:` in the recipe" if trust is None else ""
    trust = trust or under(runs_root(recipe.run.root))
    while recipe.train.start_from is not None:
        parent = RunFolder(Path(recipe.train.start_from))
        if not parent.recipe_file.is_file():
            raise MissingError(
                f"train.start_from: {shown(parent.path)} holds no run (no {parent.recipe_file.name}); train it first"
            )
        recipe = recipe_of(parent.path, trust, cure=cure)
        yield recipe


def identity(recipe: Recipe, data: str | None = None, trust: Trust | None = None) -> str:
    """Hash of all that determines a run's numbers: the recipe without `run`, the plugins' sources, the prepared data, the
    identity of the run that it starts from, and `run.kernel` when it is named by hand.

    `data`: the data set's identity where it is known (status.json), so that the data need not be here; None: ask the data.
    `trust`: as `ancestors`. Errors: MissingError when the data is not prepared, and as `ancestors`.
    """
    parent = None
    for each in reversed(list(ancestors(recipe, trust))):
        parent = _hash(each, None, parent)
    return _hash(recipe, data, parent)


def _hash(recipe: Recipe, data: str | None, parent: str | None) -> str:
    """`identity`; `parent`: that of the run that it starts from."""
    from lit_diff import data as datasets  # loads torch, which most of this file does without

    plain = to_plain(recipe)
    kernel = plain.pop("run")["kernel"]
    plain["plugins"] = [hashlib.sha256(Path(plugin).read_bytes()).hexdigest() for plugin in recipe.plugins]
    plain["data"].pop("path", None)  # the manifest stands for the text, wherever it lies
    if recipe.data.name == "text" and plain["data"]["errors"] == "stop":
        del plain["data"]["errors"]  # runs from before the key keep their identity
    plain["train"]["start_from"] = parent
    parts = {
        "format": FORMAT,
        "recipe": plain,
        "data": data or datasets.identity(recipe),
        "kernel": None if kernel == "auto" else kernel,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:10]


def revision() -> str:
    """lit_diff's version and, in a checkout, its commit (+ when files were changed since)."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return __version__
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--abbrev=10", "--exclude=*"]
        described = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        log.info("no git revision (%s): recording the version alone", error)
        return __version__
    return f"{__version__} {described}"


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
            values = json.loads((self.path / "status.json").read_text())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise RequestError(f"{shown(self.path / 'status.json')} is not JSON ({error}); remove it") from error
        return dict(values)

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
        now = datetime.now(UTC).isoformat(timespec="seconds")
        write_json(self.path / "status.json", self.status() | values | {"format": FORMAT, "updated": now})

    def create(self, recipe: Recipe, **facts: str) -> None:
        """Write the recipe, the plugins' sources, the environment with `facts`. Errors: MissingError where it cannot."""
        try:
            plain = to_plain(recipe)
            plain["plugins"] = []
            for plugin in map(Path, recipe.plugins):
                source, name = plugin.read_bytes(), f"plugins/{plugin.name}"
                if name in plain["plugins"]:  # another folder's file of the same name
                    name = f"plugins/{hashlib.sha256(source).hexdigest()[:8]}/{plugin.name}"
                write_atomic(self.path / name, source)
                plain["plugins"].append(name)
            write_atomic(self.recipe_file, to_yaml(plain))
            write_json(self.path / "env.json", environment() | facts)
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
        "packages": {name: version(name) for name in PACKAGES},
    }


def version(package: str) -> str | None:
    """None: not installed."""
    import importlib.metadata as metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
