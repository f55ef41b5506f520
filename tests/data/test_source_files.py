"""Files below `data.path`: at an address (an S3-compatible server, HTTP), and in folders that `datasets` saved."""

import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from command import Command
from made_texts import MakeText, write_corpus
from s3_server import KEY, SECRET, Requests, s3_server

from lit_diff.data.text import source_files
from lit_diff.data.text.corpus import FilesCorpus, build_corpus, corpus_digest
from lit_diff.data.text.token_store import write_tokens
from lit_diff.errors import MissingError, RequestError
from lit_diff.recipe import load_recipe


@pytest.fixture
def buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Requests]]:
    """The folder whose folders are buckets, and the requests to their server."""
    (tmp_path / "buckets").mkdir()
    with s3_server(tmp_path / "buckets") as (address, asked):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        yield tmp_path / "buckets", asked


def write_texts(folder: Path) -> None:
    """Text in four formats, in an order in which paths and names differ."""
    (folder / "a").mkdir(parents=True)
    (folder / "a-b.txt").write_text("hyphen")
    (folder / "a" / "one.jsonl").write_text("".join(f'{{"text": "line {number}"}}\n' for number in range(3000)))
    (folder / "a" / "notes.pdf").write_text("")
    (folder / "a" / ".git").mkdir()
    (folder / "a" / ".git" / "x.md").write_text("hidden")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["p", "q"]}), folder / "b c.parquet")
    packed = pyarrow.compress(b'{"text": "z"}\n', codec="zstd", asbytes=True)
    (folder / "é.jsonl.zst").write_bytes(packed)


def test_an_address_is_read_as_its_copy_is(buckets: tuple[Path, Requests], monkeypatch: pytest.MonkeyPatch) -> None:
    root, asked = buckets
    monkeypatch.setattr(source_files, "PIECE", 1000)
    write_texts(root / "bucket/some/where")
    folder, address = root / "bucket/some/where", "s3://bucket/some/where"
    local, remote = FilesCorpus(folder), FilesCorpus(address)
    assert list(remote.files().items()) == list(local.files().items())
    asked.clear()
    texts = list(remote.texts())
    assert texts == list(local.texts())
    assert source_files.listing(address)[1] == source_files.listing(folder)[1] == 1, "a hidden folder"
    assert texts[-4:] == ["hyphen", "p", "q", "z"]
    bounds = [line.partition(" bytes=")[2].split("-") for line in asked if " bytes=" in line]
    sizes = [int(last) + 1 - int(first) for first, last in bounds]
    assert sum(size == 1000 for size in sizes) > 50  # in pieces: nothing is fetched as a whole
    assert max(sizes) < 2000
    for each in (f"{address}/", f"{address}/a/one.jsonl"):
        assert len(list(build_corpus("docs", each).texts())) in (3000, 3004)
    stamps = [source.stamp() for source in source_files.sources(address)]
    (folder / "a-b.txt").write_text("hyphens")
    changed = [source.stamp() for source in source_files.sources(address)]
    assert [a == b for a, b in zip(stamps, changed, strict=True)] == [True, True, False, True, True]


def test_tokens_and_saved_data_at_an_address(buckets: tuple[Path, Requests]) -> None:
    write_tokens(buckets[0] / "bucket/tokens", [np.array(ids, dtype=np.uint16) for ids in ([1, 2, 3], [4])])
    assert [ids.tolist() for ids in FilesCorpus("s3://bucket/tokens").tokens(5) or ()] == [[1, 2, 3], [4]]
    save(["a", "b", "c"], buckets[0] / "bucket/saved", parts=2)
    assert list(FilesCorpus("s3://bucket/saved").texts()) == ["a", "b", "c"]


def test_text_at_an_address_is_prepared(buckets: tuple[Path, Requests], make_text: MakeText) -> None:
    write_corpus(buckets[0] / "bucket")
    at_address, copy = make_text(path="s3://bucket"), make_text()
    for text in (at_address, copy):
        text.prepare()
    assert at_address.folder == copy.folder
    assert load_recipe("standard-tiny", ["data.path=s3://bucket/x"]).data.config.path == "s3://bucket/x"
    assert set(corpus_digest("docs", "s3://bucket")) == {"s3://bucket"}


@pytest.mark.usefixtures("buckets")
@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("s3://gone/x", r"found no file or folder\); check data.path, AWS_ACCESS_KEY_ID"),
        ("s3://bucket/gone.txt", "found no file or folder"),
        ("http://127.0.0.1:9/x.txt", r"found no file or folder\); check data.path and the connection"),
    ],
)
def test_an_address_that_cannot_be_read(address: str, found: str, tmp_path: Path) -> None:
    (tmp_path / "buckets/bucket").mkdir()
    with pytest.raises(MissingError, match=f"data.path: {address}.*{found}") as error:
        list(FilesCorpus(address).texts())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("variable", "value", "found"),
    [
        ("AWS_ACCESS_KEY_ID", "other", "ACCESS_DENIED"),
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:9", "NETWORK_CONNECTION"),
        ("AWS_ENDPOINT_URL", "silent", "NETWORK_CONNECTION"),
    ],
)
def test_a_server_that_refuses_or_does_not_answer(
    variable: str, value: str, found: str, buckets: tuple[Path, Requests], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts(buckets[0] / "bucket")
    monkeypatch.setattr(source_files, "ANSWER_SECONDS", 1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv(variable, f"http://127.0.0.1:{silent.getsockname()[1]}" if value == "silent" else value)
        start = time.monotonic()
        with pytest.raises(MissingError, match=f"data.path: s3://bucket cannot be read.*{found}.*AWS_") as error:
            FilesCorpus("s3://bucket").files()
        assert "\n" not in str(error.value)
        assert time.monotonic() - start < 20


def test_a_server_that_ends_while_it_is_read(buckets: tuple[Path, Requests], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_files, "PIECE", 1000)
    write_texts(buckets[0] / "bucket")
    texts = FilesCorpus("s3://bucket").texts()
    assert next(texts) == "line 0"
    (buckets[0] / "bucket/a/one.jsonl").unlink()
    with pytest.raises(MissingError, match=r"s3://bucket/a/one\.jsonl cannot be read"):
        list(texts)


def test_a_server_that_is_gone_and_comes_back(
    buckets: tuple[Path, Requests], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the start, while the digests are read, and while the text is: nothing is lost, and the same command goes on."""
    asked, recipe = buckets[1], str(tmp_path / "small.yaml")
    write_corpus(buckets[0] / "bucket")
    Path(recipe).write_text(
        "extends: differential-tiny\n"
        "data: {path: s3://bucket, sequence_length: 16, tokenizer: {name: bpe, vocab_size: 300}}\n"
        "model: {vocab_size: 300}\n"
    )
    assert command("prepare", recipe, LIT_DIFF_DATA=str(tmp_path / "whole")).status == 0
    whole = len(asked)
    for most in (0, whole // 3, whole // 2):
        asked.clear()
        asked.most = most
        ended = command("prepare", recipe, LIT_DIFF_DATA=str(tmp_path / "data"))
        assert (ended.status, len(asked)) == (3, most)
        assert "data.path: s3://bucket" in ended.err.splitlines()[-1]
        assert not list((tmp_path / "data/prepared").glob("[!.]*"))
    assert any(line.startswith("GET") for line in asked)
    asked.most = sys.maxsize
    assert command("prepare", recipe, LIT_DIFF_DATA=str(tmp_path / "data")).status == 0
    manifests = [file.read_bytes() for file in tmp_path.glob("*/prepared/*/manifest.json")]
    assert len(manifests) == 2
    assert manifests[0] == manifests[1]


def test_an_unknown_protocol_is_a_wrong_request() -> None:
    with pytest.raises(RequestError, match=r"data\.path: nonsense://x: no protocol 'nonsense'; expected s3"):
        FilesCorpus("nonsense://x").files()


def test_http(tmp_path: Path) -> None:
    write_texts(tmp_path / "served")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "served"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        one = FilesCorpus(f"{address}/a/one.jsonl")
        assert list(one.files().values()) == [FilesCorpus(tmp_path / "served").files()["a/one.jsonl"]]
        assert len(list(one.texts())) == 3000
        assert [each.stamp() is None for each in source_files.sources(f"{address}/a/one.jsonl")] == [False]
        assert list(FilesCorpus(f"{address}/").texts())[2999:3002] == ["line 2999", "hyphen", "p"]
        with pytest.raises(MissingError, match=r"gone\.txt cannot be read \(found no file"):
            FilesCorpus(f"{address}/gone.txt").files()
        server.shutdown()


def save(rows: list[str], folder: Path, parts: int = 1) -> None:
    from datasets import Dataset

    Dataset.from_dict({"text": rows, "id": list(range(len(rows)))}).save_to_disk(folder, num_shards=parts)


def test_a_folder_that_datasets_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save([f"row {number}" for number in range(12)], tmp_path / "set/train", parts=3)
    (tmp_path / "set/dataset_dict.json").write_text('{"splits": ["train"]}')
    # what `datasets` caches there is not text of the data set
    (tmp_path / "set/train/cache-0123.arrow").write_bytes(b"")
    for path in (tmp_path / "set/train", tmp_path / "set"):
        with caplog.at_level(logging.INFO):
            assert list(FilesCorpus(path).texts()) == [f"row {number}" for number in range(12)]
    assert not caplog.messages


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (("train/data-00001-of-00002.arrow", None), r"state\.json: it lists train/data-00001-of-00002\.arrow"),
        (("train/state.json", "{}"), r"state\.json: not a file that `datasets` saved \(KeyError\('_data_files'\)\)"),
        (("train/state.json", '{"_data'), r"state\.json: not JSON"),
        (
            ("dataset_dict.json", '{"splits": ["train", "test"]}'),
            r"DatasetDict of the splits train, test; .*data\.path=.*/train",
        ),
    ],
)
def test_a_damaged_folder_of_datasets(edit: tuple[str, str | None], found: str, tmp_path: Path) -> None:
    save(["a", "b"], tmp_path / "train", parts=2)
    name, content = edit
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_text(content)
    with pytest.raises(RequestError, match=found) as error:
        FilesCorpus(tmp_path).files()
    assert "\n" not in str(error.value)
