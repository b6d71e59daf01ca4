"""Regular expressions of configurations."""

from __future__ import annotations

import re

from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.format import short_repr


def compiled_regex(pattern: str, place: str) -> re.Pattern[str]:
    """Return a regular expression; a `MappingError` that names its `place` if it is malformed."""
    try:
        return re.compile(pattern)
    except re.error as error:
        problem = f"the regular expression {short_repr(pattern)} of {place} is malformed: {error}"
        raise MappingError(problem) from error
