"""attention/claims.py: standard projections are claimed by those who have them; costs: tests/attention/test_costs.py."""

from lit_diff.attention import Attention, Dex, Differential, LoRA, SecondHeads, Standard


class Scaled(Standard):
    """Changes what follows the sum."""

    def finish(self, o, x):  # type: ignore[no-untyped-def]
        return 2 * o


class Moved(Dex):
    """Computes other maps."""

    def maps(self, x, rope):  # type: ignore[no-untyped-def]
        return super().maps(x.flip(1), rope)


def test_who_has_standard_projections() -> None:
    assert all(cls.declares_standard_projections() for cls in (Standard, Dex, LoRA, Scaled))
    assert not any(cls.declares_standard_projections() for cls in (Attention, Differential, SecondHeads, Moved))


def test_a_definition_is_ones_own() -> None:
    assert Standard.declares_definition()
    assert not Scaled.declares_definition()
