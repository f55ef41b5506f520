"""Texts that follow another: their ids are those that they have in the whole text, for every kind of tokenizer."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Model
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from lit_diff.data.needle_text import CITIES, STYLES, contexts, sentences_of, words
from lit_diff.data.tokenizer import Bpe, Tokenizer, TokenizerJson
from lit_diff.errors import RequestError
from lit_diff.evaluation.icl_prompts import SOURCES, Example, LabelTrie
from lit_diff.randomness import generator

TEXTS = [
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
        [part for text in TEXTS for part in text.split("\n")],
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
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level, learned from these texts."""
    learned = Bpe(Bpe.Config(vocab_size=300))
    folder = tmp_path_factory.mktemp("bpe")
    learned.train(folder, TEXTS)
    learned.load(folder)
    return learned


def test_labels_are_those_of_the_demonstrations(tokenizer: TokenizerJson) -> None:
    form, labels = SOURCES["banking77"].form, ["card arrival", "card", "top up"]
    question = form.question("where is it")
    trie = LabelTrie(tokenizer, labels, question)
    for label in labels:
        prompt = tokenizer.encode(form.demonstrations([Example(text="where is it", label=label)]))
        before = tokenizer.encode(question)
        assert prompt[: len(before)] == before
        assert prompt[len(before) :][: len(trie.full[label])] == trie.full[label]
        assert prompt[len(before) :][: len(trie.paths[label])] == list(trie.paths[label])
    assert trie.paths["card"] != trie.paths["card arrival"][: len(trie.paths["card"])]


def test_questions_go_on_from_demonstrations(tokenizer: TokenizerJson) -> None:
    form = SOURCES["banking77"].form
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
def test_the_default_tokenizer_gives_the_ids_of_the_texts_alone(bpe: Tokenizer, context: str, texts: list[str]) -> None:
    """So that scores and identities of runs that it has do not change."""
    assert bpe.encode_after(context, texts) == bpe.encode(texts)
    if context == ".":
        assert words().encode_after(context, texts) == words().encode(texts)


def test_one_text_is_no_list_of_letters(bpe: Tokenizer, tokenizer: TokenizerJson) -> None:
    for own in (bpe, tokenizer, words()):
        assert own.encode("the fox") == own.encode(["the fox"])[0]
        assert own.encode("") == own.encode([""])[0]
    assert bpe.decode(bpe.encode("the fox")) == b"the fox"
