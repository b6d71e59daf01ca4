"""`python -m orbax_safetensors_layout`: the command line."""

from __future__ import annotations

import sys

from orbax_safetensors_layout.cli import main

if __name__ == "__main__":
    sys.exit(main())
