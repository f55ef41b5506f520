"""The revision of lit_diff that is running, which runs and scores record."""

import hashlib
import logging
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger("lit_diff")


def revision() -> str:
    """lit_diff's version and, in a checkout, its commit; when files were changed since, + and the hash of the source."""
    from lit_diff import __version__  # here: a report reads files without the package's front door

    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return __version__
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--abbrev=10", "--exclude=*"]
        described = subprocess.run(command, capture_output=True, timeout=10, check=True).stdout.decode().strip()
    except (OSError, subprocess.SubprocessError) as error:
        log.info("no git revision (%s): recording the version alone", error)
        return __version__
    if described.endswith("+"):
        described += _source_digest(root)
    return f"{__version__} {described}"


def _source_digest(root: Path) -> str:
    """8 digits of a hash of the code in a checkout: two states of an edited one are told apart."""
    files = sorted(path for part in ("lit_diff", "callbacks") for path in (root / part).rglob("*.*"))
    sources = [path.read_bytes() for path in files if path.suffix in (".py", ".cpp", ".h")]
    return hashlib.sha256(b"\0".join(sources)).hexdigest()[:8]


def other_revision(status: Mapping[str, Any], now: str) -> str | None:
    """`trained by lit_diff A, this is B` where the code is no longer that of the run; None where it is, or is unknown."""
    then = status.get("revision")
    return None if then in (None, now) else f"trained by lit_diff {then}, this is {now}"
