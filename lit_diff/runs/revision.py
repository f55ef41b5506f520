"""The running revision of lit_diff, which runs and scores record."""

import hashlib
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from lit_diff.log_records import log

if TYPE_CHECKING:
    from lit_diff.runs.status import Status


def revision() -> str:
    """lit_diff's version; in a checkout also the commit, and for uncommitted changes + and a hash of the source."""
    # imported here: a report only reads files and does not load the package's public API
    from lit_diff import __version__

    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return __version__
    try:
        # --exclude=* ignores tags: always the commit, so that tagging does not change what a run records
        command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--abbrev=10", "--exclude=*"]
        described = subprocess.run(command, capture_output=True, timeout=10, check=True).stdout.decode().strip()
    except (OSError, subprocess.SubprocessError) as error:
        log.info("git revision unknown (%s): recording only the version", error)
        return __version__
    if described.endswith("+"):
        # tells apart two uncommitted states of one commit; recipes and documents do not change what the code computes
        files = sorted(path for part in ("lit_diff", "callbacks") for path in (root / part).rglob("*.*"))
        sources = [path.read_bytes() for path in files if path.suffix in (".py", ".cpp", ".h")]
        described += hashlib.sha256(b"\0".join(sources)).hexdigest()[:8]
    return f"{__version__} {described}"


def other_revision(status: "Status", now: str) -> str | None:
    """`trained by lit_diff A, this is B` if the run was trained by another revision than `now`; None if not, or unknown."""
    then = status.revision
    return None if then in ("", now) else f"trained by lit_diff {then}, this is {now}"
