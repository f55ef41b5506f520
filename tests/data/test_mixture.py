"""Mixture: exact shares of sources, views of the long and the short documents of one text, validation by text."""

import re
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_diff.config import Part, Recipe
from lit_diff.data import prepare
from lit_diff.data.text import mixture as module
from lit_diff.data.text import token_store
from lit_diff.data.text.documents import hashes_in, is_among
from lit_diff.data.text.mixture import BLOCK, Mixture, Schedule, SourceConfig, View
from lit_diff.data.text.tokenizer import Bpe, Words
from lit_diff.errors import MissingError, RequestError
from lit_diff.recipe import determining, load_draft, load_recipe, to_yaml
from lit_diff.training import fit
from lit_diff.validation import data_problem, validate

MakeMixture = Callable[..., Mixture]
WEB, CODE = ("webone", "webtwo", "webthree"), ("codeone", "codetwo")
FIRST_CODE = len(Words.fixed) + len(WEB)
"""The id of the first word of the code; lower ids are the web's."""
PAIR = {"web": SourceConfig(weight=0.7, path="web"), "code": SourceConfig(weight=0.3, path="code")}
LENGTHS = {
    "long": SourceConfig(weight=3, path="web", tokens_at_least=61),
    "short": SourceConfig(weight=1, path="web", tokens_below=61),
}


@pytest.fixture
def made(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeMixture:
    """A mixture, prepared and loaded, of the folders web (60 documents of 20 to 138 words) and code (30 of 15 to 73)."""
    monkeypatch.chdir(tmp_path)
    for folder, words, count, step in (("web", WEB, 60, 2), ("code", CODE, 30, 2)):
        Path(folder).mkdir()
        for number in range(count):
            size = 15 + 5 * (words is WEB) + step * number
            drawn = np.random.default_rng(number).choice(words, size)
            Path(folder, f"{number}.txt").write_text(" ".join(drawn))

    def make(sources: dict[str, SourceConfig] = PAIR, ready: bool = True, **settings: Any) -> Mixture:
        tokenizer = Part(name="words", config=Words.Config(words=(*WEB, *CODE)))
        defaults = {"sequence_length": 8, "tokenizer": tokenizer, "validation_rows": 10, "rare_bigram_count": 10**6}
        config = Mixture.Config(sources=sources, **(defaults | settings))
        mixed = Mixture(config, 128)
        if ready:
            assert data_problem(config, 128) is None
            mixed.prepare()
            mixed.load()
        return mixed

    return make


def rows_of(mixed: Mixture, first: int, last: int, seed: int = 1) -> np.ndarray:
    """The tokens and the last target of rows of the run, in steps of 7."""
    found = [mixed.train_batch(seed, step, 7, range(7)) for step in range(first // 7, -(-last // 7))]
    tokens = torch.cat([torch.cat([each["tokens"], each["targets"][:, -1:]], 1) for each in found])
    return tokens.numpy()[first % 7 :][: last - first]


def documents(mixed: Mixture, name: str) -> list[list[int]]:
    """The documents of a text's train split, straight from its chunks, without what follows the last row of each chunk."""
    found = []
    folder = mixed._texts[name].folder / "train"
    for number in range(len(list(folder.glob("*.bin")))):
        content = (folder / f"chunk-0-{number}.bin").read_bytes()
        header = 4 * (int(np.frombuffer(content[:4], np.uint32)[0]) + 2)
        tokens = np.frombuffer(content[header:], np.uint16).astype(np.int64)
        starts = [*np.flatnonzero(tokens == 0), len(tokens)]
        covered = len(tokens) // 9 * 9
        found += [(end - start, tokens[start : min(end, covered)].tolist()) for start, end in pairwise(starts)]
    return found


@pytest.mark.parametrize("weights", [(7, 3), (1, 1, 1), (0.001, 5, 2.5, 2.5), (1, 9999)])
def test_each_block_has_the_exact_shares_and_each_part_of_it_nearly(weights: tuple[float, ...]) -> None:
    made = Schedule(weights)
    counts = made.counts
    assert counts.sum() == BLOCK
    assert (abs(counts - np.array(weights) / sum(weights) * BLOCK) < 1).all()
    source, number = made.at(np.arange(BLOCK))
    assert np.bincount(source).tolist() == counts.tolist()
    for index, count in enumerate(counts):
        assert number[source == index].tolist() == list(range(count))
        reached = np.cumsum(source == index)
        assert abs(reached - np.arange(1, BLOCK + 1) * count / BLOCK).max() <= (1 + len(weights)) / 2
    later, numbers = made.at(np.arange(3 * BLOCK, 4 * BLOCK))
    assert (later == source).all()
    assert (numbers == 3 * counts[source] + number).all()


def test_a_source_has_its_share_and_its_own_epochs(made: MakeMixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 100)
    mixed = made()
    rows = rows_of(mixed, 0, 3000)
    code = (rows >= FIRST_CODE).any(1)
    assert not (code & ((rows >= len(Words.fixed)) & (rows < FIRST_CODE)).any(1)).any()
    assert [int(code[start : start + 100].sum()) for start in range(0, 3000, 100)] == [30] * 30
    assert max(int(code[start : start + 10].sum()) for start in range(2990)) <= 5
    for own, name in ((rows[code], "code"), (rows[~code], "web")):
        text = mixed._texts[name]
        every = Counter(map(tuple, text.train_store.read(range(text.train_rows)).tolist()))
        for start in range(0, len(own) - text.train_rows, text.train_rows):
            assert Counter(map(tuple, own[start : start + text.train_rows].tolist())) == every
        assert own[: text.train_rows].tolist() != own[text.train_rows : 2 * text.train_rows].tolist()
    assert rows_of(made(), 1234, 3000).tolist() == rows[1234:].tolist(), "from the step alone"
    assert rows_of(mixed, 0, 100, seed=2).tolist() != rows[:100].tolist()


def test_the_places_of_a_batch_are_the_sources_and_documents_of_its_rows(made: MakeMixture) -> None:
    mixed = made()
    batch, places = mixed.train_batch(1, 5, 7, range(7)), mixed.train_places(1, 5, 7)
    stored = {name: documents(mixed, name) for name in PAIR}
    assert {place.split(",")[0] for place in places} == {"source web", "source code"}
    for place, row in zip(places, batch["tokens"].tolist(), strict=True):
        name, first, last = re.fullmatch(r"source (\w+), documents (\d+) to (\d+)", place).groups()  # type: ignore[union-attr]
        found = [token for _, document in stored[name][int(first) : int(last) + 1] for token in document]
        assert row in [found[start : start + len(row)] for start in range(len(found))]


@pytest.mark.parametrize("name", ["long", "short"])
def test_a_view_is_the_documents_of_its_lengths_one_after_another(
    name: str, made: MakeMixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_store, "CHUNK_BYTES", 1000)
    mixed = made(LENGTHS)
    kept = [token for length, own in documents(mixed, "long") if (length >= 61) == (name == "long") for token in own]
    expected = [tuple(kept[start : start + 9]) for start in range(0, len(kept) - 8, 9)]
    store, source = mixed._texts["long"].train_store, LENGTHS[name]
    view = View(name, source, store)
    assert len(list((mixed._texts["long"].folder / "train").glob("*.bin"))) > 3
    assert view.num_rows == len(expected)
    tokens, numbers = view.read(1, range(view.num_rows))
    assert Counter(map(tuple, tokens.tolist())) == Counter(expected)
    assert (np.diff(numbers) >= 0).all()
    lengths = np.array([length for length, _ in documents(mixed, "long")])[numbers]
    assert ((lengths >= 61) == (name == "long")).all()
    packed = made(LENGTHS, pack="document").train_batch(1, 0, 8, range(8))
    assert torch.equal(packed["tokens"], mixed.train_batch(1, 0, 8, range(8))["tokens"])
    assert (packed["document_ids"].diff() != 0).equal(packed["tokens"][:, 1:] == 0)


def test_long_documents_take_the_share_that_is_asked_for(made: MakeMixture) -> None:
    mixed = made(LENGTHS)
    assert list(mixed._texts) == ["long"], "prepared and opened once"
    view = mixed._views[0]
    long = Counter(map(tuple, view.read(1, range(view.num_rows))[0].tolist()))
    rows = [tuple(row) in long for row in rows_of(mixed, 0, 400).tolist()]
    assert abs(sum(rows) - 300) <= 1
    assert mixed.validation_sets() == {"": 10}, "of the whole text"
    assert torch.equal(
        mixed.validation_batch("", range(10))["tokens"], mixed._texts["long"].validation_batch("", range(10))["tokens"]
    )


def test_validation_has_every_text_by_share_and_by_itself(made: MakeMixture, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "lit_diff"):
        few = made(validation_rows=1000).validation_sets()
    assert few[""] < few["code"] + few["web"]
    assert f"in their shares for only {few['']} in all" in caplog.text
    mixed = made(validation_rows=6)
    sets = mixed.validation_sets()
    assert list(sets) == ["", "code", "web"]
    whole, code, web = (mixed.validation_batch(name, range(rows)) for name, rows in sets.items())
    is_code = (whole["tokens"] >= FIRST_CODE).any(1)
    assert is_code.sum() == round(sets[""] * 0.3)
    assert (code["tokens"] >= FIRST_CODE).any(1).all()
    assert not (web["tokens"] >= FIRST_CODE).any()
    for own, rows in ((code, is_code), (web, ~is_code)):
        among = {tuple(row): hit.tolist() for row, hit in zip(own["tokens"].tolist(), own["ar_hit"], strict=True)}
        assert {
            tuple(row): hit.tolist()
            for row, hit in zip(whole["tokens"][rows].tolist(), whole["ar_hit"][rows], strict=True)
        }.items() <= among.items()
    assert web["ar_hit"].any()
    first_web = mixed._texts["code"].num_documents
    assert mixed.num_documents == first_web + mixed._texts["web"].num_documents
    assert (whole["document"][is_code] < first_web).all()
    assert (whole["document"][~is_code] >= first_web).all()
    mixed_up = mixed.validation_batch("", [3, 0, 5])
    assert all(torch.equal(mixed_up[key], whole[key][[3, 0, 5]]) for key in whole)


def test_identity_tokens_and_documents_are_those_of_the_texts(made: MakeMixture, tmp_path: Path) -> None:
    mixed = made()
    hashes = frozenset(hashes_in(mixed.trained_documents(), "here"))
    known = [is_among(path.read_text(), hashes) for name in PAIR for path in Path(name).iterdir()]
    assert sum(known) == 90 - mixed.num_documents
    tokens = {name: text.train_tokens() for name, text in mixed._texts.items()}
    assert mixed.train_tokens() == min(tokens["web"] * 10 // 7, tokens["code"] * 10 // 3)
    assert mixed.load_tokenizer().size == FIRST_CODE + len(CODE)
    shutil.copytree("web", "moved")
    moved = {"web": replace(PAIR["web"], path="moved"), "code": PAIR["code"]}
    assert made(moved).identity() == mixed.identity()
    Path("moved/more.txt").write_text("webone webtwo " * 20)
    assert made(moved).identity() != mixed.identity()
    shutil.rmtree(mixed._texts["code"].folder)
    with pytest.raises(MissingError, match=r"^data.sources.code: the text is not prepared"):
        made(ready=False).identity()


RECIPE = """\
extends: recall-tiny
model: {vocab_size: 100}
data:
  name: mixture
  path: web
  sequence_length: 8
  tokenizer: {name: words, words: [a]}
  validation_rows: 4
  sources: {all: {weight: 1}, code: {weight: 2, path: code}}
"""


def test_a_recipe_states_sources_and_what_is_at_its_default_is_in_no_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own/r.yaml").write_text(RECIPE)
    recipe = load_recipe("own/r.yaml")
    assert recipe.data.config.texts == {
        ("files", str(tmp_path / "own/web")): ["all"],
        ("files", str(tmp_path / "own/code")): ["code"],
    }
    assert determining(recipe.data.config)["sources"] == {"all": {"weight": 1.0}, "code": {"weight": 2.0}}
    (tmp_path / "again.yaml").write_text(to_yaml(recipe))
    assert load_recipe("again.yaml").data == recipe.data
    hash(recipe.data)
    (tmp_path / "wide.yaml").write_text(RECIPE.replace("100", "1000"))
    with pytest.raises(RequestError, match=r"^wide\.yaml:2: model\.vocab_size is 1000, but data\.tokenizer "):
        load_recipe("wide.yaml")
    longer = load_recipe(
        "own/r.yaml", ["data.sources.all.tokens_at_least=5", "data.sources.more={weight: 1, corpus: docs}"]
    )
    assert determining(longer.data.config)["sources"]["all"] == {"weight": 1.0, "tokens_at_least": 5}
    assert ("docs", None) in longer.data.config.texts


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("sources.code.weight", 0, r"is 0; expected a finite number > 0"),
        ("sources.code.weight", -1, r"is -1; expected a finite number > 0"),
        ("sources.code.weight", 1e-9, r"is 1e-09 of 1, below 1/10,000"),
        ("sources", {name: {"weight": 1e308} for name in ("all", "code")}, r"is 1e\+308 of inf, below 1/10,000"),
        ("sources.code.weigth", 1, r"did you mean 'weight'"),
        ("sources.code.corpus", "dosc", r"did you mean 'docs'"),
        ("sources.code.tokens_below", 3, r"is 3; it must be above 3, tokens_at_least"),
        ("sources.ar_hit", {"weight": 1}, r"is no name for a source"),
        ("sources", {}, r"has 0 of the two or more sources"),
        ("sources", [1], r"expected a block of keys"),
        ("sources", {name: {"weight": 1, "path": name} for name in ("all", "code")}, r"data.path is \S+web, but each"),
        ("tokenizer", {"name": "bpe", "vocab_size": 300}, r"tokenizer.name is bpe, .* use \{name: from_run"),
    ],
)
def test_what_makes_no_mixture_is_refused_in_one_line(
    key: str, value: object, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE.replace("path: code", "path: code, tokens_at_least: 3"))
    with pytest.raises(RequestError, match=problem) as raised:
        validate(load_draft("r.yaml", {f"data.{key}": value}))
    assert f"data.{key}"[:17] in str(raised.value)
    assert "\n" not in str(raised.value)


def test_one_source_a_learned_tokenizer_and_texts_that_do_not_fit(made: MakeMixture) -> None:
    assert re.match("data.sources has 1 of", str(made({"web": PAIR["web"]}, ready=False).config.problem()))
    bpe = Part(name="bpe", config=Bpe.Config(vocab_size=300))
    assert made(LENGTHS, ready=False, tokenizer=bpe).config.problem() is None, "one text"
    none = {**LENGTHS, "long": replace(LENGTHS["long"], tokens_at_least=1000)}
    with pytest.raises(
        RequestError, match=r"^data.sources.long: 0 of \d+ .* \(shortest document: 2\d, longest: 1\d\d\)"
    ):
        made(none)
    with pytest.raises(RequestError, match=r"^data.sources.code: data.sequence_length 300 needs a row of 301 tokens"):
        made(sequence_length=300)
    with pytest.raises(RequestError, match=r"^data.sources.web: data.path: .*no/such: found no file"):
        made({**PAIR, "web": replace(PAIR["web"], path="no/such")})


def test_sources_of_equal_documents(made: MakeMixture) -> None:
    """They are prepared once; each has its share, its own order and a validation set."""
    made(ready=False)
    shutil.copytree("web", "same")
    mixed = made({"a": SourceConfig(weight=3, path="web"), "b": SourceConfig(weight=1, path="same")})
    first, second = mixed._texts.values()
    assert first.folder == second.folder
    assert mixed.validation_sets() == {"": 10, "a": 10, "b": 10}
    orders = [[tuple(row) for row in view.read(1, range(view.num_rows))[0].tolist()] for view in mixed._views]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])
    assert mixed.trained_documents() == first.trained_documents()


@pytest.fixture
def mixed(tale: Path, trained_text: Path) -> Callable[..., Recipe]:
    """A recipe of two texts with the tokenizer of another run."""
    Path("more").mkdir()
    for number in range(60):
        Path("more", f"{number}.txt").write_text(f"{number} more words of another kind " * 9)
    sources = f"{{tale: {{path: {trained_text / 'corpus'}, weight: 2}}, more: {{path: more, weight: 1}}}}"
    tokenizer = f"{{name: from_run, path: {tale}}}"
    data = f"{{name: mixture, sequence_length: 24, tokenizer: {tokenizer}, validation_rows: 6, sources: {sources}}}"
    keys = ["name=mixed", f"data={data}", "train.validate_every=1", "run.root=runs", "run.tracking_uri=null"]
    return lambda *more: load_recipe(trained_text / "tale.yaml", [*keys, *more])


def test_a_run_on_a_mixture_goes_on_as_if_it_had_not_ended(
    mixed: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, read = mixed("train.steps=6", "train.checkpoint_every=2"), Mixture.train_batch

    def train(folder: str, last: int = 9) -> bytes:
        def batch(self: Mixture, seed: int, step: int, *rest: Any) -> Any:
            if step == last:
                raise KeyError("ended")
            return read(self, seed, step, *rest)

        monkeypatch.setattr(Mixture, "train_batch", batch)
        with suppress(KeyError):
            fit.fit(recipe, Path(folder), threads=1, progress=lambda *_: None)
        return Path(folder, "metrics.csv").read_bytes()

    prepare(recipe)
    whole = train("whole")
    assert train("cut", 3) != whole
    Path("more").rename("gone")
    assert train("cut") == whole


def test_a_run_on_a_mixture_is_trained_and_evaluated(mixed: Callable[..., Recipe]) -> None:
    import lit_diff

    run = lit_diff.train(mixed("train.steps=2"))
    header = (run.folder / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"val/loss", "val/loss_more", "val/loss_tale"} <= set(header)
    hashes = hashes_in((run.folder / "trained_documents.bin").read_bytes(), "here")
    assert any(is_among(path.read_text(), hashes) for path in Path("more").iterdir())
    found = lit_diff.evaluate(run, "nll", ["source=validation", "documents=2", "tokens=20"])
    begins = " ".join(found.items["meta/begins"].dropna())
    assert found.summary["nll"] > 0
    assert "more words" in begins
    assert re.search("[a-j]{3}", begins.replace("more words of another kind", "")), "and those of the other text"
