import re
import sys
from pathlib import Path

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.catalog import Catalog

try:
    result = osl.verify(sys.argv[2]).ok if sys.argv[1] == "verify" else Catalog.open(sys.argv[2])
except osl.FormatError as error:
    result = error
# `ru_maxrss` would begin with the peak of the process that started this one.
peak = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1]
print(str(result)[:300], peak, sep="\n")
