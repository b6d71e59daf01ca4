"""What becomes of a problem: it is raised, or told along with all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeAlias

from orbax_safetensors_layout.errors import FormatError

Tell: TypeAlias = Callable[[FormatError], object]
"""Is given each problem. If it returns, what is not affected is looked at, too."""


def refuse(problem: FormatError) -> NoReturn:
    """Raises a problem: nothing more is looked at.

    Raises:
        FormatError: The problem.
    """
    raise problem
