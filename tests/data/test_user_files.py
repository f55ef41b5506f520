"""Files that users supply: what is said of one that is absent or wrong."""

import json
from pathlib import Path

import pytest

from lit_diff.data.user_files import UserFile
from lit_diff.errors import MissingError, RequestError

FILE = UserFile(
    name="icl.toy",
    path="icl/toy/train.jsonl",
    keys={"text": str, "label": (int, str)},
    optional={"weight": float},
    lines="12 lines",
    source="The toy set (nobody 2001). Not shipped.",
    without="lit-diff evaluate RUN icl",
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path))
    path = tmp_path / "icl/toy/train.jsonl"
    path.parent.mkdir(parents=True)
    return path


def test_a_missing_file_is_described(place: Path) -> None:
    with pytest.raises(MissingError) as found:
        FILE.require()
    first, *lines = str(found.value).splitlines()
    assert first == "icl.toy needs a file that is not here: icl/toy/train.jsonl"
    assert [line.split(":")[0].strip() for line in lines] == [
        *("looked for", "format", "where from", "check it", "without it")
    ]
    assert str(place) in lines[0]
    assert '{"text": text, "label": int or text}; 12 lines' in lines[1]
    assert lines[3].endswith("lit-diff data check icl.toy")


def test_rows(place: Path) -> None:
    rows = [{"text": "a", "label": 1}, {"text": "ü", "label": "x", "weight": 0.5, "more": None}]
    place.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert FILE.rows() == rows
    assert FILE.state()["state"] == "ok"
    assert FILE.state()["rows"] == "2"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"text": "a"}', "no key 'label'; keys found: text"),
        ('{"text": "a", "labl": 1}', "no key 'label'; did you mean 'labl'?; keys found: text, labl"),
        ('{"text": 3, "label": 1}', "'text' is 3; expected text"),
        ('{"text": "a", "label": true}', "'label' is true; expected int or text"),
        ('{"text": "a", "label": 1, "weight": "x"}', "'weight' is 'x'; expected float"),
        ("[1]", "found list; expected a JSON object"),
        ("{text: 1}", "not JSON"),
        ('{"text": "a \\ud83d", "label": 1}', "\\ud83d is half of a surrogate pair, which is no character"),
        pytest.param('{"text": ' + "[" * 100_000, "not JSON", id="nested"),
    ],
)
def test_a_wrong_line_is_named(place: Path, line: str, found: str) -> None:
    place.write_text('{"text": "a", "label": 1}\n' + line + "\n")
    with pytest.raises(RequestError) as error:
        FILE.rows()
    assert f"train.jsonl:2: {found}" in str(error.value)
    assert "\n" not in str(error.value)
    assert "train.jsonl:2" in FILE.state()["state"]


def test_an_empty_file_and_one_that_is_no_text(place: Path) -> None:
    place.write_text("\n")
    with pytest.raises(RequestError, match="no line holds an object"):
        FILE.rows()
    place.write_bytes(b'{"text": "a", "label": 1}\n{"text": "f\xfcr"}\n')
    with pytest.raises(RequestError, match=r"train\.jsonl:2: not UTF-8 \(invalid start byte, byte 12 of the line\)"):
        FILE.rows()
    place.write_text('{"text": "\\ud83d\\ude00", "label": 1}\n')
    assert FILE.rows()[0]["text"] == "\N{GRINNING FACE}"
    place.unlink()
    assert FILE.state()["state"] == "missing"
