"""The command line, as a shell runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from programs import REPOSITORY, program_path


def run(
    *arguments: object, program: str | None = None, **keywords: Any
) -> subprocess.CompletedProcess[str]:
    """Run the command line, or a program of `tests/programs` that calls it."""
    start = ["-m", "orbax_safetensors_layout"] if program is None else [program_path(program)]
    keywords = {"env": {**os.environ, "PYTHONPATH": str(REPOSITORY)}, **keywords}
    command = [sys.executable, *start, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, **keywords
    )
