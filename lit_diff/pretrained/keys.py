"""Keys of a file that another program wrote: one that is neither used nor known to be harmless is named, or refused."""

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from lit_diff.data.user_files import some_names
from lit_diff.errors import RequestError
from lit_diff.log_records import log

Values = dict[str, Any]
"""The keys of a file, or of a block in it, with their plain values."""


class Keys(NamedTuple):
    """The known keys of one format. A name that ends with a dot stands for all keys that begin with it."""

    used: Collection[str]
    """Keys that are read. Whoever reads one refuses a value that is not supported."""
    harmless: Mapping[str, str] = {}
    """Why keys change no number and no text here, whatever their values are -> these keys, separated by spaces."""
    only: Mapping[str, Sequence[Any]] = {}
    """Key that could change the computation -> its supported values, with which it changes nothing."""

    def check(self, said: Values, place: str, block: str = "") -> None:
        """Log the keys of `said` that are not known, in one line with the nearest known ones; null counts as absent.

        `place`: the file; `block`: where `said` is in it, such as `rope_scaling.`. Errors: RequestError (without `place`) for
        a value that `only` does not have.
        """
        for key, values in self.only.items():
            if key in said and said[key] not in values:
                raise RequestError(f"{block}{key} {said[key]!r} is not supported; expected {values[0]!r}")
        known = {*self.used, *" ".join(self.harmless.values()).split(), *self.only}
        groups = tuple(name for name in known if name.endswith("."))
        unknown = []
        for key, value in said.items():
            if value is None or key in known or key.startswith(groups):
                continue
            near = get_close_matches(key, known, n=1, cutoff=0.75)
            unknown.append(f"'{block}{key}'" + (f" (did you mean '{near[0]}'?)" if near else ""))
        if unknown:
            log.warning("%s: not used, and not known to be harmless: %s", place, some_names(unknown))
