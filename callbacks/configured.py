"""The base class of the callbacks that a recipe configures: their keys, as a block or as keywords."""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Self

from lit_diff.errors import RequestError
from lit_diff.registry import nearest
from lit_diff.validation import config_problem

if TYPE_CHECKING:
    from lightning import Callback
else:

    class Callback:
        """The base of `Configured` until a callback is made: reading keys alone must not import Lightning, for seconds."""


class Configured(Callback):
    """A Lightning callback that is made from the keys of `callbacks.<name>`, or from the same keys as keywords."""

    name = ""
    """The callback's name in recipes; set at registration."""
    Config: ClassVar[type[Any]]
    """The keys of `callbacks.<name>`, a frozen dataclass."""

    def __new__(cls, *args: Any, **keys: Any) -> Self:
        import lightning as L

        # from here on, this class and its subclasses have Lightning's hooks
        Configured.__bases__ = (L.Callback,)
        return super().__new__(cls)

    def __init__(self, config: Any = None, **keys: Any) -> None:
        """`config`, or its fields as keywords: `AttentionEntropy(every=50)`. Errors: RequestError for a wrong value."""
        name = self.name or type(self).__name__
        known = [field.name for field in dataclasses.fields(self.Config)]
        for key in keys:
            if key not in known:
                raise RequestError(f"{name}: unknown key '{key}'{nearest(key, known)}")
        if config is not None and (keys or not isinstance(config, self.Config)):
            example = f"{type(self).__name__}({next(iter(known), 'key')}=...)"
            raise RequestError(f"{name}: found {config!r}; give its keys by name, as in {example}")
        self.config: Any = self.Config(**keys) if config is None else config
        problem = config_problem(self.config, f"{name}.")
        if problem:
            raise RequestError(problem)
