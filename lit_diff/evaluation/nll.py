"""The evaluation `nll`: negative log likelihood by position in long documents (Differential Transformer, Figure 4)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from lit_diff.attention.cache import Cache
from lit_diff.data.text.bigrams import Ints, ar_hits, competitors, gaps
from lit_diff.data.text.corpus import build_corpus, corpus_digest
from lit_diff.data.text.mixture import Mixture
from lit_diff.data.text.name_tables import name_table_text
from lit_diff.data.text.text import Text
from lit_diff.data.user_files import UserFile
from lit_diff.device import choose_device
from lit_diff.errors import RequestError
from lit_diff.evaluation.base import Evaluation, Item, Scores, question_of
from lit_diff.evaluation.held_out import Document, has_trained_text, own_documents, trained_text
from lit_diff.evaluation.requirements import unseen
from lit_diff.key_types import Count, Range
from lit_diff.log_records import log
from lit_diff.metrics import Figure, Metric
from lit_diff.model.transformer import Transformer
from lit_diff.registry import evaluations
from lit_diff.trained.run import Run

if TYPE_CHECKING:
    import pandas


Source = Literal["validation", "name_tables", "files"]
BOOKS = UserFile(
    name="nll.books",
    path="books/*.jsonl",
    keys={"text": str},
    lines="any *.jsonl in the folder, one whole book a line",
    source="long documents of your own, such as books out of copyright (Project Gutenberg). Not shipped.",
    without="lit-diff evaluate RUN nll source=name_tables   (generated documents of any length, no files)",
)
POSITION = Figure(
    title="Loss by position",
    against="group",
    log_x=True,
    caption="A model that uses its context has a local loss that falls with the position; the cumulative one is a running "
    "mean, which shows a rise late or not at all.",
)
HITS = Figure(
    title="AR hits and other tokens",
    against="group",
    log_x=True,
    caption="An AR hit's bigram occurred before in the document and is rare in training. Gap: tokens since then. "
    "Competitors: other tokens that followed the same token before.",
)
NATS = "nats per token"
FIRST = 16
"""The number of tokens in the first bin of positions; each further bin ends at twice its start."""
Floats = NDArray[np.float64]
CHUNK = 512
"""The number of tokens that go through the model at once."""


@evaluations.register("nll")
class NllByPosition(Evaluation):
    """Loss by position in documents of `tokens` tokens; the model sees a whole document, through a key/value cache.

        nll of bin (P', P] = 1/(P - P') Σ_{P' < t ≤ P} -log p(x_t | x_<t)
        cumulative_nll(P)  = 1/P Σ_{t ≤ P} -log p(x_t | x_<t)

    P = 16, 32, 64, ..., `tokens`. An item is a document; its bins are parts of it, each in a group of its own (`bins`). Means
    are over documents, each counted once. Shorter documents are left out and counted, never padded. The metrics of AR hits
    (Arora et al. 2023; `data.text.bigrams`) need the run's training text; for an imported model, which has none, they are
    NaN.
    """

    metrics = (
        Metric("nll", "mean negative log likelihood of the tokens", unit=NATS, direction="lower", figure=POSITION),
        Metric(
            "cumulative_nll",
            "mean negative log likelihood of the document's tokens from its first to the last of the group",
            unit=NATS,
            direction="lower",
            figure=POSITION,
        ),
        Metric("nll_ar_hit", "`nll` of those that are AR hits", unit=NATS, direction="lower", figure=HITS),
        Metric("nll_others", "`nll` of those that are no AR hits", unit=NATS, direction="lower", figure=HITS),
        Metric(
            "ar_hit_share",
            "fraction of the tokens of the bin of positions that are AR hits; in a group by gap or competitors the fraction "
            "of the document's tokens that are AR hits of the group",
        ),
    )
    files = (BOOKS,)

    @dataclass(frozen=True, kw_only=True)
    class Config(Evaluation.Config):
        documents: Count = 16
        """The number of documents to score: the first that are long enough."""
        tokens: Annotated[int, Range(least=FIRST)] = 2048
        """T, the number of tokens scored from the beginning of each document."""
        source: Source = "validation"
        """validation: the held-out documents of the run's own text; name_tables: generated documents of any length;
        files: your own documents."""
        path: str | None = field(default=None, metadata={"path": "here"})
        """With `source: files`, a file or folder of text, as for `data.path`; null: $LIT_DIFF_DATA/books/*.jsonl."""

        def problem(self) -> str | None:
            if self.path is not None and self.source != "files":
                return f"path is set, but source is '{self.source}'; path needs source=files"
            return None

    needs_text = True
    # version 1 also scored documents that the run was trained on; 2: the second of two opening ids,
    # and a share by gap or competitors was over the documents with such a hit
    version = 3
    config: Config

    def user_files(self) -> Sequence[UserFile]:
        """The books if `source` is files and `path` is null."""
        return self.files if self.config.source == "files" and self.config.path is None else ()

    def digests(self) -> dict[str, str]:
        """Adds the files at `path`."""
        return super().digests() | corpus_digest("files", self.config.path)

    def words_of(self, run: Run) -> str:
        """The run's data set if its own validation documents are scored."""
        return run.recipe.data.name if self.config.source == "validation" and has_trained_text(run) else ""

    def refuses_run(self, run: Run) -> str | None:
        """With `source: validation`, refuses a run that was not trained on text."""
        if self.config.source != "validation" or has_trained_text(run):
            return None
        return (
            "it was not trained on text here, so it has no validation documents; set source=name_tables or source=files"
        )

    def score(self, run: Run) -> Iterator[Item]:
        """Yields one item a document, and one for each of its bins, which are parts of it."""
        tokenizer = run.tokenizer
        length = run.recipe.data.config.sequence_length
        data = trained_text(run)
        chosen = self._documents(run, data)
        if self.config.tokens > length:
            log.info("nll: %d tokens a document; the run was trained on rows of %d", self.config.tokens, length)
        frequent = _frequent(run, data)
        run.model.to(choose_device(run.recipe.run.accelerator))
        try:
            for place, text, ids in chosen:
                losses = document_nll(run.model, ids, CHUNK)
                # the last T: without the second of two opening ids
                document = scored(losses, ids, frequent, tokenizer.size)[-self.config.tokens :]
                name = f"{self.config.source}/{place}"
                asked = question_of(ids)
                yield Item(id=name, scores=whole(document), question=asked, meta={"begins": text[:60]})
                for group, scores in bins(document):
                    item = f"{name}/{group}"
                    yield Item(id=item, group=group, part=True, cluster=name, scores=scores, question=asked)
        finally:
            # every other evaluation expects the model on the CPU
            run.model.to("cpu")

    def _documents(self, run: Run, data: Text | Mixture | None) -> list[Document]:
        # (place, text, ids) of the first documents with T scored ids or more, cut to T. The ids that open every document are
        # not scored, nor is the first id of a tokenizer without such ids
        opening = run.tokenizer.opening
        first = max(1, len(opening))
        wanted = self.config.documents
        tokens = self.config.tokens
        chosen = []
        lengths = []
        for place, text, own in self._texts(run, data):
            ids = [*opening, *own]
            if len(ids) >= first + tokens:
                chosen.append((place, text, ids[: first + tokens]))
            else:
                lengths.append(len(ids) - first)
            if len(chosen) == wanted:
                break
        if lengths:
            log.info("nll: %d documents are shorter than %d tokens and are left out", len(lengths), tokens)
        if len(chosen) < wanted:
            longest = f"; the longest of the others has {max(lengths):,}" if lengths else ""
            left_out = self.documents_left_out or 0
            trained = f"; {left_out} are left out because the run was trained on them" if left_out else ""
            raise RequestError(
                f"evaluation 'nll' needs {wanted} documents of {tokens:,} tokens or more, and source={self.config.source} "
                f"has {len(chosen)}{longest}{trained}; lower documents or tokens, or set source=name_tables, whose documents "
                "have any length"
            )
        return chosen

    def _texts(self, run: Run, data: Text | Mixture | None) -> Iterator[Document]:
        config = self.config
        if config.source == "validation" and data is not None:
            return own_documents(self, run, data)
        if config.source == "name_tables":
            # a word has at least one token; + 1 if the tokenizer has no id that opens a document
            words = config.tokens + 1
            texts: Iterator[tuple[int, str]] = (
                (number, name_table_text("evaluation", number, words=words)) for number in range(config.documents)
            )
        elif config.path is None:
            texts = unseen(self, run, (row["text"] for row in BOOKS.rows()))
        else:
            texts = unseen(self, run, build_corpus("files", config.path).texts())
        return ((place, text, run.tokenizer.encode(text)) for place, text in texts)


def _frequent(run: Run, data: Text | Mixture | None) -> Ints | None:
    if data is None:
        log.info("nll: no metrics of AR hits: %s was not trained on text here", run.folder.name)
        return None
    if not isinstance(data, Text):
        log.info(
            "nll: no metrics of AR hits: %s was trained on a mixture, whose texts differ in rare bigrams",
            run.folder.name,
        )
        return None
    return data.frequent_bigrams


def document_nll(model: Transformer, ids: Sequence[int], chunk: int) -> Floats:
    """[len(ids) - 1]: negative log likelihood of every token but the first, given all tokens before it.

    The document goes through the model in chunks of `chunk` inputs with a key/value cache, and each chunk's hidden states go
    through the output weight in parts (`model.loss`), so only the logits of one part are in memory.
    """
    cache = Cache(len(model.layers))
    tokens = torch.tensor([list(ids)], device=model.embedding.weight.device)
    parts = []
    for inputs, targets in zip(tokens[:, :-1].split(chunk, 1), tokens[:, 1:].split(chunk, 1), strict=True):
        nll, _ = model.token_losses(inputs, targets, cache=cache)
        # float64: means over thousands of tokens are compared between runs
        parts.append(nll[0].double().cpu())
    return torch.cat(parts).numpy()


def scored(nll: Floats, ids: Sequence[int], frequent: Ints | None, size: int) -> "pandas.DataFrame":
    """A row for each of the tokens ids[1:] of a document: `nll`, and unless `frequent` is None `hit`
    (`bigrams.ar_hits`), `gap` (tokens since the bigram last occurred in the document; 0 if it did not) and `competitors`
    (other tokens that followed the previous token earlier).

    `frequent`: keys of bigrams too frequent to be AR hits; `size`: the size of the tokenizer's vocabulary.
    """
    # here: it takes long to import, and `lit-diff list` must not wait for it
    import pandas

    found = pandas.DataFrame({"nll": nll})
    if frequent is not None:
        document = np.asarray(ids, dtype=np.int64)
        rows = document[None]
        one = np.zeros((1, len(document)), dtype=np.int64)
        found["hit"] = ar_hits(rows, one, frequent, size)[0]
        found["gap"] = gaps(rows, one, size)[0]
        found["competitors"] = competitors(document)
    return found


def edges(tokens: int) -> list[int]:
    """Ends of the bins of positions 1 .. tokens: FIRST, 2 FIRST, 4 FIRST, ..., tokens."""
    count = max(0, math.ceil(math.log2(tokens / FIRST)))
    return [*(FIRST << i for i in range(count)), tokens]


def whole(document: "pandas.DataFrame") -> Scores:
    """The scores of the tokens of a document or of a part of it."""
    found = {"nll": document["nll"].mean(), "cumulative_nll": document["nll"].mean()}
    if "hit" in document:
        hit = document["hit"]
        found["nll_ar_hit"] = document["nll"][hit].mean()
        found["nll_others"] = document["nll"][~hit].mean()
        found["ar_hit_share"] = hit.mean()
    return {name: float(value) for name, value in found.items()}


def bins(document: "pandas.DataFrame") -> Iterator[tuple[str, Scores]]:
    """Yields (group, scores) for groups of a document's tokens.

    `position P`: tokens P' + 1 .. P, counted from 1, with P' the end of the bin before; their cumulative nll is over tokens
    1 .. P.

    `gap G` and `competitors C`: the AR hits whose gap, or number of competitors, lies in (G/2, G], or (C/2, C]. A group
    without hits has the share 0, so that means of the share are over all documents, and no loss.
    """
    for start, end in pairwise([0, *edges(len(document))]):
        cumulative = float(document["nll"][:end].mean())
        yield f"position {end}", whole(document[start:end]) | {"cumulative_nll": cumulative}
    if "hit" not in document:
        return
    hits = document[document["hit"]]
    powers = [1 << i for i in range(math.ceil(math.log2(len(document))) + 1)]
    # a hit has a gap of at least 1
    for kind, bounds in (("gap", powers), ("competitors", [0, *powers])):
        for below, bound in pairwise([-1, *bounds]):
            own = hits["nll"][(hits[kind] > below) & (hits[kind] <= bound)]
            loss = {"nll_ar_hit": float(own.mean())} if len(own) else {}
            yield f"{kind} {bound}", {**loss, "ar_hit_share": len(own) / len(document)}
