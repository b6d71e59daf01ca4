"""The command line, as a shell runs it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any


def run(*arguments: object, **keywords: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "orbax_safetensors_layout", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, **keywords
    )
