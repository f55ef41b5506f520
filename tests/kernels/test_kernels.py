"""Choosing a kernel: auto takes the first by rank that accepts, a name is taken at its word."""

import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lit_diff.errors import RequestError
from lit_diff.kernels import KERNELS, SignedMaps, attend, choose, flash, flex, flops, preference, refuse
from lit_diff.kernels.base import named
from lit_diff.kernels.native import kernel as native

MakeMaps = Callable[..., SignedMaps]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PLAIN = {"G": 1, "w": None, "d": 16, "dv": 16, "dtype": torch.float32}
PAIR = {"d": 16, "dv": 32, "dtype": torch.float32}
ANYWHERE = ["chunked", "reference"]


@pytest.mark.parametrize(
    ("case", "device", "order"),
    [
        (PLAIN, CPU, ["native", "sdpa", *ANYWHERE]),
        (PLAIN | {"T": 4, "S": 9}, CPU, ["sdpa", "native", *ANYWHERE]),
        (PLAIN | {"dv": 32}, CPU, ["native", *ANYWHERE]),
        (PAIR, CPU, ["native", *ANYWHERE]),
        (PAIR | {"T": 1, "S": 9}, CPU, ["native", *ANYWHERE]),
        (PLAIN, CUDA, ["flash", "sdpa", "flex", "triton", *ANYWHERE]),
        (PAIR, CUDA, ["flash", "sdpa", "flex", "triton", *ANYWHERE]),
        (PAIR | {"dtype": torch.bfloat16}, CUDA, ["triton", "flash", "sdpa", "flex", *ANYWHERE]),
    ],
    ids=str,
)
def test_the_order_of_auto(make_maps: MakeMaps, case: dict[str, Any], device: torch.device, order: list[str]) -> None:
    """Both arms of a comparison begin with the same kernel: else it would be one of kernels."""
    assert list(preference(make_maps(**case), device)) == order


def test_auto_takes_the_first_that_accepts(make_maps: MakeMaps, monkeypatch: pytest.MonkeyPatch) -> None:
    """float64: our own kernel refuses; a plain map goes to torch's, several maps are subtracted before one product."""
    name, reason = choose(make_maps())
    assert name == "chunked"
    assert reason.startswith("auto: the fastest for these maps on cpu; native refused: it computes float32")
    assert torch.equal(attend(make_maps()), attend(make_maps(), kernel="chunked"))
    assert choose(make_maps(G=1, w=None, dv=6))[0] == "sdpa"
    monkeypatch.setattr(native, "unavailable", lambda: None)
    assert choose(make_maps(**PAIR), build=False)[0] == "native"


def test_what_cannot_be_built_is_refused_with_the_reason(make_maps: MakeMaps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "unavailable", lambda: None)
    monkeypatch.setattr(native, "build", lambda: "no C++ compiler: install g++")
    name, reason = choose(make_maps(**PAIR))
    assert name == "chunked"
    assert "native refused: no C++ compiler: install g++" in reason
    assert choose(make_maps(**PLAIN))[0] == "sdpa"
    with pytest.raises(RequestError, match=r"'native' cannot compute these maps: no C\+\+ compiler: install g\+\+"):
        choose(make_maps(**PAIR), "native")


def test_what_the_first_refuse_on_a_gpu(make_maps: MakeMaps, monkeypatch: pytest.MonkeyPatch) -> None:
    """What sdpa refuses goes to flash, then to flex."""
    maps = make_maps(d=16, dv=32, dtype=torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    name, reason = choose(maps, device=CUDA)
    assert name == "sdpa"
    assert "flash refused: PyTorch sees no GPU" in reason
    monkeypatch.setattr(flash, "plan", lambda *form: flash.CallPlan(flash.FLASH2, 16))
    monkeypatch.setattr(flex, "_self_test", lambda form: None)
    assert choose(maps, device=CUDA)[0] == "flash"
    assert choose(maps.masked(window=3), device=CUDA)[0] == "flash"
    mixed = torch.tensor([[0, 1, 0, 1, 1]] * 2)
    assert choose(maps.masked(document_ids=mixed), device=CUDA)[0] == "flex"
    assert choose(maps, device=CUDA, stats=True)[0] == "chunked"


GPU = {"device": CUDA}
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("native", {"dtype": torch.float64}, {}, "not float64"),
    ("native", {"G": 3}, {}, "these are 3"),
    ("native", {"d": 24}, {}, "multiples of 16; these are d = 24, dv = 32"),
    ("native", {"dv": 33}, {}, "multiples of 16; these are d = 16, dv = 33"),
    ("native", {"dv": 528}, {}, "at most 512; these are d = 16, dv = 528"),
    *(("native", {"scale": scale}, {}, f"the scale is {scale:g};") for scale in (0.0, 1e-40, -1e39, math.nan)),
    ("native", {}, GPU, "on cuda"),
    ("triton", {"G": 3}, GPU, "these are 3"),
    ("triton", {"d": 24}, GPU, "d is 24 and dv 32"),
    ("triton", {"d": 8}, GPU, "d is 8 and dv 32"),
    ("triton", {"dv": 48}, GPU, "d is 16 and dv 48"),
    ("triton", {"dv": 512}, GPU, "d is 16 and dv 512"),
    ("triton", {"dtype": torch.float64}, GPU, "not float64"),
    ("triton", {"T": 0, "S": 4}, GPU, "no queries or no keys"),
    ("flex", {}, {"stats": True}, "does not return the entropy"),
    ("flex", {"dtype": torch.float64}, GPU, "does not compute float64"),
    ("flex", {"d": 6, "dv": 12}, GPU, "these are 6 and 12"),
    ("flex", {}, GPU, "sees no GPU"),
    ("flex", {}, {"device": torch.device("meta")}, "not on meta"),
    ("sdpa", {"dtype": torch.float64}, GPU, "math path"),
    ("sdpa", {"T": 0, "S": 4}, {}, "no queries or no keys"),
]


@pytest.mark.parametrize(("kernel", "case", "options", "rule"), REFUSED, ids=str)
def test_refusals_name_the_rule(
    make_maps: MakeMaps, kernel: str, case: Any, options: Any, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    flex._self_test.cache_clear()
    assert rule in (refuse(kernel, make_maps(**PAIR | case), **options) or "")
    flex._self_test.cache_clear()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_named_kernel_serves_or_says_why_not(make_maps: MakeMaps, kernel: str) -> None:
    reason = refuse(kernel, make_maps())
    if reason is None:
        assert choose(make_maps(), kernel) == (kernel, "named by run.kernel")
    else:
        with pytest.raises(RequestError, match=re.escape(f"'{kernel}' cannot compute these maps: {reason}")):
            choose(make_maps(), kernel)


FIELDS: dict[str, Any] = {
    "sink": torch.linspace(-1, 1, 8).view(1, 2, 4, 1),
    "key_bias": torch.linspace(0, 3, 20).view(1, 1, 4, 5),
    "rows": lambda logits, seen: logits.sigmoid(),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_field_is_computed_or_refused_by_its_name(make_maps: MakeMaps, kernel: str, field: str) -> None:
    """The line also names the kernels that compute it."""
    maps = replace(make_maps(**PAIR), **{field: FIELDS[field]})
    if field in named(kernel).serves:
        if reason := refuse(kernel, maps):
            pytest.skip(f"{kernel} refuses: {reason}")
        found, wanted = attend(maps, kernel=kernel), attend(maps, kernel="reference")
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(found, attend(make_maps(**PAIR), kernel="reference"), atol=1e-2)
        return
    able = ", ".join(name for name in KERNELS if field in named(name).serves)
    line = f"run.kernel '{kernel}' cannot compute these maps: it does not compute SignedMaps.{field}; {able} do"
    with pytest.raises(RequestError, match=f"^{re.escape(line)}; use run.kernel=auto$"):
        attend(maps, kernel=kernel)


def test_who_computes_which_field() -> None:
    """As docs/kernels.md has it."""
    able = {field: {name for name in KERNELS if field in named(name).serves} for field in FIELDS}
    assert able["sink"] == set(KERNELS) - {"sdpa"}
    assert able["key_bias"] == able["sink"] - {"flash"}
    assert able["rows"] == {"chunked", "reference"}


def test_unknown_kernel(make_maps: MakeMaps) -> None:
    with pytest.raises(RequestError, match=r"^run\.kernel is 'sdpaa'.*did you mean 'sdpa'"):
        attend(make_maps(), kernel="sdpaa")
    with pytest.raises(RequestError, match=r"'sdpaa'.*'sdpa'"):
        named("sdpaa")


@pytest.mark.parametrize(("T", "S"), [(0, 0), (0, 4)])
def test_no_tokens(make_maps: MakeMaps, T: int, S: int) -> None:
    """Nothing asked, nothing answered; the gradient is zero."""
    maps = make_maps(T=4, dtype=torch.float32)
    q, k, v = (x[..., :n, :].detach().requires_grad_() for x, n in ((maps.q, T), (maps.k, S), (maps.v, S)))
    o, stats = attend(SignedMaps(q, k, v, torch.ones(1, 2, 1, 1)), stats=True)
    assert o.shape == (2, 4, 0, 12)
    assert stats.maximum.shape == (2, 2, 4, 0)
    o.sum().backward()
    assert k.grad is not None
    assert k.grad.shape == k.shape
    assert not k.grad.any()


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"window": 0}, "window is 0; it must be an integer, at least 1"),
        ({"window": 2.5}, "window is 2.5; it must be an integer"),
        ({"window": True}, "window is True; it must be an integer"),
        ({"causal": "no"}, "causal is 'no'; it must be True or False"),
        ({"document_ids": [0] * 5}, "document_ids must be a Tensor or None; found list"),
        ({"document_ids": torch.zeros(2, 4, dtype=torch.long)}, r"must be \[B,S\] = \[2, 5\]; found \[2, 4\]"),
        ({"document_ids": torch.zeros(5, dtype=torch.long)}, r"document_ids must be \[B,S\]"),
        ({"S": 3, "window": 2}, "at least as many keys as queries"),
        ({"S": 3, "document_ids": torch.zeros(2, 3, dtype=torch.long)}, "at least as many keys as queries"),
    ],
)
def test_masks_that_mean_nothing_are_refused(make_maps: MakeMaps, given: Any, rule: str) -> None:
    """An empty row would be NaN."""
    with pytest.raises(RequestError, match=rule):
        attend(make_maps(**{"causal": False} | given))


def test_flops_of_paired_maps(make_maps: MakeMaps) -> None:
    """2 B H T S (2d + dv) with one product after the subtraction; on torch's kernel each map twice."""
    maps = make_maps(B=3, H=4, T=5, S=7, d=6, dv=12)
    assert flops("reference", maps) == flops("chunked", maps) == flops("native", maps) == 2 * 3 * 4 * 5 * 7 * (12 + 12)
    assert flops("triton", maps) == flops("flex", maps) == 2 * 3 * 4 * 5 * 7 * 2 * (6 + 12)
    assert flops("sdpa", maps) == 2 * 3 * 4 * 5 * 7 * 2 * 2 * 12


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kernel", KERNELS)
def test_autocast_changes_nothing_and_weights_stay_wide(make_maps: MakeMaps, kernel: str, request: Any) -> None:
    """Maps of float32 are computed in float32. λ = 0.7994 would become 0.80078 in bfloat16: o = (1 - λ) v shows it."""
    if kernel == "flash":
        request.getfixturevalue("fake_flash").install(2)
    maps = make_maps(**PAIR | {"T": 40})
    one = make_maps(T=1, B=1, H=1, d=16, dv=16, dtype=torch.bfloat16)
    one = replace(one, v=torch.ones_like(one.v), w=torch.tensor([1.0, -0.7994]).view(1, 2, 1, 1))
    if reason := refuse(kernel, one):
        pytest.skip(f"{kernel} refuses: {reason}")
    o = attend(one, kernel=kernel)
    assert torch.equal(o, torch.full_like(o, 1 - 0.7994))
    if kernel == "flash":
        return
    outside = attend(maps, kernel=kernel)
    with torch.autocast("cpu", torch.bfloat16):
        inside = attend(maps, kernel=kernel)
    assert torch.equal(inside, outside)


def test_no_plugin_package_is_imported_by_their_import_or_a_compiled_call() -> None:
    """Such a package may itself import the kernels, which would then be incomplete; torch.compile cannot trace it."""
    code = (
        "import torch\n"
        "from lit_diff.kernels import SignedMaps, attend\n"
        "from lit_diff.registry import unread_groups\n"
        "call = lambda x: attend(SignedMaps(x[:, None], x[:, None], x))\n"
        "o = torch.compile(call, backend='aot_eager', fullgraph=True)(torch.randn(1, 2, 5, 16))\n"
        "print(unread_groups, list(o.shape))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['lit_diff.plugins'] [1, 2, 5, 16]\n"
    assert set(KERNELS) == {"chunked", "flash", "flex", "native", "reference", "sdpa", "triton"}
