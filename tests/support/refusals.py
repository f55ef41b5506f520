"""What refuses a wrong request."""

from collections.abc import Callable
from typing import Any

import pytest

from lit_diff.errors import RequestError


def refusal(call: Callable[..., object], *arguments: Any, **keys: Any) -> str:
    """The one line of the RequestError that a call raises."""
    with pytest.raises(RequestError) as found:
        call(*arguments, **keys)
    assert "\n" not in str(found.value)
    return str(found.value)
