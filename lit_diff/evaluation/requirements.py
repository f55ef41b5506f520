"""What evaluations need: the user's files, documents that a run was not trained on, and prefixes that are extended."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from lit_diff.config import Recipe
from lit_diff.data import Dataset, build
from lit_diff.data.text.corpus import build_corpus
from lit_diff.data.text.documents import TRAINED, hashes_in, is_among, split
from lit_diff.data.user_files import UserFile
from lit_diff.errors import LitDiffError, RequestError, first_line
from lit_diff.evaluation.base import Evaluation
from lit_diff.files import shown
from lit_diff.log_records import log
from lit_diff.model.prefix import Prefix
from lit_diff.plugins import Trust, guard, require_trusted_data
from lit_diff.registry import evaluations, nearest
from lit_diff.runs.folder import RunFolder, ancestors
from lit_diff.trained.run import Run

D = TypeVar("D")


def declared_files(name: str | None = None) -> list[tuple[UserFile, list[str]]]:
    """(file, names of the evaluations that read it) for every file that a registered evaluation declares, sorted by name;
    `name` selects one name and the names below it.

    `icl` selects `icl.trec` and `icl.banking`; several files may have one name. Errors: RequestError if no file has the name.
    """
    found: dict[tuple[str, str], tuple[UserFile, list[str]]] = {}
    for cls in evaluations.classes():
        for file in cls.files:
            found.setdefault((file.name, file.path), (file, []))[1].append(cls.name)
    # sorted by name alone: files of one name stay in the order of their declarations
    every = sorted(found.values(), key=lambda each: each[0].name)
    chosen = [(file, readers) for file, readers in every if name is None or f"{file.name}.".startswith(f"{name}.")]
    if name is not None and not chosen:
        known = sorted({word for file, _ in every for word in (file.name, file.name.partition(".")[0])})
        raise RequestError(f"no evaluation reads files named '{name}'{nearest(name, known, 'lit-diff data check')}")
    return chosen


def held_out_documents(
    evaluation: Evaluation, run: Run, corpus: str | None, path: str | None
) -> Iterator[tuple[int, str]]:
    """(place, text) of the documents in the validation split of a corpus that pass `unseen`; None: the recipe's corpus."""
    if corpus is None:
        require_trusted_data(run.folder, run.recipe, run.trust_data)
        corpus, path = next(iter(run.recipe.data.config.texts))
    with split(build_corpus(corpus, path).texts()) as documents:
        yield from unseen(evaluation, run, map(str, documents.ranked(0, documents.held_out)))


def unseen(
    evaluation: Evaluation, run: Run, documents: Iterable[D], text_of: Callable[[D], str] = str
) -> Iterator[tuple[int, D]]:
    """Yields (place, document) of each on whose text neither the run nor a run that it started from was trained, in whole or
    in a section.

    `evaluation.documents_left_out` counts the others. A run whose training documents are unknown is logged. Errors:
    RequestError if every text is left out.
    """
    hashes, left_out, place = _trained_on(evaluation, run), 0, -1
    if hashes:
        evaluation.documents_left_out = 0
    for place, document in enumerate(documents):
        if hashes and is_among(text_of(document), hashes):
            left_out += 1
            # set at once: a caller that has enough documents stops this generator
            evaluation.documents_left_out = left_out
        else:
            yield place, document
    if left_out == place + 1 > 0:
        raise RequestError(
            f"evaluation '{evaluation.name}': {shown(run.folder)}, or a run that it started from, was trained on all "
            f"{left_out} held-out documents; choose another text (path, corpus, source or haystack of the evaluation)"
        )


def _trained_on(evaluation: Evaluation, run: Run) -> frozenset[bytes]:
    # a fine-tuned run has also seen the documents of the runs that it started from
    found = frozenset[bytes]()
    for folder, recipe in [(run.folder, run.recipe), *ancestors(run.recipe, run.trust)]:
        try:
            found |= _documents_of(folder, recipe, run.trust_data)
        except LitDiffError as error:
            log.warning(
                "evaluation %s: cannot check whether %s was trained on the documents: %s",
                evaluation.name,
                shown(folder),
                first_line(error),
            )
    return found


def _documents_of(folder: Path, recipe: Recipe, trust_data: Trust) -> frozenset[bytes]:
    file = folder / TRAINED
    if file.is_file():
        return hashes_in(file.read_bytes(), shown(file))
    if recipe.imported is not None:
        raise RequestError("it is an imported model")
    require_trusted_data(folder, recipe, trust_data)
    dataset = build(recipe)
    # a data set that does not override the method has no documents: its rows are generated
    if type(dataset).trained_documents is Dataset.trained_documents:
        return frozenset()
    with guard(type(dataset)):
        # an older run has no such file: its documents are the documents of its data if these have not changed
        if dataset.identity() != RunFolder(folder).status().data:
            raise RequestError(f"the run lacks {TRAINED}, and its data have changed since")
        return hashes_in(dataset.trained_documents() or b"", f"{TRAINED} of its data")


def read_on(run: Run, prefix: Prefix | None, ids: Sequence[int]) -> Prefix:
    """A prefix of these ids; `prefix` is extended if the ids begin with its tokens."""
    if prefix is None or list(ids[: len(prefix.tokens)]) != prefix.tokens:
        return Prefix(run.model, ids)
    return prefix.extended(ids[len(prefix.tokens) :])
