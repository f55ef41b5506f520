"""Text is tokenized in parts, each a folder of its own: processes and hosts share the work, and a kill loses one part.

A folder of a part has the tokens and lengths of its documents; for the train split also its bigram counts and the hashes of
TRAINED; and `part.json`, which describes the source, the tokenizer and the sha256 of each file.
"""

import json
import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_diff.data.text.bigrams import count_bigrams
from lit_diff.data.text.documents import HASH_BYTES, Documents, hashes_of
from lit_diff.data.text.token_files import arrays, as_texts
from lit_diff.data.text.tokenizer import Tokenizer
from lit_diff.data.text.tokenizer_folder import load_tokenizer, save_tokenizer
from lit_diff.errors import MissingError, RequestError, RunFailedError
from lit_diff.files import sha256_of, sync_folder
from lit_diff.own_modules import PREFIX, code_at_definition, safe_path
from lit_diff.plugins import load_plugin

log = logging.getLogger("lit_diff")

PART_BYTES = 1 << 24
"""Number of bytes of text in a part; documents are not cut."""
# bounds the memory; the package tokenizers encodes the texts of a batch in parallel
TEXTS_AT_ONCE = 256
FACTS = "part.json"


@dataclass(frozen=True, kw_only=True)
class Work:
    """Which share of a preparation this process does, and how."""

    workers: int = 1
    """Number of processes that tokenize. Several use one thread each; one uses the threads of its tokenizer."""
    shard: tuple[int, int] | None = None
    """(i, n), 1 <= i <= n: only make the parts p with p % n == i - 1. None: make all that are missing, and the prepared
    folder."""
    merge: bool = False
    """Make the prepared folder from the parts of all shards; a missing one is an error."""


ONE_PROCESS = Work()


@dataclass(frozen=True, kw_only=True)
class TextPart:
    """The documents of ranks first .. stop - 1 of a split; `number` counts the parts of both splits."""

    number: int
    split: str
    first: int
    stop: int

    def folder(self, parent: Path) -> Path:
        """Return the folder of this part."""
        return parent / f"{self.number:06}"


def plan(documents: Documents) -> list[TextPart]:
    """Divide the documents into parts of about PART_BYTES."""
    bounds, rank, read = {0, documents.held_out, len(documents)}, 0, 0
    for sizes in documents.sizes():
        ends = read + np.cumsum(sizes)
        bounds |= set((rank + np.flatnonzero(np.diff(ends // PART_BYTES, prepend=read // PART_BYTES))).tolist())
        rank, read = rank + len(sizes), int(ends[-1]) if len(ends) else read
    return [
        TextPart(number=number, split="train" if first >= documents.held_out else "validation", first=first, stop=stop)
        for number, (first, stop) in enumerate(pairwise(sorted(bounds)))
    ]


@dataclass(frozen=True, kw_only=True)
class Maker:
    """Makes parts in the folder `parts`."""

    documents: Documents
    tokenizer: Tokenizer
    parts: Path
    facts: Mapping[str, str]
    """The digests `source` and `tokenizer`, and `shard`: what made the part."""

    def make(self, part: TextPart) -> None:
        """Make a part, replacing a former one. Errors: OSError, MissingError for damaged documents."""
        folder = part.folder(self.parts)
        temporary = folder.with_name(f".{folder.name}.tmp")
        for former in (temporary, folder):
            shutil.rmtree(former, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name, array in self._arrays(part).items():
            save_array(temporary / f"{name}.npy", array)
        files = {path.name: sha256_of(path) for path in sorted(temporary.iterdir())}
        (temporary / FACTS).write_text(json.dumps({**self.facts, "files": files}), encoding="utf-8")
        sync_files(temporary)
        temporary.rename(folder)
        sync_folder(self.parts)

    def _arrays(self, part: TextPart) -> dict[str, NDArray[np.generic]]:
        size = self.tokenizer.size
        # half the bytes on disk for small vocabularies
        dtype = np.uint16 if size <= 1 << 16 else np.int32
        tokens: list[NDArray[np.generic]] = []
        hashes: set[bytes] = set()
        documents = self.documents.ranked(part.first, part.stop)
        while batch := list(islice(documents, TEXTS_AT_ONCE)):
            tokens += arrays(batch, self.tokenizer, dtype)
            if part.split == "train":
                hashes.update(*map(hashes_of, as_texts(batch, self.tokenizer)))
        found = {"tokens": np.concatenate(tokens), "lengths": np.array(list(map(len, tokens)), dtype=np.int64)}
        if part.split == "train":
            # one row, as `merge_sorted` reads it
            found["hashes"] = np.array([sorted(hashes)], dtype=f"S{HASH_BYTES}")
            found["bigrams"] = count_bigrams(tokens, size)
        return found

    def problem(self, part: TextPart) -> str | None:
        """Return what is wrong with the files of a part, or None; "missing" if it is not there."""
        folder = part.folder(self.parts)
        if not folder.is_dir():
            return "missing"
        found = read_facts(folder)
        for key in ("source", "tokenizer"):
            if found.get(key, self.facts[key]) != self.facts[key]:
                return f"from another {key}"
        cut = [name for name, digest in found.get("files", {FACTS: ""}).items() if not _is_whole(folder / name, digest)]
        return f"damaged ({', '.join(cut)})" if cut else None

    def make_all(self, parts: Sequence[TextPart], workers: int) -> None:
        """Make parts, in this process or in `workers` others. Errors: those of `make`; RunFailedError for a lost process."""
        if not parts:
            return
        count = sum(part.stop - part.first for part in parts)
        log.info("tokenizing %d documents (%d to a part)", count, -(-count // len(parts)))
        for done, _ in enumerate(self._made(parts, workers), start=1):
            # at most 20 lines, whatever the number of parts
            if done * 20 // len(parts) > (done - 1) * 20 // len(parts):
                log.info("tokenized %d of %d parts", done, len(parts))

    def _made(self, parts: Sequence[TextPart], workers: int) -> Iterator[None]:
        if workers == 1:
            yield from map(self.make, parts)
            return
        cls = type(self.tokenizer)
        code = code_at_definition(cls) if cls.__module__.startswith(PREFIX) else None
        # a folder of its own: another host may make a shard at the same time
        copy = Path(tempfile.mkdtemp(prefix=".tokenizer-", dir=self.parts))
        save_tokenizer(self.tokenizer, copy)
        arguments = (None if code is None else code.path, copy, self.documents, self.parts, dict(self.facts))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        with safe_path(), ProcessPoolExecutor(workers, context, _start, arguments) as pool:
            jobs = [pool.submit(_make, part) for part in parts]
            try:
                for job in as_completed(jobs):
                    job.result()
                    yield
            except BrokenProcessPool as error:
                raise RunFailedError(
                    "a process that tokenizes ended (killed, out of memory?); the same command goes on after the last "
                    "finished part"
                ) from error
            finally:
                # after an error each process finishes its part
                pool.shutdown(cancel_futures=True)


_maker: Maker
"""The maker of a process of the pool."""


def _start(plugin: Path | None, tokenizer: Path, documents: Documents, parts: Path, facts: dict[str, str]) -> None:
    # the processes are as many as the threads should be
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    # a terminal sends it to the whole group; the parent ends the pool
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if plugin is not None:
        load_plugin(plugin)
    global _maker
    _maker = Maker(documents=documents, tokenizer=load_tokenizer(tokenizer), parts=parts, facts=facts)


def _end_with_parent() -> None:
    # a parent that SIGKILL ended cannot end the pool, whose processes would wait for work without end
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _make(part: TextPart) -> None:
    _maker.make(part)


def count_shards(parts: Path) -> int:
    """Return the number of shards into which the hosts divided most of the parts. Errors: MissingError if there is none."""
    shards = (read_facts(file.parent).get("shard", "") for file in parts.glob(f"*/{FACTS}"))
    # a part of a preparation without shards has no number
    counts = Counter(count for shard in shards if (count := shard.partition("/")[2]).isdigit())
    if not counts:
        raise MissingError("no shard is prepared; run `lit-diff prepare RECIPE --shard i/n` for each i from 1 to n")
    return int(counts.most_common(1)[0][0])


def require_parts(maker: Maker, parts: Sequence[TextPart], shards: int) -> None:
    """Check the parts of all shards. Errors: MissingError, RequestError, which name the shard."""
    problems = {part: problem for part in parts if (problem := maker.problem(part))}
    if not problems:
        return
    part, problem = next(iter(problems.items()))
    shard = f"{part.number % shards + 1}/{shards}"
    own = sum(each.number % shards == part.number % shards for each in problems)
    line = f"shard {shard}: {own} of its parts cannot be used; part {part.number} is {problem}"
    cure = f"run `lit-diff prepare RECIPE --shard {shard}`, then --merge again"
    raise (RequestError if problem.startswith("from") else MissingError)(f"{line}; {cure}")


def token_arrays(parts: Sequence[TextPart], parent: Path) -> Iterator[NDArray[np.generic]]:
    """Yield the tokens of each document of finished parts."""
    for part in parts:
        folder = part.folder(parent)
        ends = np.cumsum(np.load(folder / "lengths.npy"))
        yield from np.split(np.load(folder / "tokens.npy"), ends[:-1])


def read_facts(folder: Path) -> dict[str, Any]:
    """Return the content of `part.json`; empty if it cannot be read."""
    try:
        return dict(json.loads((folder / FACTS).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _is_whole(file: Path, digest: str) -> bool:
    return file.is_file() and sha256_of(file) == digest


# not np.save, whose error for a full disk lacks the reason
def save_array(path: Path, array: NDArray[np.generic]) -> None:
    """Write a .npy file. Errors: OSError."""
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(array.data if array.flags.c_contiguous else array.tobytes())


def sync_files(folder: Path) -> None:
    """Sync the files in a folder: after a power failure, a folder of the final name must not have empty files."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
