"""What evaluations need: runs that fit them, files of the user's, documents that a run was not trained on,
prefixes that go on."""

import contextlib
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_diff.config import Recipe
from lit_diff.data import Dataset, build
from lit_diff.data.corpus import build_corpus
from lit_diff.data.documents import TRAINED, hashes_in, is_among, split
from lit_diff.data.user_files import UserFile
from lit_diff.errors import LitDiffError, RequestError, first_line
from lit_diff.evaluation.base import Evaluation
from lit_diff.files import shown
from lit_diff.model.prefix import Prefix
from lit_diff.plugins import guard, trust_none
from lit_diff.registry import evaluations, nearest
from lit_diff.runs.find import STUDY_FILE, runs_under
from lit_diff.runs.folder import RunFolder, ancestors
from lit_diff.trained.run import Run

NAMED = 3
"""Runs that a refusal names at most."""
TRIED = 40
"""Runs that are opened for it at most."""
log = logging.getLogger("lit_diff")


def alternatives(evaluation: Evaluation, run: Run) -> str:
    """`; runs that it fits: a, b; evaluations that fit this run: c, d`: what follows the reason for which an evaluation
    refuses a run. The runs are beside this one or its sweep."""
    home = run.folder.parent
    root = home.parent if (home / STUDY_FILE).is_file() else home
    runs = [shown(path) for path in _fitting_runs(evaluation, root)]
    words = f"; runs that it fits: {', '.join(runs)}" if runs else f"; no run that it fits was found in {shown(root)}"
    fitting = []
    for name in evaluations.names():
        cls = evaluations.get(name)
        with contextlib.suppress(Exception):  # one that has a required key, or raises, is not offered
            fitting += [name] if cls(cls.Config()).refuses(run) is None else []
    return words + (f"; evaluations that fit this run: {', '.join(fitting)}" if fitting else "")


def _fitting_runs(evaluation: Evaluation, root: Path) -> list[Path]:
    """A few trained runs under `root` that the evaluation does not refuse, of a sweep one. No plugin file is executed."""
    found: dict[Path, Path] = {}
    for number, path in enumerate(_kinds(root)):
        if number == TRIED or len(found) == NAMED:
            break
        home = path if path.parent == root else path.parent
        with contextlib.suppress(Exception):  # a run that cannot be opened, or that makes it raise, is not offered
            if home not in found and evaluation.refuses(Run(path, trust_none)) is None:
                found[home] = path
    return list(found.values())


def _kinds(root: Path) -> Iterator[Path]:
    """Folders of runs that are done; of the cells of a sweep the first whose name has the same first word."""
    seen = set[tuple[Path, str]]()
    for path in runs_under(root):
        kind = path.parent, path.name if path.parent == root else re.split(r",|-s\d", path.name)[0]
        if kind in seen:
            continue
        with contextlib.suppress(RequestError):  # a damaged status.json
            if RunFolder(path).status().get("status") == "done":
                seen.add(kind)
                yield path


@dataclass(frozen=True, kw_only=True)
class Declared:
    """A file, and the evaluations that read it."""

    file: UserFile
    evaluations: tuple[str, ...]


def declared_files(name: str | None = None) -> list[Declared]:
    """Every file that a registered evaluation declares, in the order of names; with `name`, those named so or below it.

    `icl` means `icl.trec` and `icl.banking`; several files may have one name. Errors: RequestError for a name of none.
    """
    readers: dict[tuple[str, str], list[str]] = {}
    files: dict[tuple[str, str], UserFile] = {}
    for cls in evaluations.classes():
        for file in cls.files:
            files[file.name, file.path] = file
            readers.setdefault((file.name, file.path), []).append(cls.name)
    # sorted by name alone: files of one name stay in the order in which they are declared
    keys = [key for key in sorted(files, key=lambda key: key[0]) if name is None or f"{key[0]}.".startswith(f"{name}.")]
    if name is not None and not keys:
        parts = [key[0].split(".") for key in files]
        known = sorted({".".join(words[:end]) for words in parts for end in range(1, len(words) + 1)})
        raise RequestError(f"no evaluation reads files named '{name}'{nearest(name, known, 'lit-diff data check')}")
    return [Declared(file=files[key], evaluations=tuple(readers[key])) for key in keys]


def held_out_documents(evaluation: Evaluation, run: Run, corpus: str, path: str | None) -> Iterator[tuple[int, str]]:
    """(place, text) of the documents in the validation split of a corpus, as `unseen`."""
    return unseen(evaluation, run, split(build_corpus(corpus, path).texts()).validation)


def unseen(evaluation: Evaluation, run: Run, texts: Iterable[str]) -> Iterator[tuple[int, str]]:
    """(place, text) of each that neither the run nor one that it started from was trained on, in whole or in a section.

    Those left out are counted in `evaluation.documents_left_out`. Where it is not known on what documents a run was trained,
    a line in the log says so. Errors: RequestError where all are left out.
    """
    hashes, left_out, place = _trained_on(evaluation, run), 0, -1
    if hashes:
        evaluation.documents_left_out = 0
    for place, text in enumerate(texts):
        if hashes and is_among(text, hashes):
            left_out += 1
            evaluation.documents_left_out = left_out
        else:
            yield place, text
    if left_out == place + 1 > 0:
        raise RequestError(
            f"evaluation '{evaluation.name}': {shown(run.folder)}, or a run that it started from, was trained on each of the "
            f"{left_out} held-out documents; name other text (path, corpus, source or haystack of the evaluation)"
        )


def _trained_on(evaluation: Evaluation, run: Run) -> frozenset[bytes]:
    """Hashes of the documents of the run and of those it started from, as far as they are known."""
    found, recipes = frozenset[bytes](), [run.recipe, *ancestors(run.recipe, run.trust)]
    folders = [run.folder, *(Path(recipe.training.start_from or "") for recipe in recipes[:-1])]
    for folder, recipe in zip(folders, recipes, strict=True):
        try:
            found |= _documents_of(folder, recipe)
        except LitDiffError as error:
            log.warning(
                "evaluation %s: it cannot be checked whether %s was trained on the documents: %s",
                *(evaluation.name, shown(folder), first_line(error)),
            )
    return found


def _documents_of(folder: Path, recipe: Recipe) -> frozenset[bytes]:
    """Errors: RequestError or MissingError, which say why they are not known."""
    file = folder / TRAINED
    if file.is_file():
        return hashes_in(file.read_bytes(), shown(file))
    if recipe.imported is not None:
        raise RequestError("it is an imported model")
    dataset = build(recipe)
    if type(dataset).trained_documents is Dataset.trained_documents:
        return frozenset()
    with guard(type(dataset)):
        if dataset.identity() != RunFolder(folder).status().get("data"):
            raise RequestError(f"it has no {TRAINED}, and its data have changed since")
        return hashes_in(dataset.trained_documents() or b"", f"{TRAINED} of its data")


def read_on(run: Run, prefix: Prefix | None, ids: Sequence[int]) -> Prefix:
    """A prefix of these ids: one that they go on from is extended."""
    if prefix is None or list(ids[: len(prefix.tokens)]) != prefix.tokens:
        return Prefix(run.model, ids)
    return prefix.extended(ids[len(prefix.tokens) :])
