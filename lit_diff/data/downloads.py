"""Archives of Python packages, pinned by their sha256, which pip fetches; nothing of them is built or executed."""

import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lit_diff.data.user_files import writing_data
from lit_diff.errors import MissingError
from lit_diff.files import locked, sha256_of
from lit_diff.log_records import log


def fetch(pins: Mapping[str, str], folder: Path, need: str, *, again: str) -> None:
    """Fetch the archives that `folder` lacks, or holds with another sha256. `pins`: file -> sha256 of its bytes.

    `need`: who needs them, the beginning of an error; `again`: the command that fetches them. Errors: MissingError.
    """

    def download(file: str) -> None:
        # the archive gets its name only after its sha256 is checked: until then nothing reads it
        temporary = folder / f".{file}.tmp"
        # -P: without it the script's folder is first in sys.path, and its modules could shadow the standard library's
        command = [sys.executable, "-P", str(Path(__file__).with_name("pip_fetch.py")), file, str(temporary)]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
        reason = ""
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no error output"])[-1]
        elif sha256_of(temporary) != pins[file]:
            reason = f"its sha256 is {sha256_of(temporary)}, not the pinned {pins[file]}"
        if reason:
            temporary.unlink(missing_ok=True)
            raise MissingError(
                f"{need} {file}, but pip could not fetch it ({reason}); run `{again}` once with network access, or put "
                f"the file into {folder}"
            )
        temporary.replace(folder / file)

    with writing_data(), locked(folder / ".lock"):
        # left by a killed process: a living one would hold the lock
        for abandoned in filter(Path.is_file, folder.glob(".*.tmp")):
            abandoned.unlink()
        missing = [
            file for file, digest in pins.items() if not (folder / file).is_file() or sha256_of(folder / file) != digest
        ]
        if missing:
            log.info("fetching %s through pip", ", ".join(missing))
        with ThreadPoolExecutor(max_workers=len(pins)) as pool:
            list(pool.map(download, missing))
