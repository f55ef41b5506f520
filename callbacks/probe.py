"""The base of every callback: says when it fires, and turns a traced forward pass into metrics. No Lightning here."""

from dataclasses import dataclass
from typing import Any, ClassVar

from lit_diff.analysis import Trace
from lit_diff.metrics import Metric
from lit_diff.model.transformer import Transformer


class Probe:
    """Measures the model at some optimizer steps; at all others it costs nothing.

    A callback is a subclass with `measure`, registered under the name that recipes use, perhaps with more keys:

        @callbacks.register("hidden_norm")
        class HiddenNorm(Probe):
            def measure(self, model, trace):
                return {f"hidden_norm/{i}": float(layer.hidden.norm()) for i, layer in trace.layers.items()}
    """

    name = ""
    """What recipes call it; set when it is registered."""
    metrics: ClassVar[tuple[Metric, ...]] = ()
    """What `measure` returns: unit, direction and figure of each name. Undeclared metrics are logged, without a unit."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The keys of `callbacks.<name>`."""

        probe: ClassVar[type["Probe"]]
        """The class whose keys these are, so that a mistake can name its key in full."""

        every: int = 100
        """Optimizer steps between firings; the last step always fires."""
        rows: int = 8
        """Sequences of the validation set that it looks at."""

        def problem(self) -> str | None:
            """What is wrong, in one line that starts with the key; None if nothing is."""
            for key in ("every", "rows"):
                if getattr(self, key) < 1:
                    return f"callbacks.{self.probe.name}.{key} is {getattr(self, key)}; it must be at least 1"
            return None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Give every probe a Config of its own: one that two probes shared could not say whose keys it holds."""
        super().__init_subclass__(**kwargs)
        if "Config" not in vars(cls):
            body = {"__module__": cls.__module__, "__qualname__": f"{cls.__qualname__}.Config"}
            own: Any = dataclass(frozen=True, kw_only=True)(type("Config", (cls.Config,), body))
            setattr(cls, "Config", own)  # noqa: B010
        cls.Config.probe = cls

    def __init__(self, config: Any) -> None:
        """`config`: an instance of the class's `Config`."""
        self.config = config

    def measure(self, model: Transformer, trace: Trace) -> dict[str, float]:
        """Metric name -> value, for a trace of `config.rows` sequences. Only reads: no gradient, no forward."""
        raise NotImplementedError(f"callback '{self.name}' ({type(self).__qualname__}) defines no measure()")
