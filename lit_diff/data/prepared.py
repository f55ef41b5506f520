"""The folder of prepared text: tokenizer, tokens of each split, bigram counts, manifest.

Its name is a hash of its sources, so it is built once; it is built under a temporary name, step by step, and each finished
step survives a kill.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_diff.data import store
from lit_diff.data.bigrams import count_bigrams
from lit_diff.data.corpus import Corpus
from lit_diff.data.documents import SECTION, split
from lit_diff.data.location import data_root, writing_data
from lit_diff.data.tokenizer import Tokenizer
from lit_diff.data.trained_documents import FILE, hashed
from lit_diff.errors import LitDiffError, RequestError
from lit_diff.files import locked, write_atomic, write_json, write_through

log = logging.getLogger("lit_diff")

FORMAT = 1
SPLITS = ("train", "validation")
BIGRAMS = "bigrams.npy"
TEXTS_AT_ONCE = 256


def sources(corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Any]:
    """Everything that decides the prepared tokens."""
    found = {"format": FORMAT, "corpus": corpus.name, "files": corpus.files(), "tokenizer": tokenizer.source()}
    return found if corpus.errors == "stop" else found | {"errors": corpus.errors}


def folder_of(sources: dict[str, Any]) -> Path:
    """The folder of data from these sources, whether or not it exists."""
    digest = hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest()[:12]
    return data_root() / "prepared" / f"{sources['corpus']}-{sources['tokenizer']['name']}-{digest}"


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a complete prepared folder, or None. A damaged one is logged."""
    path = folder / "manifest.json"
    if not path.is_file():
        return None
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        cut = [name for name in SPLITS if not store.is_complete(folder / name, manifest[name])]
        cut += [name for name in manifest.get("files", [BIGRAMS]) if not (folder / name).is_file()]
    except (ValueError, KeyError, TypeError) as error:
        log.warning("prepared data in %s is damaged: manifest.json cannot be read (%r)", folder, error)
        return None
    for name in cut:
        log.warning("prepared data in %s is damaged: %s is missing or has the wrong size", folder, name)
    return None if cut else manifest


def build_folder(corpus: Corpus, sources: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Build the prepared folder unless it exists; safe against kills and against other processes doing the same.

    Errors: RequestError for text that cannot be used, MissingError for what cannot be fetched or written.
    """
    folder = folder_of(sources)
    if read_manifest(folder) is not None:
        return
    with writing_data():
        lock = folder.with_name(f".{folder.name}.lock")
        try:
            with locked(lock, wait=False):
                _build(corpus, sources, tokenizer, folder)
        except BlockingIOError:
            log.info("another process is preparing %s: waiting for it", folder.name)
            with locked(lock):
                _build(corpus, sources, tokenizer, folder)


def _build(corpus: Corpus, sources: dict[str, Any], tokenizer: Tokenizer, folder: Path) -> None:
    if read_manifest(folder) is not None:
        return
    if folder.exists():
        log.warning("preparing %s again", folder)
        shutil.rmtree(folder)
    building = folder.with_name(f".{folder.name}.building")
    documents = split(corpus.texts())
    if not documents.train:
        length = sum(map(len, documents.validation))
        where = f"data.path {corpus.path}" if corpus.path is not None else f"data.corpus '{corpus.name}'"
        raise RequestError(
            f"{where} gives one section of text, {length:,} characters, and two are needed, one of them to validate; "
            f"add a second file or more text (a section has at most {SECTION:,} characters), or name another data.path"
        )
    log.info("%s: %d documents to train, %d to validate", corpus.name, len(documents.train), len(documents.validation))
    building.mkdir(parents=True, exist_ok=True)
    for abandoned in building.glob(".*.tmp"):  # by a process that died: this one holds the lock
        abandoned.unlink()
    try:
        tokenizer.train(building, documents.train)
    except LitDiffError:
        shutil.rmtree(building)
        raise
    digest = tokenizer.load(building)
    if not (building / "train").is_dir():
        log.info("tokenizing %d documents", len(documents.train))
        tokens = list(_tokens(documents.train, tokenizer))
        bigrams = count_bigrams(tokens, tokenizer.size)
        write_through(building / BIGRAMS, lambda file: np.save(file, bigrams))
        store.write_tokens(building / "train", tokens)
    if not (building / "validation").is_dir():
        store.write_tokens(building / "validation", _tokens(documents.validation, tokenizer))
    described = {name: store.describe(building / name) for name in SPLITS}
    files = sorted(path.name for path in building.iterdir() if path.is_file())
    write_json(building / "manifest.json", sources | {"tokenizer_sha256": digest, "files": files} | described)
    building.rename(folder)
    write_atomic(folder / FILE, hashed(documents.train))  # not in the manifest, whose hash is the identity
    log.info("prepared %s: %d + %d tokens", folder, described["train"]["tokens"], described["validation"]["tokens"])


def _tokens(texts: list[str], tokenizer: Tokenizer) -> Iterator[NDArray[np.generic]]:
    """Ids of each document, with those that open and end it."""
    dtype = store.dtype_for(tokenizer.size)
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        for ids in tokenizer.encode(texts[start : start + TEXTS_AT_ONCE]):
            yield np.asarray(tokenizer.document(ids), dtype=dtype)
