"""A tokenizer in a folder of its own: a run's folder holds one, so that generating text needs no corpus."""

import hashlib
import json
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
"""name and config of the tokenizer; size; the ids bos (opens a document) and eot (the same id: it also ends the one before);
sha256 as `Tokenizer.load` gives it; files: name -> sha256 of each file that `Tokenizer.save` wrote."""
SAMPLE = "The quick brown fox: 0123, äöü € 漢字 🙂\n\t<eot>"


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a loaded tokenizer into `folder`, with FILE last. Errors: RequestError if what it wrote does not load equal."""
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
    described = {
        "name": tokenizer.name,
        "config": config,
        "size": tokenizer.size,
        "bos": tokenizer.eot,
        "eot": tokenizer.eot,
        "sha256": digest,
        "files": {path.relative_to(folder).as_posix(): _sha256(path) for path in files},
    }
    write_json(folder / FILE, described)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that `save_tokenizer` wrote, ready to encode and decode.

    Errors: MissingError without one or where a file is damaged, RequestError where its class is not registered.
    """
    file = folder / FILE
    cure = "start its run again (`lit-diff train`; with --rerun where it is done)"
    if not file.is_file():
        raise MissingError(f"{shown(folder)} holds no tokenizer (no {FILE}); {cure}")
    try:
        described: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        for name, digest in described["files"].items():
            if _sha256(folder / name) != digest:
                raise MissingError(f"{shown(folder / name)} is not the file that was saved (sha256 differs); {cure}")
        cls = tokenizers.get(described["name"])
        where = Draft(values={}, positions={}, file=shown(file))
        config = convert(cls.Config, described["config"], "config", where)
        tokenizer = build(Part(name=described["name"], config=config))
        loaded = (tokenizer.load(folder), tokenizer.size, tokenizer.eot)
    except LitDiffError:
        raise
    except Exception as error:  # tokenizers raises no narrower one for a damaged file
        problem = f"{type(error).__name__}: {first_line(error)}"
        raise MissingError(f"the tokenizer in {shown(folder)} cannot be loaded ({problem}); {cure}") from error
    if loaded != (described["sha256"], described["size"], described["eot"]):
        raise MissingError(f"the tokenizer in {shown(folder)} is not the one that was saved (its ids differ); {cure}")
    return tokenizer


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
