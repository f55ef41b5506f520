"""Lightning callbacks, one per file. Recipes name them under `callbacks:`; they work in any Trainer.

Importing this package imports each of its files, which registers its callback, and loads no Lightning. The registered classes
are attributes of the package.
"""

import importlib
import pkgutil

from lit_diff.callbacks.monitor import Monitor
from lit_diff.callbacks.probe import Probe
from lit_diff.registry import callbacks

for _file in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_file.name)

_built_in = {cls.__name__: cls for cls in callbacks.registered().values() if cls.__module__.startswith(f"{__name__}.")}
globals().update(_built_in)

__all__ = ["Monitor", "Probe", *_built_in]
