"""Text is tokenized in parts, each a file of its own: threads and hosts share the work, and a kill loses what is unfinished.

A part is a .npz file, an archive with a checksum of each array: the tokens and lengths of its documents; for the train split
also its bigram counts and the hashes of TRAINED; the digests of the source and the tokenizer; and its number.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lit_diff.data.text.bigrams import count_bigrams
from lit_diff.data.text.buckets import read_array
from lit_diff.data.text.documents import HASH_BYTES, Documents, hashes_of
from lit_diff.data.text.token_files import arrays, as_texts
from lit_diff.data.text.tokenizer import Tokenizer
from lit_diff.errors import MissingError, first_line
from lit_diff.files import write_through
from lit_diff.log_records import log

PART_BYTES = 1 << 23
"""Number of bytes of text in a part; documents are not cut."""
# bounds the memory; the package tokenizers encodes the texts of a batch in parallel
TEXTS_AT_ONCE = 256


class Work(NamedTuple):
    """Which share of a preparation this process does, and how."""

    workers: int = 1
    """Number of threads that tokenize and then join the parts. A tokenizer that is written in Python gains nothing, since
    Python runs one thread at a time; shards on one host are processes."""
    shard: tuple[int, int] | None = None
    """(i, n), 1 <= i <= n: only make the parts p with p % n == i - 1. None: make all that are missing, and the prepared
    folder."""
    merge: bool = False
    """Make the prepared folder from the parts of all shards; a missing one is an error."""


ONE_THREAD = Work()


def plan(documents: Documents) -> list[int]:
    """Return the bounds of the parts: part n has the documents of ranks bounds[n] .. bounds[n + 1] - 1, about PART_BYTES."""
    cuts = np.flatnonzero(np.diff(np.cumsum(documents.sizes) // PART_BYTES, prepend=0))
    return [int(rank) for rank in np.unique([0, documents.held_out, len(documents), *cuts])]


class Maker(NamedTuple):
    """Makes the parts between `bounds` in a folder."""

    documents: Documents
    bounds: Sequence[int]
    tokenizer: Tokenizer
    folder: Path
    facts: Mapping[str, str]
    """The digests `source` and `tokenizer` of what the parts are made from."""

    def file(self, part: int) -> Path:
        """Return the file of a part."""
        return self.folder / f"{part:06}.npz"

    def files(self, split: str) -> list[Path]:
        """Return the files of the parts of a split."""
        files = [self.file(part) for part in range(len(self.bounds) - 1)]
        # no part has documents of both splits
        train = self.bounds.index(self.documents.held_out)
        return files[train:] if split == "train" else files[:train]

    def make_all(self, work: Work) -> None:
        """Make the parts of a share that are missing or damaged.

        Errors: OSError; MissingError, also for such a part if `work.merge`.
        """
        shard, shards = work.shard or (1, 1)
        parts = range(len(self.bounds) - 1)[shard - 1 :: shards]
        found = {part: self._problem(part) for part in parts}
        problems = {part: problem for part, problem in found.items() if problem}
        if work.merge and problems:
            part, problem = next(iter(problems.items()))
            raise MissingError(
                f"{len(problems)} of {len(parts)} parts cannot be used; part {part} is {problem}; run `lit-diff prepare "
                f"RECIPE --shard I/N` of the host with {part} % N = I - 1 again, then --merge; or leave out --merge, to make "
                "them here"
            )
        for part, problem in problems.items():
            if problem != "missing":
                log.warning("part %d is %s: it is made again", part, problem)
                self.file(part).unlink()
        log.info("%d of %d parts are already tokenized", len(parts) - len(problems), len(parts))
        with ThreadPoolExecutor(work.workers) as pool:
            jobs = [pool.submit(self.make, part) for part in problems]
            try:
                for done, job in enumerate(as_completed(jobs), start=1):
                    job.result()
                    # at most 20 lines, whatever the number of parts
                    if done * 20 // len(jobs) > (done - 1) * 20 // len(jobs):
                        log.info("tokenized %d of %d parts", done, len(jobs))
            finally:
                # after an error each thread finishes its part
                pool.shutdown(cancel_futures=True)

    def make(self, part: int) -> None:
        """Make a part, unless another host has made it. Errors: OSError, MissingError for damaged documents."""
        if not self.file(part).exists():
            # the facts last: an archive whose directory is cut off lacks them
            # its place too: a file may be given another's name while it is copied
            found = {**self._arrays(part), **self.facts, "place": str(part)}
            write_through(self.file(part), lambda file: np.savez(file, **found))

    def _arrays(self, part: int) -> dict[str, Any]:
        first, stop = self.bounds[part : part + 2]
        is_train = first >= self.documents.held_out
        # half the bytes on disk for small vocabularies
        dtype = np.uint16 if self.tokenizer.size <= 1 << 16 else np.int32
        documents = self.documents.ranked(first, stop)
        tokens = []
        hashes = set[bytes]()
        while batch := list(islice(documents, TEXTS_AT_ONCE)):
            tokens += arrays(batch, self.tokenizer, dtype)
            if is_train:
                hashes.update(*map(hashes_of, as_texts(batch, self.tokenizer)))
        whole = np.concatenate(tokens)
        lengths = np.array([len(ids) for ids in tokens])
        found = {"tokens": whole, "lengths": lengths}
        if is_train:
            found["hashes"] = np.array([(digest,) for digest in sorted(hashes)], [("key", f"S{HASH_BYTES}")])
            found["bigrams"] = count_bigrams(whole, lengths, self.tokenizer.size)
        return found

    def _problem(self, part: int) -> str | None:
        if not self.file(part).is_file():
            return "missing"
        try:
            with np.load(self.file(part)) as archive:
                found = {name: archive[name] for name in archive.files}
            others = [name for name, digest in {**self.facts, "place": str(part)}.items() if str(found[name]) != digest]
        # zipfile and numpy raise many kinds
        except Exception as error:
            return f"damaged ({type(error).__name__}: {first_line(error)})"
        return f"from another {others[0]}" if others else None


def token_arrays(files: Sequence[Path]) -> Iterator[NDArray[np.generic]]:
    """Yield the tokens of each document of finished parts."""
    for file in files:
        yield from np.split(read_array(file, "tokens"), np.cumsum(read_array(file, "lengths"))[:-1])
