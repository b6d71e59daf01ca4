import json
import sys

import peak_memory

from orbax_safetensors_layout.cli import main

assert main(["plan", *sys.argv[1:], "-q"]) == 0
print(json.dumps([peak_memory.peak_bytes(), "jax" in sys.modules]))
