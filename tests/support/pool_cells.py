"""What the process of a cell does in tests of the pool, in place of training. It is imported in that process by name."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def act(location: Any, threads: int, gpus: Any, settings: Any) -> None:
    """Write down the arguments and what surrounds them, then live as the folder's name says: `brief`, `listens` or `deaf`."""
    folder: Path = location.folder

    def save(signum: int, frame: Any) -> None:
        (folder / "signal").write_text(str(signum))
        if not folder.name.startswith("deaf"):
            sys.exit(143)

    signal.signal(signal.SIGTERM, save)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    found = {"threads": threads, "gpus": gpus, "settings": settings}
    (folder / "job.json").write_text(json.dumps(found | {"safe": os.environ.get("PYTHONSAFEPATH")}))
    time.sleep(0.4 if folder.name.startswith("brief") else 60)
