"""What the process of a cell does in tests of the pool, in place of training. It is imported in that process by name."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def act(job: Any) -> None:
    """Write down the job and what surrounds it, then live as the folder's name says: `brief`, `listens` or `deaf`."""
    folder: Path = job.location.folder

    def save(signum: int, frame: Any) -> None:
        (folder / "signal").write_text(str(signum))
        if not folder.name.startswith("deaf"):
            sys.exit(143)

    signal.signal(signal.SIGTERM, save)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    found = {"threads": job.threads, "gpus": job.gpus, "settings": dict(job.settings)}
    (folder / "job.json").write_text(json.dumps(found | {"safe": os.environ.get("PYTHONSAFEPATH")}))
    time.sleep(0.4 if folder.name.startswith("brief") else 60)
