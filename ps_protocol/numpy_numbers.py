"""Numbers of numpy, which scripts compute settings as, where a number of Python is expected."""

from __future__ import annotations

from typing import Any

import numpy as np


def as_python(value: Any) -> Any:
    """Returns a number, or a boolean, of numpy as the one of Python; any other value unchanged.

    To `isinstance` only its float64 is a number of Python. Its whole numbers overflow where Python's grow, and JSON
    takes none of them.
    """
    return value.item() if isinstance(value, np.generic) else value
