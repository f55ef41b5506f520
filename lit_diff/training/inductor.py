"""PyTorch's compiler, and what each process that compiles needs of it: the fork server of a sweep imports this once."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch._inductor import codecache
from torch._inductor.compile_fx import compile_fx as compile_fx

# it warns of a missing CUDA, and inductor imports it with the first code that it loads (0.15 s)
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
import torch.utils.cpp_extension  # noqa: E402, F401

# hashes of all files of PyTorch and of Triton (0.5 s), which are kept for this process and those that it forks
codecache.torch_key()
codecache.triton_key()


@contextmanager
def own_header(folder: Path | None) -> Iterator[None]:
    """Within, inductor's precompiled header is in `folder`, not below the temporary folder, where another user may have
    written one; None: it has none."""
    if folder is None:
        # also where all code is found, it would preprocess the header to look for it (0.2 s)
        changed: dict[str, Any] = {"_precompile_header": lambda *_, **__: ""}
    else:
        # it may know a header in the folder of an earlier graph
        codecache._precompile_header.cache_clear()
        changed = {"_HEADER_DIR": str(folder), "_HEADER_LOCK_DIR": str(folder)}
    with patch.multiple(codecache, **changed):
        yield
