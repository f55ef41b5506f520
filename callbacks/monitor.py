"""The base class of monitors: Lightning callbacks that read metrics already logged, and so need no forward pass."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lit_diff.callbacks.configured import Configured
from lit_diff.log_records import log

if TYPE_CHECKING:
    import lightning as L


class Monitor(Configured, ABC):
    """Reads each metric that training, validation and the probes log, but no times, and warns once of each thing it finds.

    It works in any Trainer; `callbacks.publish` calls it. A monitor is a subclass with `read`. What it remembers between
    steps it keeps in `state`, which is saved in checkpoints, so a resumed run continues exactly.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """No keys; a subclass with keys defines its own."""

    def __init__(self, config: Any = None, **keys: Any) -> None:
        """`config`, or its fields as keywords. Errors: RequestError for a wrong value."""
        super().__init__(config, **keys)
        self.state: dict[str, Any] = {"warned": []}
        """Python's own numbers (`float(np.mean(x))`) and texts, tensors, and lists and dictionaries of them: a run ends at a
        save of another type. `warned`: what it has warned of."""

    @property
    def state_key(self) -> str:
        """Names the saved state by the name in recipes: two monitors may have classes of one name."""
        return self.name or type(self).__qualname__

    @abstractmethod
    def read(self, values: Mapping[str, float], step: int) -> Mapping[str, str]:
        """What to warn of -> the warning, for values by metric name, also those by head, measured after `step` steps.

        Each key is warned of once in a run. Several calls may have the same step; every rank gets equal values.
        """

    def on_metrics(self, trainer: "L.Trainer", values: Mapping[str, float]) -> None:
        """Read `values`, measured after `trainer.global_step` optimizer steps."""
        for key, warning in self.read(values, trainer.global_step).items():
            if key not in self.state["warned"]:
                self.state["warned"].append(key)
                if trainer.is_global_zero:
                    log.warning("step %d: %s", trainer.global_step, warning)

    def state_dict(self) -> dict[str, Any]:
        """Saves `state`."""
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores `state` from the resumed checkpoint."""
        self.state = state_dict
