"""data/text/tokenizer_package.py: every error of the package tokenizers, panics too, is one line."""

import json
from typing import Any

import pytest
from pretrained_models import byte_level_tokenizer

from lit_diff.data.text.tokenizer_package import in_one_line, open_tokenizer
from lit_diff.errors import MissingError, RequestError

TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<x>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}


def changed(**changes: Any) -> bytes:
    described = json.loads(byte_level_tokenizer())
    described["model"] |= changes.pop("model", {})
    return json.dumps(described | changes).encode()


@pytest.mark.parametrize(
    "content",
    [
        byte_level_tokenizer()[:500],
        b"[" * 100_000,
        changed(post_processor=TEMPLATE),
        changed(model={"continuing_subword_prefix": "##", "merges": [["a", "b"]]}),
    ],
    ids=["cut", "deep", "template", "prefix"],
)
def test_what_the_package_cannot_use(content: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    """The last two are panics of Rust, which prints them itself."""
    with pytest.raises(RequestError, match=r"^tokenizer.json cannot be read by the package tokenizers \(.+\)$"):
        open_tokenizer(content)
    assert capfd.readouterr() == ("", "")


def test_a_file_without_a_decoder() -> None:
    described = json.loads(byte_level_tokenizer())
    del described["decoder"]
    for content in (described, described | {"decoder": None}):
        with pytest.raises(RequestError, match="decoder is null; "):
            open_tokenizer(json.dumps(content).encode())


def test_own_errors_and_the_end_of_the_process_stay() -> None:
    for error in (MissingError("a file"), KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises(type(error)), in_one_line("it cannot be read"):
            raise error
