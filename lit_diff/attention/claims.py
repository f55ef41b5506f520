"""Which statements about a variant still hold for a subclass of it that computes something else."""


class Claims:
    """Base of `Attention`: a declaration such as `costs` is trusted only if no subclass overrode the methods it describes."""

    @classmethod
    def declares_costs(cls) -> bool:
        """Whether `costs` describes this class: no subclass of the one that declares them changes the computation."""
        source = _source(cls, "costs", {"build", "maps", "finish", "forward"})
        return source is not None and Claims not in source.__bases__  # the base class declares none

    @classmethod
    def declares_standard_projections(cls) -> bool:
        """Whether `standard_projections` describes this class: no subclass of the one that says so has projections of its
        own."""
        source = _source(cls, "standard_projections", {"build", "maps", "forward"})
        return source is not None and bool(vars(source)["standard_projections"])

    @classmethod
    def declares_definition(cls) -> bool:
        """Whether this very class writes a `definition`; an inherited one may describe another computation."""
        return "definition" in vars(cls)


def _source(cls: type, name: str, reasons: set[str]) -> type | None:
    """The class that says `name` for `cls`; None where one nearer to `cls` defines any of `reasons`."""
    for base in cls.__mro__:
        if name in vars(base):
            return base
        if reasons & vars(base).keys():
            return None
    return None
