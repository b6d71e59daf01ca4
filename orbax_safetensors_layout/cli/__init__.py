"""The command line: `orbax-safetensors COMMAND ...`, also `python -m orbax_safetensors_layout`.

Results go to stdout, everything else to stderr. Exit codes: 0; 1 where something is wrong with a
checkpoint; 2 for misuse; 130 after Ctrl-C.
"""

from __future__ import annotations

from .sigint import clean_interrupts

with clean_interrupts(lambda: "orbax-safetensors: interrupted. Nothing was done; run it again."):
    from .main import main

__all__ = ["main"]
