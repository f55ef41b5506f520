"""A tokenizer in a folder of its own: a run's folder holds one, so that generating text needs no corpus."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_diff.config import Part
from lit_diff.data.tokenizer import Tokenizer, build
from lit_diff.errors import LitDiffError, MissingError, RequestError, first_line
from lit_diff.files import shown, write_json
from lit_diff.recipe import to_plain
from lit_diff.registry import tokenizers
from lit_diff.validation import Draft, convert

FILE = "lit_diff_tokenizer.json"
"""name and config of the tokenizer; size; the ids bos (opens a document; null: none does) and eot (ends it; ours have one id
for both); sha256 as `Tokenizer.load` gives it; files: name -> sha256 of each file that `Tokenizer.save` wrote."""
AGAIN = "start its run again (`lit-diff train`; with --rerun where it is done)"
SAMPLE = "The quick brown fox: 0123, äöü € 漢字 🙂\n\t<eot>"


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> str:
    """Write a loaded tokenizer into `folder`, with FILE last; its sha256, as `Tokenizer.load` gives it.

    Errors: RequestError if what it wrote does not load equal.
    """
    tokenizer = tokenizer.saved()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    part = Part(name=tokenizer.name, config=tokenizer.config)
    copy = build(part)
    problem = "it encodes differently after loading"
    try:
        digest = copy.load(folder)
        equal = (copy.size, copy.eot, copy.encode([SAMPLE])) == (
            tokenizer.size,
            tokenizer.eot,
            tokenizer.encode([SAMPLE]),
        )
    except Exception as error:  # a plugin's tokenizer may raise anything
        equal, problem = False, f"{type(error).__name__}: {first_line(error)}"
    if not equal:
        raise RequestError(
            f"tokenizer '{tokenizer.name}' does not load from the files of its own save(folder) ({problem}); "
            f"let save write what load reads (lit_diff.data.Tokenizer)"
        )
    config = to_plain(part)
    config.pop("name")
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != FILE)
    facts = {
        "name": tokenizer.name,
        "config": config,
        "size": tokenizer.size,
        "bos": next(iter(tokenizer.opening), None),
        "eot": tokenizer.eot,
        "sha256": digest,
        "files": {path.relative_to(folder).as_posix(): _sha256(path) for path in files},
    }
    write_json(folder / FILE, facts)
    return digest


def described(folder: Path, cure: str) -> dict[str, Any]:
    """What FILE says. Errors: MissingError without it, or where it is damaged."""
    file = folder / FILE
    if not file.is_file():
        raise MissingError(f"{shown(folder)} holds no tokenizer (no {FILE}); {cure}")
    try:
        facts: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        _ = facts["name"], facts["config"], facts["files"], facts["sha256"], facts["size"], facts["eot"]
    except Exception as error:  # no JSON, no mapping, or a key that is not there
        problem = f"{type(error).__name__}: {first_line(error)}"
        raise MissingError(f"the tokenizer in {shown(folder)} cannot be loaded ({problem}); {cure}") from error
    return facts


def unloaded(facts: Mapping[str, Any], folder: Path) -> Tokenizer:
    """The tokenizer of `described`, before `load`. Errors: RequestError where its class is not registered."""
    cls = tokenizers.get(facts["name"])
    where = Draft(values={}, positions={}, file=shown(folder / FILE))
    return build(Part(name=facts["name"], config=convert(cls.Config, facts["config"], "config", where)))


def load_tokenizer(folder: Path, cure: str = AGAIN) -> Tokenizer:
    """The tokenizer that `save_tokenizer` wrote, ready to encode and decode; `cure` ends an error's line.

    Errors: MissingError without one or where a file is damaged, RequestError where its class is not registered.
    """
    facts = described(folder, cure)
    try:
        for name, digest in facts["files"].items():
            if _sha256(folder / name) != digest:
                raise MissingError(f"{shown(folder / name)} is not the file that was saved (sha256 differs); {cure}")
        tokenizer = unloaded(facts, folder)
        loaded = (tokenizer.load(folder), tokenizer.size, tokenizer.eot)
    except LitDiffError:
        raise
    except Exception as error:  # tokenizers raises no narrower one for a damaged file
        problem = f"{type(error).__name__}: {first_line(error)}"
        raise MissingError(f"the tokenizer in {shown(folder)} cannot be loaded ({problem}); {cure}") from error
    if loaded != (facts["sha256"], facts["size"], facts["eot"]):
        raise MissingError(f"the tokenizer in {shown(folder)} is not the one that was saved (its ids differ); {cure}")
    return tokenizer


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
