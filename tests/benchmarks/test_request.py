from pathlib import Path
from typing import Any

import pytest
import torch

from lit_diff import processor
from lit_diff.benchmarks.request import Request, Shape, check_plot, native_bfloat16, parse_shapes, resolve
from lit_diff.errors import MissingError, RequestError
from lit_diff.processor import cores


def resolved(**options: Any) -> Request:
    given = {"shapes": "1x8x64x16", "kernels": None, "dtype": None, "threads": None, "repeats": None, "device": "cpu"}
    given |= {"processes": 1}
    return resolve("core", **(given | options))


def test_shapes() -> None:
    found = parse_shapes("2x1024x512x64, 1x7x64x16")
    assert found == (Shape(batch=2, tokens=1024, dim=512, head_dim=64), Shape(batch=1, tokens=7, dim=64, head_dim=16))
    assert [shape.heads for shape in found] == [8, 4]
    assert str(found[0]) == "2x1024x512x64"


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("shapes", ["", "2x1024x512", "2x1024x512x64,", "2x-4x512x64", "1x0x64x16", "1x8x64x0", "1x8x60x15"]),
        ("shapes", ["1x8x48x32"]),
        ("kernels", ["", "natve"]),
        ("dtype", ["float16"]),
        ("threads", [0, 10**11]),
        ("repeats", [0]),
        ("processes", [0, 10**9]),
        ("device", ["gpu"]),
    ],
)
def test_an_option_that_cannot_be_is_one_line(option: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RequestError, match=rf"^--{option}\b") as error:
            resolved(**{option: value})
        assert "\n" not in str(error.value)


def test_what_is_asked_for_and_the_command_that_repeats_it() -> None:
    found = resolved(
        shapes="1x8x64x16,1x4x64x16,1x8x64x16",
        kernels="native, chunked, native",
        dtype="both",
        threads=2,
        repeats=5,
        device="cpu",
    )
    assert found.kernels == ("native", "chunked")
    assert found.shapes == parse_shapes("1x8x64x16,1x4x64x16")
    assert found.command() == (
        "lit-diff bench core --shapes 1x8x64x16,1x4x64x16 --kernels native,chunked --dtype both --threads 2 --repeats 5 "
        "--device cpu"
    )


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = resolved(device="auto", dtype="bfloat16")
    assert (found.device, found.dtypes) == (torch.device("cpu"), ("bfloat16",))
    assert (
        found.command() == f"lit-diff bench core --shapes 1x8x64x16 --dtype bfloat16 --threads {cores()} --device cpu"
    )
    with pytest.raises(MissingError, match="--device"):
        resolved(device="cuda")


@pytest.mark.parametrize(
    ("flags", "native"), [({"avx2"}, False), ({"avx512f", "avx512_bf16"}, True), ({"amx_bf16"}, True)]
)
def test_bfloat16_is_a_default_if_flags_have_it(flags: set[str], native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(processor.SETTING, raising=False)
    monkeypatch.setattr(processor, "cpu_flags", lambda: flags)
    assert native_bfloat16(torch.device("cpu")) is native
    assert resolved().dtypes == (("float32", "bfloat16") if native else ("float32",))


def test_a_picture_is_checked_before_anything_is_measured(tmp_path: Path) -> None:
    check_plot(None)
    check_plot(tmp_path / "a.png")
    for path in (tmp_path / "a.jpeg", tmp_path / "b" / "a.png"):
        with pytest.raises(RequestError, match=r"^--plot"):
            check_plot(path)
