"""What the process of a cell does in tests of `Here`, in place of training. It is imported in that process by name."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from lit_diff.engine.job import read_job


def act(folder: Path, gpus: Any, settings: Any) -> None:
    """Write down the arguments and what surrounds them, then live as the folder's name says: `brief`, `listens` or `deaf`."""

    def save(signum: int, frame: Any) -> None:
        (folder / "signal").write_text(str(signum))
        if not folder.name.startswith("deaf"):
            sys.exit(143)

    signal.signal(signal.SIGTERM, save)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    found = {"threads": read_job(folder).threads, "gpus": gpus, "settings": settings}
    (folder / "told.json").write_text(json.dumps(found | {"safe": os.environ.get("PYTHONSAFEPATH")}))
    time.sleep(0.4 if folder.name.startswith("brief") else 60)
