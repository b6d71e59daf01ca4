import resource
import sys

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.catalog.catalog import Catalog

try:
    result = osl.verify(sys.argv[2]).ok if sys.argv[1] == "verify" else Catalog.open(sys.argv[2])
except osl.FormatError as error:
    result = error
print(str(result)[:300], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, sep="\n")
