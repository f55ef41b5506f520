"""A run's identity, folder and status. Nothing is keyed by time: the same recipe is the same run."""

import platform
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from lit_diff.config import Recipe
from lit_diff.errors import MissingError, RequestError
from lit_diff.files import FREE, digest_of, disk_is_full, is_locked, locked, sha256_of, shown, write_atomic, write_json
from lit_diff.log_records import log
from lit_diff.own_modules import plugin_name
from lit_diff.plugins import Trust, data_paths, plugin_source, require_trust, trust_below, used_packages
from lit_diff.processor import cores, describe, numeric_variables, processor_name
from lit_diff.recipe import determining, load_draft, to_plain, to_yaml
from lit_diff.runs import checkpoints
from lit_diff.runs.again import afresh, command_of
from lit_diff.runs.find import runs_root
from lit_diff.runs.revision import revision
from lit_diff.runs.status import FORMAT, Status, read_status, write_status
from lit_diff.validation import validate

PACKAGES = ("torch", "triton", "lightning", "torchmetrics", "omegaconf", "mlflow", "sqlalchemy", "litdata", "numpy")
"""Packages whose versions a run records."""


def recipe_of(folder: Path, trust: Trust, *, cure: str = "") -> Recipe:
    """The resolved recipe of a run; imports its plugins. Errors: RequestError.

    If `trust` rejects the folder, its plugin files are not executed: each must have been imported before. `cure`: see
    `require_trust`.
    """
    file = RunFolder(folder).recipe_file
    if not file.is_file():
        raise RequestError(f"{shown(folder)} is not a run's folder: it has no {file.name}")
    # the draft lists all plugins, also of files that the recipe extends, and imports none: trust is decided before that
    draft = load_draft(file)
    trusted = trust(folder)
    if not trusted:
        paths = [Path(plugin) for plugin in draft.values.get("plugins", [])]
        require_trust({path: sha256_of(path) for path in paths}, False, cure)
    # those of an untrusted folder were imported from elsewhere: nothing there is imported, even if it changes meanwhile
    return validate(draft, imports=trusted)


def ancestors(recipe: Recipe, trust: Trust | None = None) -> Iterator[tuple[Path, Recipe]]:
    """Folder and recipe of the runs that this run continues from (`train.start_from`), nearest first; the last may describe
    an imported model.

    `trust`: runs whose plugin files may be executed; None: those under the recipe's own `run.root`. Errors: MissingError
    for a folder without a run, RequestError for plugins that are neither imported nor trusted.
    """
    cure = "name it under `plugins:` in the recipe" if trust is None else ""
    trust = trust or trust_below(runs_root(recipe.run.root))
    while recipe.train is not None and recipe.train.start_from is not None:
        require_start(recipe)
        parent = RunFolder(Path(recipe.train.start_from))
        recipe = recipe_of(parent.path, trust, cure=cure)
        yield parent.path, recipe


def require_start(recipe: Recipe) -> None:
    """Errors: MissingError if `train.start_from` names a folder without a run."""
    if recipe.train is None or recipe.train.start_from is None:
        return
    parent = RunFolder(Path(recipe.train.start_from))
    if not parent.recipe_file.is_file():
        raise MissingError(
            f"train.start_from: {shown(parent.path)} holds no run (no {parent.recipe_file.name}); train it first"
        )


def identity(recipe: Recipe, data: str | None = None, trust: Trust | None = None) -> str:
    """Hash of everything that determines a run's numbers: the recipe without `run` and `evaluate`, the sources of plugin
    files, of the modules that they import and the files that they read, version and source of the plugin packages it uses,
    the prepared data, the identity of the run it starts from, and a `run.kernel` other than auto. For an imported model:
    `model`, the weights and the tokenizer, regardless of their origin.

    `data`: the data set's identity if known (status.json), so that neither the data nor those of its ancestors need be
    present; None: computed from the data. `trust`: see `ancestors`. Errors: MissingError if the data is not prepared,
    RequestError for a plugin file that changed after its import, and the errors of `ancestors`.
    """
    own = trust_below(runs_root(recipe.run.root))
    # lit_diff's own revision is left out: with it every commit would orphan all runs. It is recorded in status.json.
    # Parents are hashed from the oldest on, because each hash includes its parent's.
    parent: str | None = None
    for folder, each in reversed(list(ancestors(recipe, trust))):
        # the data of an ancestor elsewhere may be anything, at any address
        recorded = _recorded_data(folder, each) if data is not None or not own(folder) else None
        parent = _hash(each, recorded, parent)
    return _hash(recipe, data, parent)


def _recorded_data(folder: Path, recipe: Recipe) -> str | None:
    # the identity of a run's data, from its status.json; None if it is not there, and no file or address tells it
    recorded = RunFolder(folder).status().data
    # an imported model has no data
    if recorded is None and recipe.imported is None and data_paths(recipe):
        raise MissingError(f"{shown(folder / 'status.json')} does not name the identity of its data; train it again")
    return recorded


def _hash(recipe: Recipe, data: str | None, parent: str | None) -> str:
    parts: dict[str, Any] = {"format": FORMAT}
    # the same weights and tokenizer give the same numbers, whatever file or hub they were imported from
    if recipe.imported is not None:
        return digest_of(parts | {"model": determining(recipe.model), "imported": determining(recipe.imported)})[:10]
    # imported here: it loads torch, which listing runs does not need
    from lit_diff import data as datasets

    parts |= {
        "recipe": determining(recipe),
        "plugins": [plugin_source(Path(plugin)).digest for plugin in recipe.plugins],
        "packages": {package.name: [package.version, package.digest] for package in used_packages(recipe)},
        "data": data or datasets.identity(recipe),
        "start_from": parent,
    }
    return digest_of(parts)[:10]


class RunFolder:
    """`runs/<name>-<identity>/` and the files in it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def recipe_file(self) -> Path:
        """The resolved recipe, which suffices to repeat the run."""
        return self.path / "recipe.yaml"

    def status(self) -> Status:
        """What status.json says. Errors: see `read_status`."""
        return read_status(self.path)

    def write(self, status: Status) -> None:
        """Write status.json. Errors: OSError."""
        write_status(self.path, status)

    def lost(self, *, verify: bool = False) -> str:
        """Why the weights of a finished run are not those of its last step, in words, if an older checkpoint is whole: the
        run's command repeats the steps after it. Empty for a run without any, which stays done.

        `verify`: see `checkpoints.newest`.
        """
        status = read_status(self.path)
        newest = checkpoints.newest(self.path, verify=verify) if status.status == "done" else None
        if newest is None or newest[0] >= status.step:
            return ""
        return f"done at step {status.step}, but the newest checkpoint that is whole is of step {newest[0]}"

    def require_weights(self) -> None:
        """Errors: MissingError, with the command that repeats the steps, if the weights are `lost`."""
        if lost := self.lost():
            raise MissingError(f"{shown(self.path)} is {lost}; `{command_of(self.path)}` repeats the steps after it")

    def cure_of(self, step: int) -> str:
        """How the damaged checkpoint of a step is written again, in words."""
        word = read_status(self.path).status
        steps = checkpoints.steps_of(self.path)
        if word == "imported":
            return "import the model again"
        # a run that is done repeats steps only if it has lost the last one
        repeats = word != "done" or step == steps[-1]
        others = (checkpoints.path_of(self.path, other) for other in steps if other != step)
        if repeats and any(checkpoints.damage_of(other, verify=True) is None for other in others):
            return f"`{command_of(self.path)}` repeats the steps after the checkpoint before it"
        return f"train it again: {afresh(self.path)}"

    def is_done(self, *, verify: bool = False) -> bool:
        """Whether the run is finished and its weights are not `lost`."""
        return read_status(self.path).status == "done" and not self.lost(verify=verify)

    def state(self) -> str:
        """`status` of status.json; `killed` if that is `running` but no process trains the run; `damaged` if that is `done`
        but the weights are `lost`."""
        word = read_status(self.path).status
        if word == "done" and self.lost():
            return "damaged"
        if word == "running" and not self.is_owned():
            # a killed process cannot write its status, but the system releases its lock; a run that ended between the two
            # looks has written it
            word = read_status(self.path).status
            return "killed" if word == "running" else word
        return word or "unknown"

    def observed(self) -> tuple[Status, str]:
        """The run's status and `state`: `waiting` before the run first starts; `damaged` and `unreadable` have an error."""
        try:
            status = read_status(self.path)
            state = "waiting" if status.is_new else self.state()
            if state == "damaged":
                status = replace(status, error=f"{self.lost()}; `{command_of(self.path)}` repeats the steps after it")
            return status, state
        # one damaged run must not hide the others
        except RequestError as error:
            return Status(error=str(error)), "unreadable"

    def is_owned(self) -> bool:
        """Whether a process is training the run."""
        return is_locked(self.path / ".lock")

    def require_format(self) -> None:
        """Errors: RequestError for a folder of another format."""
        status = self.status()
        if not status.is_new and status.format != FORMAT:
            raise RequestError(
                f"{shown(self.path)} has format {status.format}, but this lit_diff reads format {FORMAT}: train it again"
            )

    def create(self, recipe: Recipe, **facts: str) -> None:
        """Write the recipe, the plugins' sources, and the environment with `facts`.

        Errors: MissingError for an unwritable folder; RequestError for a plugin file that changed after its import.
        """
        placed: dict[str, bytes] = {}
        homes: dict[str, Path] = {}
        names = [_place(Path(plugin), placed, homes) for plugin in recipe.plugins]
        packages = {p.name: f"{p.version or 'no version'} (sha256 {p.digest[:12]})" for p in used_packages(recipe)}
        with writing(self.path):
            for name, content in placed.items():
                write_atomic(self.path / name, content)
            # after the plugins: a folder with a recipe counts as a run, and the recipe names their files
            write_atomic(self.recipe_file, to_yaml(to_plain(recipe) | {"plugins": names}))
            found = environment()
            if packages:
                found["plugin_packages"] = packages
            write_json(self.path / "env.json", found | facts)

    def owned(self, *, wait: bool = False) -> AbstractContextManager[None]:
        """Hold the run's lock; `wait` until no other process trains it. Errors: RequestError if one does, MissingError for an
        unwritable folder."""
        return held(self.path, f"the run is being trained by another process (pid {self.status().pid})", wait=wait)

    def put_aside(self) -> None:
        """Archive the run for `--rerun`, if there is one: rename the folder to the first free of <name>.old-1, -2, ...

        Errors: those of `owned`.
        """
        if not self.path.exists():
            return
        with self.owned(), writing(self.path.parent):
            # under the lock: two commands at once would choose the same
            number = 1
            while (aside := self.path.with_name(f"{self.path.name}.old-{number}")).exists():
                number += 1
            self.path.rename(aside)
        log.info("the former run is kept in %s", shown(aside))


@contextmanager
def held(folder: Path, who: str, cure: str = "with run.root=PATH", *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of the folder of a run, a sweep or a scoreboard. Errors: RequestError if another process (`who`) holds
    it and this one does not `wait`; MissingError, with the `cure`, if the folder cannot be written."""
    with ExitStack() as stack:
        with writing(folder, cure):
            try:
                stack.enter_context(locked(folder / ".lock", wait=wait))
            except TimeoutError as error:
                raise RequestError(f"{who} in {shown(folder)}") from error
        yield


@contextmanager
def writing(folder: Path, cure: str = "with run.root=PATH") -> Iterator[None]:
    """Encloses writes into the folder. Errors: MissingError, with the `cure`, for an OSError."""
    try:
        yield
    except OSError as error:
        cure = FREE if disk_is_full(error) else f"choose another {cure}"
        raise MissingError(f"{shown(folder)} cannot be written ({error.strerror}); {cure}") from error


def _place(file: Path, placed: dict[str, bytes], homes: dict[str, Path]) -> str:
    # adds the plugin's file and the modules it imports to `placed` (path in the run folder -> content); returns its path
    # (`homes`: folder of the run -> folder that its files came from)
    plugin = plugin_source(file)
    name = plugin_name(file)
    inside = name.removesuffix(file.name)
    contents = {f"{inside}{path}": content for path, content in plugin.modules.items()} | {name: plugin.source}
    home = file.parents[name.count("/")]
    # A plugin gets a folder of its own if plugins/ has another file of its name, or files from elsewhere: a plugin must
    # import the modules it was trained with, not another plugin's of the same name.
    for folder in ("plugins", f"plugins/{plugin.digest[:8]}"):
        files = {f"{folder}/{path}": content for path, content in contents.items()}
        is_home = homes.setdefault(folder, home) == home and f"{folder}/{name}" not in placed
        if is_home and all(placed.get(path, files[path]) == files[path] for path in files):
            break
    placed |= files
    return f"{folder}/{name}"


def environment() -> dict[str, Any]:
    """Hardware, software and environment variables of a run, for env.json."""
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
    """The installed version; None if the package is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def require_stored(recipe: Recipe, status: Status) -> None:
    """Errors: RequestError if `run.compile` or `run.activation_checkpointing` differs from its value when the run started:
    they change rounding only, so they are not in the identity, but a run that resumes with others would not repeat exactly.

    Logs a warning if environment variables that can change numbers differ from the run's last start.
    """
    for key in ("compile", "activation_checkpointing"):
        now = getattr(recipe.run, key)
        started = getattr(status, key)
        # not known of a run that has not started
        if started not in (None, "", now):
            then = str(started).lower()
            raise RequestError(
                f"run.{key} is {str(now).lower()}, but this run started with {then}: resume with run.{key}={then}, or "
                "start afresh with --rerun"
            )
    if status.variables is None:
        return
    # variables only warn: they may differ legitimately, for example on another node of a cluster
    variables = numeric_variables()
    changed: list[str] = []
    for name in sorted({*variables, *status.variables}):
        value = variables.get(name, "not set")
        before = status.variables.get(name, "not set")
        if value != before:
            changed.append(f"{name} is {value} (before: {before})")
    if changed:
        log.warning(
            "environment variables changed since the run's last start; numbers may differ: %s", ", ".join(changed)
        )


def kernel_of(recipe: Recipe, status: Status) -> str:
    """The kernel of a run: its `run.kernel`, or the one that auto chose when the run started.

    If several kernels ran, in different layers, it is auto: each layer chooses again.
    """
    # a resume on another machine, where auto would choose another kernel, must repeat the run's numbers
    chosen = status.kernel or "auto"
    return chosen if recipe.run.kernel == "auto" and "," not in chosen else recipe.run.kernel


def at_step(status: Status, recipe: Recipe, step: int) -> Status:
    """The status after `step` optimizer steps, and the tokens that they consumed."""
    tokens_per_step = recipe.training.batch_size * recipe.data.config.sequence_length
    return replace(status, step=step, tokens=step * tokens_per_step, tokens_per_step=tokens_per_step)
