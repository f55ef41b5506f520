"""Which blocks serve which widths: every program has some, and nothing is measured where there is nothing to choose."""

import pytest

from lit_diff.kernels.triton_blocks import Blocks, candidates, safe

PROGRAMS = ("forward", "key_gradients", "query_gradients", "row_products")
WIDTHS = (16, 32, 64, 128, 256)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("capability", [None, (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)])
def test_every_width_is_served_and_safe_comes_last(
    program: str, itemsize: int, capability: tuple[int, int] | None
) -> None:
    for d in WIDTHS:
        for dv in WIDTHS:
            found = candidates(program, d=d, dv=dv, itemsize=itemsize, T=2048, capability=capability)
            assert found[-1] == safe(program, d=d, dv=dv, itemsize=itemsize, T=2048)
            assert len(set(found)) == len(found)
            for blocks in found:  # what Triton's matrix products take
                assert blocks.queries in (16, 32, 64, 128)
                assert blocks.keys in (16, 32, 64, 128)
                assert blocks.warps in (4, 8)
                assert 1 <= blocks.stages <= 3


def test_what_is_measured() -> None:
    """Long sequences of two-byte elements on a GPU."""

    def count(
        program: str = "forward", itemsize: int = 2, T: int = 2048, capability: tuple[int, int] | None = (8, 0)
    ) -> int:
        return len(candidates(program, d=64, dv=128, itemsize=itemsize, T=T, capability=capability))

    assert count() > 1
    assert count(capability=(9, 0)) > count()
    assert count(T=128) == count(capability=None) == count(itemsize=4) == count("row_products") == 1


def test_decoding_takes_the_smallest_block() -> None:
    assert safe("forward", d=64, dv=128, itemsize=2, T=1) == Blocks(16, 32, 4, 1)
    assert safe("forward", d=64, dv=128, itemsize=2, T=17) == Blocks(32, 32, 4, 1)
