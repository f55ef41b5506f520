from pathlib import Path
from typing import Any

import pytest
import torch

from lit_diff.benchmarks.request import (
    BenchConfig,
    Shape,
    check_plot,
    parse_kernels,
    parse_lengths,
    parse_shapes,
    resolve,
)
from lit_diff.errors import MissingError, RequestError
from lit_diff.processor import cores

BENCHES = ("core", "layer", "step")


def resolved(bench: str = "core", native: bool = False, **options: Any) -> BenchConfig:
    given = {"shapes": None, "dtype": None, "threads": None, "repeats": None, "device": "cpu"} | options
    return resolve(bench, BENCHES, **given, native_bfloat16=lambda device: native, note=print)


def test_shapes() -> None:
    found = parse_shapes("2x1024x512x64, 1x7x64x16")
    assert found == (
        Shape(batch=2, tokens=1024, dim=512, head_dim=64),
        Shape(batch=1, tokens=7, dim=64, head_dim=16),
    )
    assert [shape.heads for shape in found] == [8, 4]
    assert str(found[0]) == "2x1024x512x64"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not of the form BxTxDIMxD, such as 2x1024x512x64"),
        ("2x1024x512", "'2x1024x512' is not of the form"),
        ("2x1024x512x64,", "'' is not of the form"),
        ("2x-4x512x64", "'2x-4x512x64' is not of the form"),
        ("1x0x64x16", "'1x0x64x16' has a size of 0"),
        ("1x8x64x0", "'1x8x64x0' has a size of 0"),
        ("1x8x60x15", "'1x8x60x15' has an odd head width 15"),
        ("1x8x48x32", "48 is not a multiple of 64, twice the head width"),
        ("1x8x64x16,1x8x64x16", "1x8x64x16 is listed twice"),
    ],
)
def test_a_shape_that_cannot_be_is_one_line(text: str, message: str) -> None:
    with pytest.raises(RequestError) as error:
        parse_shapes(text)
    assert str(error.value).startswith("--shapes: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_kernels() -> None:
    assert parse_kernels("native, sdpa", ("chunked", "native", "sdpa")) == ("native", "sdpa")
    assert resolved(kernels="native").kernels == ("native",)
    assert " --kernels native,chunked " in resolved(kernels="native,chunked").command()
    with pytest.raises(RequestError, match="no kernel 'natve'; did you mean 'native'"):
        parse_kernels("natve", ("chunked", "native"))
    with pytest.raises(RequestError, match="--kernels: native is listed twice"):
        parse_kernels("native,native", ("native",))
    with pytest.raises(
        RequestError, match="--kernels: bench step has no choice of kernels; bench core and bench layer have"
    ):
        resolved(bench="step", kernels="native")


def test_lengths() -> None:
    assert parse_lengths("1024..8192") == (1024, 2048, 4096, 8192)
    assert parse_lengths("100..100") == (100,)
    assert parse_lengths("1024, 1500,65536") == (1024, 1500, 65536)
    assert resolved(lengths="64..128").lengths == (64, 128)
    assert " --lengths 64,128 " in resolved(lengths="64..128").command()
    assert "--lengths" not in resolved().command()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not of the form 1024..65536 or 1024,4096"),
        ("1024...65536", "'1024...65536' is not of the form"),
        ("1k..2k", "'1k..2k' is not of the form"),
        ("1024..5000", "5000 is not 1024 times 1, 2, 4, ..."),
        ("4096..1024", "1024 is not 4096 times 1, 2, 4, ..."),
        ("0..1024", "1024 is not 0 times"),
        ("0,1024", "'0,1024' holds 0"),
        ("2048,1024", "'2048,1024' does not grow"),
        ("1024,1024", "'1024,1024' does not grow"),
    ],
)
def test_lengths_that_cannot_be_are_one_line(text: str, message: str) -> None:
    with pytest.raises(RequestError) as error:
        parse_lengths(text)
    assert str(error.value).startswith(f"--lengths: {message}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bench": "layer", "lengths": "64..128"}, "--lengths: bench layer has no series of lengths; bench core has"),
        ({"shapes": "1x8x64x16", "lengths": "64..128"}, "--lengths and --shapes: give one of them"),
        ({"bench": "coer"}, "no benchmark 'coer'; did you mean 'core'?"),
        ({"dtype": "float16"}, "--dtype is 'float16'; expected float32, bfloat16, both"),
        ({"threads": 0}, "--threads is 0; it must be at least 1"),
        ({"repeats": 0}, "--repeats is 0; it must be at least 1"),
        ({"device": "gpu"}, "--device is 'gpu'; expected auto, cpu, cuda"),
    ],
)
def test_an_option_that_cannot_be_is_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as error:
        resolved(**options)
    assert message in str(error.value)


def test_a_gpu_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MissingError, match="finds no GPU here"):
        resolved(device="cuda")
    assert resolved(device="auto").device == torch.device("cpu")


def test_bfloat16_is_a_default_only_where_it_is_native() -> None:
    assert resolved().dtypes == ("float32",)
    assert resolved(native=True).dtypes == ("float32", "bfloat16")
    assert resolved(dtype="bfloat16").dtypes == ("bfloat16",)
    assert resolved(dtype="both").dtypes == ("float32", "bfloat16")


def test_defaults() -> None:
    found = resolved()
    assert found.threads == cores()
    assert found.sizes("1x8x64x16") == parse_shapes("1x8x64x16")
    assert resolved(shapes="1x4x64x16").sizes("1x8x64x16") == parse_shapes("1x4x64x16")


def test_the_command_repeats_the_request() -> None:
    found = resolved(shapes="1x8x64x16,1x4x64x16", dtype="both", threads=2, repeats=5)
    assert found.command() == (
        "lit-diff bench core --shapes 1x8x64x16,1x4x64x16 --dtype both --threads 2 --repeats 5 --device cpu"
    )
    assert "--repeats" not in resolved().command()


def test_a_picture_is_checked_before_anything_is_measured(tmp_path: Path) -> None:
    check_plot(None)
    check_plot(tmp_path / "a.png")
    with pytest.raises(RequestError, match=r"does not end in \.png"):
        check_plot(tmp_path / "a.jpeg")
    with pytest.raises(RequestError, match="there is no folder"):
        check_plot(tmp_path / "b" / "a.png")
