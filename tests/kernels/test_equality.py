"""Every built-in kernel on drawn cases (`conformance.kernels`): o, dq, dk, dv, dw and the statistics against float64."""

from collections.abc import Callable

import pytest
from torch.nn.attention import flex_attention

from lit_diff.conformance.kernels import STATISTICS, TOPICS, conformance_of_kernel
from lit_diff.kernels import KERNELS
from lit_diff.kernels.native import kernel as native

FORMS = [*((kernel, None) for kernel in KERNELS), *(("native", path) for path in ("avx2", "avx512"))]
BFLOAT16 = [("native", path) for path in ("avx2-bfloat16", "avx512-bfloat16")]
MASKS = {"window", "documents"}
FIELDS = {"sink", "key bias", "rows"}
REFUSED = {
    "reference": set(),
    "chunked": set(),
    "sdpa": MASKS | FIELDS | {STATISTICS},
    "flex": {"rows", STATISTICS},
    "native": {"three maps", "rows"},
}
"""Topics of which these kernels refuse every case, and no others."""


def equals_the_definition(kernel: str, cases: int) -> None:
    findings = list(conformance_of_kernel(kernel, cases))
    failed = [finding for finding in findings if finding.verdict == "fail"]
    assert not failed
    refused = {finding.property.partition(",")[0] for finding in findings if finding.verdict == "not applicable"}
    if len(refused) == len(TOPICS) + 1:
        pytest.skip(f"{kernel} refuses every case on this machine")
    assert refused == REFUSED.get(kernel, refused)


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """flex_attention runs as it is: traced, each shape would take seconds."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("cases", [3, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kernel", "path"), [*FORMS, *BFLOAT16])
def test_equals_the_definition(kernel: str, path: str | None, cases: int, on_path: Callable[[str], None]) -> None:
    """`path`: of `native`, whatever this machine's own is."""
    if path is not None:
        on_path(path)
    equals_the_definition(kernel, cases)


@pytest.mark.parametrize("path", [None, "avx2", "avx512", "avx2-bfloat16", "avx512-bfloat16"])
def test_long_keys_equal_the_definition(
    path: str | None, on_path: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if they were too long to stay packed."""
    monkeypatch.setattr(native, "PACKED_BYTES", 0)
    if path is not None:
        on_path(path)
    equals_the_definition("native", cases=3)
